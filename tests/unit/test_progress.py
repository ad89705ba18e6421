"""What a running pod says of itself, and what it is told."""

import time
from pathlib import Path

import pytest

from ctj_api.attempt import Mode
from ctj_api.control import Control, StopControl
from ctj_trainer import progress
from ctj_trainer.controls import ControlFile
from ctj_trainer.progress import ProgressWriter, clear_progress, compiling, read_progress, who_compiles


def test_a_new_phase_is_seen_at_once_and_the_last_step_at_the_end(tmp_path: Path) -> None:
    with ProgressWriter(tmp_path, attempt=2, mode=Mode.COMPILED) as pod:
        pod.update(phase=progress.TRAINING)
        seen = read_progress(tmp_path)
        assert seen is not None
        assert (seen.attempt, seen.phase, seen.mode) == (2, progress.TRAINING, Mode.COMPILED)
        for step in range(1, 20):
            pod.update(step=step, loss=float("nan"))
    seen = read_progress(tmp_path)
    assert seen is not None
    assert seen.step == 19
    assert seen.loss != seen.loss  # NaN survives the way


def test_the_heart_beats_while_the_step_is_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "HEARTBEAT_SECONDS", 0.02)
    with ProgressWriter(tmp_path, attempt=1, mode=Mode.EAGER):
        first = read_progress(tmp_path)
        assert first is not None
        deadline = time.monotonic() + 10
        while (now := read_progress(tmp_path)) is not None and now.updated_at == first.updated_at:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_folder_without_progress_says_nothing(tmp_path: Path) -> None:
    assert read_progress(tmp_path) is None
    (tmp_path / "progress.json").write_text("{")
    assert read_progress(tmp_path) is None


def test_any_rank_may_say_that_it_compiles(tmp_path: Path) -> None:
    with compiling(tmp_path, rank=1):
        [(rank, seconds)] = who_compiles(tmp_path).items()
        assert rank == "1"
        assert 0 <= seconds < 60
    assert who_compiles(tmp_path) == {}


def test_an_earlier_life_of_the_folder_is_forgotten(tmp_path: Path) -> None:
    with ProgressWriter(tmp_path, attempt=1, mode=Mode.EAGER):
        pass
    (tmp_path / "compiling-0").touch()
    clear_progress(tmp_path)
    assert list(tmp_path.iterdir()) == []


def write(path: Path, **control: object) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(Control.model_validate({"attempt": 1, **control}).model_dump_json(by_alias=True))
    draft.replace(path)


def test_the_newest_control_state_of_this_attempt_wins(tmp_path: Path) -> None:
    path = tmp_path / "control.json"
    control = ControlFile(path, attempt=1)
    assert control.read() == Control(attempt=1, sequence=0)
    write(path, sequence=5, stop=StopControl.CHECKPOINT, reason="suspended")
    assert control.read().reason == "suspended"
    write(path, sequence=4)
    assert control.read().sequence == 5
    write(path, attempt=2, sequence=9)
    assert control.read().sequence == 5
    write(path, sequence=6)
    assert control.read() == Control(attempt=1, sequence=6)
    path.write_text('{"attempt": 1, "seq')
    assert control.read().sequence == 6
    path.unlink()
    assert control.read().sequence == 6


def test_a_control_file_behind_a_replaced_folder_is_followed(tmp_path: Path) -> None:
    """Kubernetes swaps a symbolic link to a new folder."""
    link = tmp_path / "data"
    for sequence in (1, 2):
        folder = tmp_path / f"version-{sequence}"
        folder.mkdir()
        write(folder / "control.json", sequence=sequence)
        fresh = tmp_path / "fresh"
        fresh.symlink_to(folder)
        fresh.replace(link)
        if sequence == 1:
            control = ControlFile(link / "control.json", attempt=1)
        assert control.read().sequence == sequence
