"""Figures reach other people's trackers, in one run for all attempts, and a failing tracker ends nothing."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.trainer.messages import attempt

from ctj_api.attempt import Attempt, Mode
from ctj_trainer.records import StepRecord
from ctj_trainer.trackers import tracking


def message(*trackers: str, number: int = 1) -> Attempt:
    return Attempt.from_document(attempt(number=number, training={"trackers": list(trackers)}))


def record(step: int, loss: float, **changes: Any) -> StepRecord:
    facts = {"grad_norm": 1.0, "learning_rate": 1e-3, "seconds": 0.1, "mode": Mode.EAGER, "tokens": 8}
    return StepRecord(step=step, stage="ddp", attempt=1, loss=loss, **(facts | changes))


def written(root: Path, of: Attempt, records: list[StepRecord], *, resumed_at: int = 0) -> list[str]:
    notices: list[str] = []
    with tracking(of, root=root, is_first_rank=True, resumed_at=resumed_at, notice=notices.append) as trackers:
        for one in records:
            trackers.log(one)
    return notices


def test_tensorboard_shows_one_run_of_all_attempts(tmp_path: Path) -> None:
    """Steps 3 and 4 of the first attempt were lost with it: only the second's are shown."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = [record(step, float(step)) for step in (1, 2, 3, 4)]
    again = [record(step, step + 0.5, evaluation_loss=7.0 if step == 4 else None) for step in (3, 4, 5)]
    assert written(tmp_path, message("tensorboard"), first) == []
    assert written(tmp_path, message("tensorboard", number=2), again, resumed_at=2) == []
    events = EventAccumulator(str(tmp_path / "trackers" / "tensorboard" / "job"))
    events.Reload()
    losses = {event.step: event.value for event in events.Scalars("train/loss")}
    assert losses == {1: 1.0, 2: 2.0, 3: 3.5, 4: 4.5, 5: 5.5}
    assert [event.value for event in events.Scalars("train/evaluation_loss")] == [7.0]
    assert "train/loss_scale" not in events.Tags()["scalars"]


class FakeService(ModuleType):
    """Stands for wandb and mlflow, which are not installed here: records what Accelerate's classes call."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            self.calls.append((name, arguments, keywords))
            return run

        run = SimpleNamespace(info=SimpleNamespace(run_id="r-1"), experiment_id="e-1")
        run.log = lambda *a, **k: self.calls.append(("run.log", a, k))
        run.finish = lambda: None
        return (lambda **_: []) if name == "search_experiments" else call

    def keywords(self, name: str) -> list[dict[str, Any]]:
        return [keywords for called, _, keywords in self.calls if called == name]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> FakeService:
    fake = FakeService(request.param)
    monkeypatch.setitem(sys.modules, request.param, fake)
    return fake


@pytest.mark.parametrize("service", ["wandb"], indirect=True)
def test_wandb_gets_the_jobs_uid_so_that_the_next_attempt_resumes_the_run(tmp_path: Path, service: FakeService) -> None:
    for number in (1, 2):
        assert written(tmp_path, message("wandb", number=number), [record(1, 2.0)]) == []
    opened = service.keywords("init")
    assert [(k["id"], k["resume"], k["project"]) for k in opened] == [("u", "allow", "default")] * 2
    logged = [(a[0]["train/loss"], k["step"]) for name, a, k in service.calls if name == "run.log"]
    assert logged == [(2.0, 1)] * 2


@pytest.mark.parametrize("service", ["mlflow"], indirect=True)
def test_mlflow_continues_the_run_it_was_given_the_first_time(tmp_path: Path, service: FakeService) -> None:
    for number in (1, 2):
        assert written(tmp_path, message("mlflow", number=number), [record(1, 2.0)]) == []
    assert [k["run_id"] for k in service.keywords("start_run")] == [None, "r-1"]


@pytest.mark.parametrize("service", ["wandb"], indirect=True)
def test_a_tracker_that_fails_costs_one_notice_and_leaves_the_others(tmp_path: Path, service: FakeService) -> None:
    def refuse(**_: Any) -> None:
        raise ConnectionError("no route to host")

    service.init = refuse
    notices = written(tmp_path, message("wandb", "tensorboard"), [record(1, 1.0), record(2, 2.0)])
    assert len(notices) == 1
    assert "tracker wandb" in notices[0]
    assert "no route to host" in notices[0]
    assert list((tmp_path / "trackers" / "tensorboard" / "job").iterdir())


def test_only_the_first_rank_writes_and_imports_nothing_where_nothing_is_asked(tmp_path: Path) -> None:
    with tracking(message("tensorboard"), root=tmp_path, is_first_rank=False, resumed_at=0, notice=print) as trackers:
        trackers.log(record(1, 1.0))
    assert list(tmp_path.iterdir()) == []
