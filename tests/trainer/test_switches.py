"""Switches of the process that would make compiled training wrong are refused or reset, with the reason."""

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo.config as dynamo
import torch._functorch.config as functorch
from tests.trainer.unready_models import Ready
from torch import Tensor, nn

from ctj_api.spec import Strategy
from ctj_trainer.checks.switches import refuse_compiled_autograd, whole_activation_budget
from ctj_trainer.compile.in_place import CompiledRegions
from ctj_trainer.compile.policy import CompileConfigError
from ctj_trainer.hooks import no_compile

SIZE = 64


class Dropping(nn.Module):
    """The output and the input's gradient both are twice the mask: the weights are ones on the diagonal."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.eye(SIZE))
        self.second = nn.Parameter(torch.eye(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5) @ self.first @ self.second


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("budget", [1.0, 0.5, 0.0])
def test_c21_masks_agree_at_every_accepted_budget(budget: float) -> None:
    """C21: with a lower budget dropout was drawn again in backward."""
    with functorch.patch(activation_memory_budget=budget):
        model = Dropping()
        told = whole_activation_budget(model)
        assert functorch.activation_memory_budget == 1.0
        model.compile(backend="aot_eager_decomp_partition")
        x = torch.ones(SIZE, SIZE, requires_grad=True)
        y = model(x)
        y.sum().backward()
    assert x.grad is not None
    assert torch.equal(y.detach(), x.grad)
    assert bool(told) is (budget < 1.0)
    assert all("dropout" in text and f"{budget:g} set to 1.0" in text for text in told)


def test_a_budget_stays_where_nothing_random_is_drawn() -> None:
    with functorch.patch(activation_memory_budget=0.5):
        assert whole_activation_budget(Ready()) == ()
        assert functorch.activation_memory_budget == 0.5


@pytest.mark.parametrize("strategy", [Strategy.FSDP, Strategy.ZERO3])
def test_c24_compiled_autograd_of_a_sharded_model_stops_at_start(strategy: Strategy) -> None:
    """C24: setting, conflict and what to change, in one line."""
    with (
        dynamo.patch(compiled_autograd=True),
        pytest.raises(CompileConfigError, match=r"compiled_autograd is on.*turn it off") as error,
    ):
        refuse_compiled_autograd(strategy)
    assert len(str(error.value).splitlines()) == 1
    refuse_compiled_autograd(strategy)


@pytest.mark.parametrize("strategy", [Strategy.SINGLE, Strategy.DDP])
def test_compiled_autograd_of_a_whole_model_may_be_asked_for(strategy: Strategy) -> None:
    with dynamo.patch(compiled_autograd=True):
        refuse_compiled_autograd(strategy)
        assert dynamo.compiled_autograd  # left as it was asked for


def test_an_excluded_module_is_no_compiled_region() -> None:
    model = nn.Sequential(Ready(), Ready())
    no_compile(model[0])
    model[1].compile(backend="eager")
    assert CompiledRegions(model).compiled == ("1",)
