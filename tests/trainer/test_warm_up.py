"""All ranks compile before the first collective of a step, wait for the slowest one outside of any, and name it."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.trainer import stages
from tests.trainer.conftest import Ranks
from tests.trainer.length_recipe import LENGTHS
from tests.trainer.messages import attempt
from torch._dynamo import list_backends, register_backend

from ctj_api.exit_codes import ExitCode
from ctj_api.report import Report
from ctj_trainer.compile import board as boards
from ctj_trainer.compile.board import CompileBoard, mirrored
from ctj_trainer.compile.errors import LateRankError, RanksDifferError
from ctj_trainer.compile.policy import CompileConfigError
from ctj_trainer.compile.session import NoFallbackError
from ctj_trainer.compile.warmup import shaped, warm_up
from ctj_trainer.failures import kind_of
from ctj_trainer.progress import who_compiles

SLOW_SECONDS = 15.0
GROUP_SECONDS = 6.0
VARIED = {"name": "tests.trainer.length_recipe:build", "config": {}}


def report_of(root: Path) -> Report:
    return Report.model_validate_json((root / "run" / "report.json").read_text())


def losses(result: dict[str, Any]) -> list[float]:
    return [record["loss"] for _, record in sorted(result["records"].items())]


def run_with(backend: str, root: str, wait: Callable[[], object], **changes: Any) -> dict[str, Any]:
    """Run the stage with a backend that waits on rank 1, its first time."""
    waited: list[bool] = []

    def slow(graph: Any, _: Any) -> Any:
        if dist.get_rank() == 1 and not waited:
            waited.append(True)
            wait()
        return graph

    if backend not in list_backends(None):
        register_backend(slow, name=backend)
    compile = changes.pop("compile", {}) | {"backend": backend}
    return stages.run(attempt(compile=compile, end=4, **changes), root)


def run_on_a_short_group(root: str) -> dict[str, Any]:
    dist.set_timeout(timedelta(seconds=GROUP_SECONDS))
    try:
        return run_with("slow_once", root, lambda: time.sleep(SLOW_SECONDS))
    finally:
        dist.set_timeout(timedelta(seconds=90))


def test_a_slow_compiler_on_one_rank_does_not_cost_a_short_group_timeout_C09(ranks: Ranks, tmp_path: Path) -> None:
    """C09: rank 1 compiles for 15 s, the gradients' group gives up after 6 s; losses are those of an eager run."""
    eager = ranks(stages.run, document=attempt(mode="Eager", end=4), root=str(tmp_path / "eager"))[0]
    began = time.monotonic()
    result = ranks(run_on_a_short_group, root=str(tmp_path))[0]
    assert time.monotonic() - began > SLOW_SECONDS
    assert losses(result) == losses(eager)  # to the last bit: no generator, weight or moment was touched
    report = report_of(tmp_path)
    assert report.mode == "Compiled"
    assert report.compile is not None
    assert report.compile.first_compiled_seconds is not None


def late(root: str) -> str:
    board = stages.everyone().board
    given_up = f"ctj/met-{board._meetings + 1}/over"
    with pytest.raises(LateRankError) as refused:
        run_with(
            "slow_late", root, lambda: until(lambda: board._store.check([given_up])), compile={"timeoutSeconds": 2}
        )
    assert kind_of(refused.value) is ExitCode.PEER_LOST
    return str(refused.value)


def test_a_rank_that_compiles_too_long_is_named_with_its_seconds_and_the_next_attempt_is_eager(
    ranks: Ranks, tmp_path: Path
) -> None:
    texts = ranks(late, root=str(tmp_path))
    assert texts[0] == texts[1]  # the late one ends too, and does not wait for those that left
    assert "rank 0 waited 2 s (spec.compile.timeoutSeconds) for rank 1 to end its warm-up" in texts[0]
    assert "still compiling: rank 1 for " in texts[0]
    again = attempt(number=2, end=4, lineage=[{"attempt": 1, "maxStep": 12}])
    ranks(stages.run, document=again, root=str(tmp_path))
    report = report_of(tmp_path)
    assert report.mode == "Eager"
    assert report.compile is not None
    assert "waited 2 s" in report.compile.reason


def refused(root: str, backend: str) -> str:
    compile = {"backend": backend, "fallback": "Fail", "timeoutSeconds": 1800}
    with pytest.raises(NoFallbackError) as error:
        stages.run(attempt(compile=compile, end=4), root)
    assert kind_of(error.value) is ExitCode.COMPILE
    return str(error.value)


@pytest.mark.parametrize("backend", ["fails_on_rank_1", "wrong_forward"])
def test_where_eager_is_not_allowed_the_attempt_ends_with_17_and_the_cause(
    ranks: Ranks, tmp_path: Path, backend: str
) -> None:
    texts = ranks(refused, root=str(tmp_path), backend=backend)
    assert texts[0] == texts[1]
    assert "spec.compile.fallback is Fail" in texts[0]
    assert report_of(tmp_path).exit_code == ExitCode.COMPILE


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_declared_lengths_are_compiled_before_the_first_step_and_none_after_it_C30(
    ranks: Ranks, tmp_path: Path, strategy: str
) -> None:
    """C30: eight lengths in random order, all declared; no second of compiling after the warm-up, and no storm."""
    shapes = [{"tokens": [1, length], "targets": [1, length]} for length in LENGTHS]
    document = attempt(
        strategy,
        end=20,
        recipe=VARIED,
        training={"globalBatchSize": 2, "microBatchSize": 1},
        microBatchSize=1,
        compile={"shapes": shapes},
    )
    result = ranks(stages.run, document=document, root=str(tmp_path))[0]
    report = report_of(tmp_path)
    assert report.mode == "Compiled", report.compile
    seconds = [record["compileSeconds"] for _, record in sorted(result["records"].items())]
    assert seconds[0] > 0
    assert set(seconds) == {seconds[0]}
    assert not any(record["compiling"] for record in result["records"].values())
    assert result["records"][20]["graphs"] <= len(LENGTHS)
    assert report.measurements["recompilesAfterWarmup"] == 0


def differ(root: str) -> str:
    torch.set_num_threads(1 + dist.get_rank())
    try:
        with pytest.raises(RanksDifferError) as error:
            stages.run(attempt(end=4), root)
    finally:
        torch.set_num_threads(1)
    assert kind_of(error.value) is ExitCode.CONFIGURATION
    return str(error.value)


def test_ranks_with_other_threads_are_refused_before_anything_is_built(ranks: Ranks, tmp_path: Path) -> None:
    texts = ranks(differ, root=str(tmp_path))
    assert texts[0] == texts[1]
    assert "threads is 2 on rank 1 and 1 on rank 0; set OMP_NUM_THREADS" in texts[0]


def test_warm_up_leaves_buffers_weights_and_generators_as_they_were(ranks: Ranks) -> None:
    assert all(ranks(is_unchanged))


def is_unchanged() -> bool:
    inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
    before = {name: tensor.clone() for name, tensor in inner.state_dict().items()}
    generator = torch.get_rng_state()
    warm_up(
        lambda batch: inner(batch["x"]).sum().backward(),
        [{"x": torch.ones(8, 4)}] * 2,
        inner=inner,
        ranks=stages.everyone(),
    )
    same = all(torch.equal(tensor, before[name]) for name, tensor in inner.state_dict().items())
    return same and torch.equal(torch.get_rng_state(), generator)


def test_a_declared_shape_is_filled_with_the_batchs_own_values() -> None:
    batch = {"tokens": torch.tensor([[3, 5], [7, 9]]), "weight": torch.ones(2)}
    larger = shaped(batch, {"tokens": (3, 5)})
    assert larger["tokens"].shape == (3, 5)
    assert set(larger["tokens"].flatten().tolist()) == {3, 5, 7, 9}
    assert torch.equal(larger["weight"], batch["weight"])


@pytest.mark.parametrize(
    ("sizes", "says"), [({"ids": (1, 2)}, "'ids'; the batch has tokens"), ({"tokens": (4,)}, "give as many sizes")]
)
def test_a_shape_that_does_not_fit_the_batch_is_refused(sizes: dict[str, tuple[int, ...]], says: str) -> None:
    with pytest.raises(CompileConfigError, match=says):
        shaped({"tokens": torch.zeros(2, 2)}, sizes)


def two_boards() -> tuple[CompileBoard, CompileBoard]:
    store = dist.HashStore()
    return CompileBoard(store, rank=0, world_size=2), CompileBoard(store, rank=1, world_size=2)


def test_a_meeting_lets_nobody_through_before_the_last() -> None:
    first, second = two_boards()
    passed: list[float] = []

    def come(board: CompileBoard) -> None:
        board.meet(timeout_seconds=60)
        passed.append(time.monotonic())

    thread = threading.Thread(target=come, args=(first,))
    thread.start()
    time.sleep(0.2)
    assert passed == []
    last = time.monotonic()
    come(second)
    thread.join(10)
    assert min(passed) >= last


def test_a_rank_that_neither_comes_nor_compiles_is_told_from_one_that_compiles() -> None:
    first, second = two_boards()
    with pytest.raises(LateRankError, match="for rank 1 to end its warm-up; none of them says that it compiles"):
        first.meet(timeout_seconds=0.05)
    with second.compiling():
        assert first.who().startswith("still compiling: rank 1 for ")
        assert (first.elsewhere(), second.elsewhere()) == (1, 0)
    assert first.who() == ""


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_pod_shows_that_a_rank_of_another_pod_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boards, "LOOK_SECONDS", 0.02)
    ours, theirs = two_boards()
    with mirrored(ours, tmp_path):
        with ours.compiling():  # said by a flag of its own
            time.sleep(0.1)
            assert who_compiles(tmp_path) == {}
        with theirs.compiling():
            until(lambda: set(who_compiles(tmp_path)) == {"elsewhere"})
        until(lambda: who_compiles(tmp_path) == {})
