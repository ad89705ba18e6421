"""Which modules become regions, how they are compiled, and that nothing of it shows in names or stays silent."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.config as dynamo
import torch.nn.functional as F
from tests.trainer.conftest import Ranks
from tests.trainer.hooked_models import replaced_by_disabled
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

from ctj_api.spec import CompileScope, Strategy
from ctj_trainer.compile.blocks import repeated_blocks
from ctj_trainer.compile.entry import compiled_regions, is_compiled, uncaptured, unwrapped
from ctj_trainer.compile.lengths import Lengths
from ctj_trainer.compile.policy import CompileConfigError, CompilePolicy
from ctj_trainer.compile.regions import Placement, place

# torch asks every input of a graph for its gradient, and warns that an activation has none.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
WIDTH = 16


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Other(Block):
    """Another class in the same list, as in hybrid models."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(self.linear(x))


class Head(nn.Module):
    """A head worth compiling: layers to fuse."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(F.gelu(self.inner(x)))


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.up(x))


class MixtureBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts[0](x)


class Model(nn.Module):
    def __init__(self, body: nn.Module, head: nn.Module | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.body = body
        self.head = head or nn.Linear(WIDTH, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.body.values() if isinstance(self.body, nn.ModuleDict) else self.body.children():
            x = block(x)
        return self.head(x)


def stack(count: int = 3) -> nn.ModuleList:
    return nn.ModuleList(Block() for _ in range(count))


class Stage(nn.Module):
    """A stage of a vision model: another width than the next one's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.widen = nn.Linear(width, 2 * width)


def tokens(length: int = 6, batch: int = 2) -> Tensor:
    return torch.arange(batch * length).view(batch, length) % 32


def placed(
    model: nn.Module, *, strategy: Strategy = Strategy.SINGLE, lengths: Lengths | None = None, **asked: Any
) -> Placement:
    policy = CompilePolicy(**({"backend": "eager"} | asked))
    return place(model, repeated_blocks(model), policy=policy, strategy=strategy, lengths=lengths)


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with dynamo.patch(capture_scalar_outputs=False, skip_fwd_side_effects_in_bwd_under_checkpoint=False):
        yield


@pytest.mark.parametrize(
    "body",
    [
        stack(),
        nn.Sequential(Block(), Block(), Block()),
        nn.ModuleDict({"a": Block(), "b": Block(), "c": Block()}),
        nn.ModuleList([Block(), Other(), Block()]),
    ],
    ids=["ModuleList", "Sequential", "ModuleDict", "two classes"],
)
def test_blocks_are_found_wherever_they_are_held(body: nn.Module) -> None:
    model = Model(body)
    before = list(model.state_dict())
    expected = model(tokens())

    placement = placed(model, backend="aot_eager")

    names = [f"body.{name}" for name, _ in body.named_children()]
    assert sorted(placement.regions) == sorted(names) == sorted(compiled_regions(model))
    assert placement.eager == ("embedding", "head")
    assert torch.equal(model(tokens()), expected)
    assert counters["stats"]["unique_graphs"] == len({type(block) for block in body.children()})
    assert list(model.state_dict()) == before
    assert type(body[0] if not isinstance(body, nn.ModuleDict) else body["a"]) is Block


def test_nested_lists_are_compiled_where_they_repeat() -> None:
    """Experts inside layers stay inside; stages of growing width are opened."""
    mixture = Model(nn.ModuleList(MixtureBlock() for _ in range(3)))
    vision = nn.ModuleList([Stage(8), Stage(16), Stage(32)])

    assert repeated_blocks(mixture) == list(mixture.body.children())
    assert [type(block) for block in repeated_blocks(vision)] == [Block] * 6
    both = nn.ModuleDict({"encoder": stack(2), "decoder": stack(2)})
    assert len(repeated_blocks(both)) == 4
    shared = Block()
    assert repeated_blocks(nn.ModuleList([shared, shared])) == [shared]


def test_a_small_list_beside_the_blocks_is_none() -> None:
    model = Model(stack(40), head=nn.ModuleList(Expert() for _ in range(2)))

    assert set(repeated_blocks(model)) == set(model.body.children())


def test_a_head_with_layers_to_fuse_is_compiled_apart() -> None:
    model = Model(stack(2), head=Head())

    placement = placed(model)

    assert placement.regions == ("body.0", "body.1", "head")
    model(tokens())
    assert counters["stats"]["unique_graphs"] == 2
    table = str(placement)
    assert "left over, with layers to fuse" in table
    assert "one layer: nothing to fuse" in table
    assert placed(Model(stack(2), head=Head()), strategy=Strategy.ZERO3).eager == ("embedding", "head")


def test_torchs_own_blocks_are_compiled_too() -> None:
    """torch.compile skips frames of torch.nn: compiled in place the usual way, nothing would be captured."""
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
    model = Model(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).layers)
    expected = model(tokens())

    placed(model)

    assert torch.allclose(model(tokens()), expected)
    assert counters["stats"]["unique_graphs"] == 1
    assert not uncaptured(model)
    whole = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    assert placed(whole).scope is CompileScope.FULL
    whole(torch.ones(2, 4))
    assert counters["stats"]["unique_graphs"] == 2


def test_equal_blocks_share_one_graph_and_one_budget_per_role() -> None:
    """A storm of one role (a reference model of the same classes) leaves the other's budget alone."""

    class Counting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.calls

    stormy, calm = (Model(nn.ModuleList(Counting() for _ in range(2))) for _ in range(2))
    counter = CompileCounter()
    placed(stormy, recompile_limit=3, backend=counter)
    placed(calm, recompile_limit=3, backend=counter)
    for _ in range(8):
        stormy(tokens())
    spent = counter.frame_count

    calm(tokens())

    assert spent == 3
    assert counter.frame_count == spent + 1


def test_a_forward_hidden_by_a_hook_is_never_silent() -> None:
    """C15: a hook swaps forward for a function the compiler may not enter; the forward inside is compiled."""
    model = Model(stack(2))
    for block in model.body.children():
        replaced_by_disabled(block)
    expected = model(tokens())

    placement = placed(model)

    assert torch.equal(model(tokens()), expected)
    assert counters["stats"]["unique_graphs"] >= 1
    assert any("streamed" in text for text in placement.notices)


def test_a_region_without_a_graph_is_named_after_the_first_call() -> None:
    """C15, hook added later: nothing is captured, and that is told."""
    model = Model(stack(2))
    placed(model)
    replaced_by_disabled(model.body[1])  # type: ignore[index]

    model(tokens())

    assert compiled_regions(model) == ["body.0"]
    assert uncaptured(model) == ["body.1"]


def test_what_somebody_compiled_before_is_undone_once() -> None:
    """C25: the wrapper's signature and names would hide the model's own."""
    from accelerate.utils import compile_regions

    for given in (
        torch.compile(Model(stack(2)), backend="eager"),
        compile_regions(Model(stack(2)), backend="eager"),
        nn.parallel.DataParallel(Model(stack(2))).module,
    ):
        inner, undone = unwrapped(given)
        assert type(inner) is Model
        assert list(inner.state_dict()) == list(Model(stack(2)).state_dict())
        assert bool(undone) == (type(given) is not Model or "_orig_mod" in given.__dict__)
        assert not is_compiled(inner)
    by_hand = Model(stack(2))
    by_hand.body[0] = torch.compile(by_hand.body[0], backend="eager")  # type: ignore[index, operator]
    by_hand.body[1].compile(backend="eager")  # type: ignore[index]
    assert compiled_regions(by_hand) == ["body.0", "body.1"]
    inner, undone = unwrapped(by_hand)
    assert undone == ["body.0", "body.1"]
    assert not any("_orig_mod" in name for name in inner.state_dict())
    assert placed(inner).regions == ("body.0", "body.1")


def test_a_copy_is_not_called_compiled() -> None:
    model = Model(stack(2))
    placed(model)

    assert is_compiled(model)
    assert not is_compiled(copy.deepcopy(model))


def test_torch_is_told_what_experts_and_recomputation_need() -> None:
    plain = placed(Model(stack(2)))
    assert not dynamo.capture_scalar_outputs
    assert not plain.notices
    mixture = Model(nn.ModuleList(MixtureBlock() for _ in range(2)))
    assert "capture_scalar_outputs" in placed(mixture).notices[0]
    assert dynamo.capture_scalar_outputs
    from ctj_trainer.strategies.foundation import recompute_in_backward

    recomputed = Model(stack(2))
    for block in recomputed.body.children():
        recompute_in_backward(block)
    assert "skip_fwd_side_effects" in placed(recomputed).notices[0]


@pytest.mark.parametrize("strategy", [Strategy.ZERO3, Strategy.FSDP])
def test_compiled_autograd_is_refused_where_parameters_are_partitioned(strategy: Strategy) -> None:
    """C24: it would trace parameters of size 0, and die naming neither ZeRO nor compile."""
    with dynamo.patch(compiled_autograd=True):
        with pytest.raises(CompileConfigError) as caught:
            placed(Model(stack(2)), strategy=strategy)
        placed(Model(stack(2)), strategy=Strategy.DDP)

    assert "compiled_autograd is on: under" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_declared_lengths_are_compiled_once_for_all() -> None:
    counter = CompileCounter()
    lengths = Lengths({"tokens": (1,)})
    model = Model(stack(3))
    placed(model, backend=counter, dynamic_dims={"tokens": (1,)}, lengths=lengths)

    for length in (6, 9, 16, 3):  # 16 is the hidden size too
        batch = {"tokens": tokens(length)}
        lengths.see(batch)
        model(batch["tokens"])

    assert counter.frame_count == 1


def test_without_a_declaration_the_second_length_makes_it_dynamic() -> None:
    counter = CompileCounter()
    model = Model(stack(3))
    placed(model, backend=counter)

    for length in (6, 9, 16, 3):
        model(tokens(length))

    assert counter.frame_count == 2


def test_a_declared_length_that_is_not_there_is_refused_with_what_is() -> None:
    for dims, part in (({"input_ids": (1,)}, "the batch has tokens"), ({"tokens": (2,)}, "dimensions 0 to 1")):
        with pytest.raises(CompileConfigError, match=part):
            Lengths(dims).see({"tokens": tokens()})


def sharded_in_place() -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    seen: dict[str, Any] = {}
    for mode in ("eager", "compiled"):
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        model = Model(stack(3), head=Head())
        if mode == "compiled":
            placed(model, strategy=Strategy.FSDP, backend="aot_eager")
        mesh = init_device_mesh("cpu", (2,))
        for unit in (*model.body.children(), model):
            fully_shard(unit, mesh=mesh)
        losses = []
        for _ in range(2):
            loss = model(tokens()).square().mean()
            loss.backward()
            losses.append(float(loss))
        seen[mode] = {
            "units": sum(isinstance(module, FSDPModule) for module in model.modules()),
            "names": [name for name, _ in model.named_parameters()],
            "losses": losses,
            "graphs": counters["stats"]["unique_graphs"],
            "regions": compiled_regions(model),
        }
    return seen


def test_regions_under_fsdp_keep_units_names_and_hooks(ranks: Ranks) -> None:
    """C11: a wrapper's call skips the sharding hooks; in place they fire."""
    for seen in ranks(sharded_in_place):
        eager, compiled = seen["eager"], seen["compiled"]
        assert eager["units"] == compiled["units"] == 4
        assert eager["names"] == compiled["names"]
        assert eager["losses"] == compiled["losses"]
        assert (eager["graphs"], compiled["graphs"]) == (0, 2)
        assert compiled["regions"] == ["body.0", "body.1", "body.2", "head"]


def test_a_block_that_shares_a_weight_is_sharded_with_what_it_shares_it_with() -> None:
    """C39: one parameter in two FSDP groups raises, or comes apart and trains as two."""
    from ctj_trainer.strategies.fsdp import untied

    model = Model(stack(3))
    blocks = list(model.body.children())
    assert untied(blocks, model) == blocks
    model.tied = nn.Linear(WIDTH, WIDTH)
    model.tied.weight = blocks[1].linear.weight  # type: ignore[assignment, union-attr]

    assert untied(blocks, model) == [blocks[0], blocks[2]]
    inside = Block()
    inside.again = nn.Linear(WIDTH, WIDTH)
    inside.again.weight = inside.linear.weight
    assert untied([inside], nn.Sequential(inside)) == [inside]
