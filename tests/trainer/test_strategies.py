"""Each strategy is what its name says, and all four train the same model on the same numbers."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.trainer.conftest import Ranks
from tests.trainer.small import EVERY_STRATEGY, recipe, trained
from torch import nn

from ctj_api.spec import Strategy

STEPS = range(1, 11)


def losses_and_norms(strategy: Strategy, **changes: Any) -> tuple[list[float], list[float]]:
    with trained(strategy, **changes) as run:
        run.run(STEPS)
        return run.losses, run.norms


def every_strategy(**changes: Any) -> dict[str, tuple[list[float], list[float]]]:
    return {strategy.value: losses_and_norms(strategy, **changes) for strategy in EVERY_STRATEGY}


def test_ten_steps_agree_with_single(ranks: Ranks) -> None:
    first, second = ranks(every_strategy)
    assert first == second  # ranks agree to the last bit
    losses, norms = first["single"]
    assert losses[-1] < losses[0] - 0.3
    for strategy in EVERY_STRATEGY:
        assert first[strategy.value][0] == pytest.approx(losses, rel=1e-6), strategy
        assert first[strategy.value][1] == pytest.approx(norms, rel=5e-6), strategy


def test_recomputing_blocks_changes_no_number(ranks: Ranks) -> None:
    plain = ranks(losses_and_norms, strategy=Strategy.SINGLE)[0]
    for results in ranks(every_strategy, activationCheckpointing="Blocks"):
        for losses, norms in results.values():
            assert losses == pytest.approx(plain[0], rel=1e-6)
            assert norms == pytest.approx(plain[1], rel=5e-6)


def test_bf16_agrees_over_strategies_and_stays_near_fp32(ranks: Ranks) -> None:
    fp32 = ranks(losses_and_norms, strategy=Strategy.SINGLE)[0]
    results = ranks(every_strategy, precision="bf16")[0]
    losses, _ = results["single"]
    assert losses != fp32[0]
    assert losses == pytest.approx(fp32[0], rel=1e-2)
    for strategy, (others, _) in results.items():
        assert others == pytest.approx(losses, rel=3e-3), strategy


def gradients_at_equal_state(micro_batch_size: int) -> dict[str, float]:
    norms = {}
    for strategy in EVERY_STRATEGY:
        with trained(strategy) as run:
            run.gradients(1, micro_batch_size=micro_batch_size)
            norms[strategy.value] = run.prepared.discard_gradients()
            run.gradients(1, micro_batch_size=micro_batch_size)  # nothing of the discarded ones is left
            assert run.prepared.discard_gradients() == norms[strategy.value]
    return norms


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 4])
def test_gradients_are_sums_however_the_batch_is_accumulated(ranks: Ranks, micro_batch_size: int) -> None:
    whole = ranks(gradients_at_equal_state, micro_batch_size=8)[0]["single"]
    for norms in ranks(gradients_at_equal_state, micro_batch_size=micro_batch_size):
        assert norms == pytest.approx(dict.fromkeys(norms, whole), rel=5e-6)


def is_data_parallel() -> dict[str, Any]:
    with trained(Strategy.DDP) as run:
        reduced = []

        def counting(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            reduced.append(bucket.buffer().numel())
            future = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True).get_future()
            return future.then(lambda done: done.value()[0])

        run.prepared.model.register_comm_hook(None, counting)
        run.gradients(1)
        gradients = torch.cat([p.grad.flatten() for p in run.prepared.inner.parameters()])
        return {
            "class": type(run.prepared.model).__name__,
            "reduced": sum(reduced),
            "elements": run.prepared.num_elements,
            "gradients": gradients.tolist(),
        }


def test_ddp_reduces_every_gradient_once_per_step(ranks: Ranks) -> None:
    first, second = ranks(is_data_parallel)
    assert first["class"] == "DistributedDataParallel"
    assert first["reduced"] == first["elements"]  # two micro batches, one reduction
    assert first["gradients"] == second["gradients"]


def is_sharded() -> dict[str, Any]:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    with trained(Strategy.FSDP) as run:
        run.run(range(1, 2))
        blocks = run.recipe.blocks(run.prepared.inner)
        parameters = list(run.prepared.inner.parameters())
        moments = [s["exp_avg"] for s in run.prepared.optimizer.state.values()]
        return {
            "units": all(isinstance(unit, FSDPModule) for unit in [run.prepared.inner, *blocks]),
            "sharded": all(isinstance(tensor, DTensor) for tensor in [*parameters, *moments]),
            "local": sum(p.to_local().numel() for p in parameters),
            "elements": run.prepared.num_elements,
        }


def test_fsdp_keeps_half_of_everything_on_each_of_two_ranks(ranks: Ranks) -> None:
    first, second = ranks(is_sharded)
    assert first["units"]
    assert first["sharded"]
    assert first["local"] + second["local"] == first["elements"]
    assert 0.4 < first["local"] / first["elements"] < 0.6


def is_partitioned() -> dict[str, Any]:
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    with trained(Strategy.ZERO3) as run:
        run.run(range(1, 2))
        parameters = list(run.prepared.inner.parameters())
        blocks = run.recipe.blocks(run.prepared.inner)
        return {
            "class": type(run.prepared.model).__name__,
            "partitioned": all(p.ds_status is ZeroParamStatus.NOT_AVAILABLE for p in parameters),
            "held": sum(p.numel() for p in parameters),
            "local": sum(p.ds_tensor.numel() for p in parameters),
            "leaves": all(block._z3_leaf for block in blocks),
            "elements": run.prepared.num_elements,
        }


def test_zero3_keeps_half_of_every_parameter_on_each_of_two_ranks(ranks: Ranks) -> None:
    first, second = ranks(is_partitioned)
    assert first["class"] == "DeepSpeedEngine"
    assert first["partitioned"]
    assert first["held"] == 0
    assert first["local"] + second["local"] == first["elements"]
    assert first["leaves"]


def survives_an_infinite_gradient(strategy: Strategy) -> tuple[float, bool, list[float]]:
    with trained(strategy) as run:
        run.run(range(1, 3))
        before = run.prepared.full_weights()
        with run.prepared.accumulating(last=True):
            loss, _ = run.recipe.loss(run.prepared.model, {"tokens": torch.zeros(2, 9, dtype=torch.int64)})
            run.prepared.backward(loss * math.inf)
        norm = run.prepared.step(learning_rate=1.0, clip=1.0)
        after = run.prepared.full_weights()
        unchanged = all(torch.equal(before[name], after[name]) for name in before)
        return norm, unchanged, run.run(range(3, 5))


@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
def test_a_gradient_that_is_not_finite_changes_nothing(ranks: Ranks, strategy: Strategy) -> None:
    undisturbed = ranks(losses_and_norms, strategy=Strategy.SINGLE)[0][0]
    for norm, unchanged, losses in ranks(survives_an_infinite_gradient, strategy=strategy):
        assert not math.isfinite(norm)
        assert unchanged
        assert losses == pytest.approx(undisturbed[2:4], rel=1e-6)


def stays_tied(strategy: Strategy) -> tuple[list[float], list[str], bool]:
    with trained(strategy, of=recipe(tie_embeddings=True)) as run:
        run.run(range(1, 5))
        inner = run.prepared.inner
        return run.losses, sorted(run.prepared.full_weights()), inner.lm_head.weight is inner.model.embed_tokens.weight


@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
def test_tied_embeddings_stay_one_tensor(ranks: Ranks, strategy: Strategy) -> None:
    """huggingface/accelerate#4171: sharding the two apart raised, or parted them silently."""
    single = ranks(stays_tied, strategy=Strategy.SINGLE)[0][0]
    losses, names, is_tied = ranks(stays_tied, strategy=strategy)[0]
    assert is_tied
    assert losses == pytest.approx(single, rel=1e-6)
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def order_of_placement(strategy: Strategy) -> tuple[bool, bool, bool]:
    from tests.trainer.small import CPU, training
    from torch.distributed.fsdp import FSDPModule

    from ctj_trainer.strategies import prepare

    seen = []

    def place(inner: nn.Module, asked: Strategy) -> None:
        block = inner.model.layers[0]
        seen.append((asked is strategy, isinstance(block, FSDPModule), getattr(block, "_z3_leaf", False)))

    settings = training(activationCheckpointing="Blocks")
    prepare(strategy, recipe(), training=settings, micro_batch_size=2, device=CPU, place=place).close()
    (only,) = seen
    return only


@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
def test_compiling_is_placed_once_before_sharding_and_after_leaves(ranks: Ranks, strategy: Strategy) -> None:
    assert ranks(order_of_placement, strategy=strategy)[0] == (True, False, strategy is Strategy.ZERO3)


def compiled_and_eager(strategy: Strategy, **changes: Any) -> dict[str, Any]:
    from torch._dynamo.utils import counters

    from ctj_trainer.compile.policy import CompilePolicy
    from ctj_trainer.compile.regions import place
    from ctj_trainer.recipe import blocks_of

    whole = recipe()

    def compile_in_place(inner: nn.Module, chosen: Strategy) -> None:
        place(inner, blocks_of(inner, whole), policy=CompilePolicy(backend="aot_eager"), strategy=chosen)

    torch._dynamo.reset()
    counters.clear()
    with trained(strategy, of=whole, place=compile_in_place, **changes) as run:
        compiled = run.run(range(1, 5))
    with trained(strategy, of=whole, **changes) as run:
        eager = run.run(range(1, 5))
    seen = {"graphs": counters["stats"]["unique_graphs"], "breaks": dict(counters["graph_break"])}
    return seen | {"compiled": compiled, "eager": eager}


@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
@pytest.mark.parametrize(
    "changes",
    [{}, {"activationCheckpointing": "Blocks", "precision": "bf16"}],
    ids=["plain", "recomputed in bf16"],
)
def test_compiled_blocks_are_one_graph_with_the_same_losses(
    ranks: Ranks, strategy: Strategy, changes: dict[str, Any]
) -> None:
    for seen in ranks(compiled_and_eager, strategy=strategy, **changes):
        assert (seen["graphs"], seen["breaks"]) == (1, {})
        tolerance = 3e-3 if "precision" in changes else 1e-6
        assert seen["compiled"] == pytest.approx(seen["eager"], rel=tolerance)


def test_zero3_without_deepspeed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from ctj_trainer.strategies.zero3 import StrategyUnavailableError, import_deepspeed

    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(StrategyUnavailableError, match=r"pip install 'ctj\[trainer\]'"):
        import_deepspeed(torch.device("cpu"))
