"""Do the installed torch and its wrappers work in the two orders that are used here? A real run of each.

Wrapping compiles after preparing (prepare, then compile); in-place compiles before wrapping, so that names stay clean.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ctj_trainer.checks.boundary import first_line
from ctj_trainer.checks.finding import Finding, Rule
from ctj_trainer.checks.group import alone
from ctj_trainer.hooks.graphs import GraphLog

ORDER_TEST = Rule(check="versions", name="the order test passes: prepared and compiled equals eager")


class Small(nn.Module):
    """A block and a head of a class of their own: torch skips frames of torch.nn."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        return torch.tanh(self.inner(x)) * x


def order_test() -> list[Finding]:
    """Run both orders on a world of one and compare with eager."""
    with alone():
        outcomes = {
            "prepare, then compile": _difference(_wrapping),
            "compile in place, then prepare": _difference(_in_place),
        }
    return judge_orders(outcomes)


def judge_orders(outcomes: Mapping[str, str]) -> list[Finding]:
    """Judge what went wrong per order; an empty text is nothing."""
    failures = [
        ORDER_TEST.fails(order, evidence=f"{order}: {trouble}", remedy="install the versions of requirements/run.lock")
        for order, trouble in outcomes.items()
        if trouble
    ]
    return ORDER_TEST.judge(failures, looked_at=f"{len(outcomes)} orders, loss and gradients equal to eager")


def _difference(prepare: Callable[[nn.Module, GraphLog], nn.Module]) -> str:
    torch._dynamo.reset()
    x = torch.linspace(-1, 1, 16).view(2, 8)
    plain, model, log = Small(), Small(), GraphLog()
    model.load_state_dict(plain.state_dict())
    try:
        loss = prepare(model, log)(x).sum()
        loss.backward()
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"
    plain(x).sum().backward()
    if not log.graphs:
        return "no graph was made"
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    same = all(
        one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad) for one, other in pairs
    )
    return "" if same else "gradients differ from eager"


def _wrapped(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def _wrapping(model: nn.Module, log: GraphLog) -> nn.Module:
    compiled: nn.Module = torch.compile(_wrapped(model), backend=log)  # type: ignore[assignment]
    return compiled


def _in_place(model: nn.Module, log: GraphLog) -> nn.Module:
    model.compile(backend=log)
    return _wrapped(model)
