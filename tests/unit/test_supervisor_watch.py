"""When does the supervisor end its workers: hung, silent, or too slow to stop."""

from collections.abc import Mapping
from typing import Any

import pytest

from ctj_api.attempt import Mode
from ctj_api.exit_codes import ExitCode
from ctj_api.report import Progress
from ctj_trainer import progress as phases
from ctj_trainer.supervisor.watch import LINGER_SECONDS, End, Patience, Stop, Watch, stop_seconds

NOBODY: Mapping[str, float] = {}
LIMITS = Patience(heartbeat=60, step=300, compile=1800, slow=1200)


class Scene:
    """A watch and a clock; `at` moves the clock and looks."""

    def __init__(self) -> None:
        self.watch = Watch(LIMITS, now=0.0)
        self.stop: Stop | None = None
        self._state: dict[str, Any] | None = None

    def tell(self, **state: Any) -> None:
        self._state = {"attempt": 1, "step": 0, "mode": Mode.EAGER, **(self._state or {}), **state}

    def at(
        self, now: float, *, silent: bool = False, compiling: Mapping[str, float] = NOBODY, settled: bool = False
    ) -> End | None:
        seen = None
        if self._state is not None:
            if not silent:
                self._state["updated_at"] = now
            seen = Progress(**self._state)
        return self.watch.look(now=now, progress=seen, compiling=compiling, settled=settled, stop=self.stop)


def hung(end: End | None) -> bool:
    return end is not None and end.hung and end.code is ExitCode.HANG


@pytest.fixture
def training() -> Scene:
    scene = Scene()
    scene.tell(phase=phases.TRAINING, step=3)
    assert scene.at(10) is None
    return scene


def test_a_beating_heart_without_steps_is_a_hang(training: Scene) -> None:
    assert training.at(309) is None
    end = training.at(310)
    assert hung(end)
    assert end is not None
    assert "after step 3" in end.message


def test_steps_keep_it_alive(training: Scene) -> None:
    for step in range(4, 30):
        training.tell(step=step)
        assert training.at(step * 200.0) is None


def test_a_silent_process_is_found_before_a_slow_one(training: Scene) -> None:
    assert training.at(69, silent=True) is None
    assert hung(training.at(70, silent=True))


def test_slow_steps_get_ten_times_their_own_duration(training: Scene) -> None:
    training.tell(step=4, step_seconds=100.0)
    assert training.at(20) is None
    assert training.at(1019) is None
    assert hung(training.at(1020))


def test_a_compilation_has_its_own_limit(training: Scene) -> None:
    training.tell(phase=phases.COMPILING)
    assert training.at(20) is None
    assert training.at(1819) is None
    assert hung(training.at(1820))


def test_ranks_that_wait_for_a_compiling_one_are_not_hung(training: Scene) -> None:
    assert training.at(1500, compiling={"1": 1400.0}) is None
    assert hung(training.at(1501))


def test_a_wait_at_step_500_lasts_as_long_as_a_rank_of_any_pod_compiles_and_names_it(training: Scene) -> None:
    training.tell(step=500)
    assert training.at(20) is None
    assert training.at(1800, compiling={"elsewhere": 1500.0}) is None
    end = training.at(1820, compiling={"1": 1790.0, "elsewhere": 1520.0})
    assert hung(end)
    assert end is not None
    assert end.message.endswith("compiling: rank 1 for 1790 s, a rank of another pod for 1520 s")


def test_a_start_without_a_word_ends_after_the_slow_limit() -> None:
    scene = Scene()
    assert scene.at(1199) is None
    assert hung(scene.at(1200))


def test_processes_that_linger_after_their_last_word_are_ended(training: Scene) -> None:
    assert training.at(20, settled=True) is None
    assert training.at(20 + LINGER_SECONDS - 1, settled=True) is None
    assert training.at(20 + LINGER_SECONDS, settled=True) is not None


def test_a_stop_gives_the_workers_its_seconds_and_then_says_what_is_lost(training: Scene) -> None:
    training.tell(step=4)
    training.stop = Stop(at=20, seconds=15, reason="SIGTERM", hard=True)
    assert training.at(34) is None
    end = training.at(35)
    assert end is not None
    assert end.code is ExitCode.KILLED
    assert "terminationGracePeriodSeconds" in end.message


@pytest.mark.parametrize("hard", [True, False])
def test_only_a_threatened_kill_cuts_a_save(training: Scene, hard: bool) -> None:
    training.tell(step=4, phase=phases.SAVING)
    training.stop = Stop(at=20, seconds=15, reason="stop", hard=hard)
    assert (training.at(36) is not None) == hard


def test_a_stop_during_the_first_compilation_ends_at_once_and_counts_as_a_stop() -> None:
    scene = Scene()
    scene.tell(phase=phases.LOADING)
    scene.at(1)
    scene.tell(phase=phases.COMPILING, step=20)  # resumed from step 20
    scene.at(2)
    scene.stop = Stop(at=3, seconds=15, reason="SIGTERM", hard=True)
    end = scene.at(3)
    assert end is not None
    assert end.code is ExitCode.STOPPED


def test_a_stop_during_a_later_compilation_waits_for_the_step() -> None:
    scene = Scene()
    scene.tell(phase=phases.TRAINING, step=20)
    scene.at(1)
    scene.tell(phase=phases.COMPILING, step=25)
    scene.stop = Stop(at=2, seconds=15, reason="SIGTERM", hard=True)
    assert scene.at(3) is None


def test_after_a_save_there_is_nothing_to_lose(training: Scene) -> None:
    training.tell(step=7)
    training.at(20)
    assert not training.watch.nothing_to_lose
    training.tell(checkpoint_step=7)
    training.at(21)
    assert training.watch.nothing_to_lose


@pytest.mark.parametrize(("grace", "seconds"), [(300, 285), (30, 15), (10, 5)])
def test_a_margin_of_the_grace_period_is_kept_for_leaving(grace: float, seconds: float) -> None:
    assert stop_seconds(grace) == seconds
