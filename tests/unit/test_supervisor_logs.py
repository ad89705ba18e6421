"""What workers print is copied whole; what it takes on disk is bounded."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ctj_trainer.supervisor.logs import BoundedFile, WorkerLogs, write_out

MIB = 1 << 20
LINE = b"a line as a training prints it, some 64 bytes long, many times\n"


@pytest.fixture
def log(tmp_path: Path) -> Iterator[int]:
    """A file as the local runner opens it for a supervisor."""
    descriptor = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    yield descriptor
    os.close(descriptor)


def on_disk(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_a_long_log_keeps_its_beginning_and_its_end(log: int, tmp_path: Path) -> None:
    bounded = BoundedFile(log, head=MIB, tail=2 * MIB)
    os.write(log, b"first\n")
    for _ in range(40):
        os.write(log, LINE * (MIB // len(LINE)))
        bounded.keep_ends()
    os.write(log, b"last\n")
    bounded.keep_ends()
    assert on_disk(tmp_path / "log") <= 6 * MIB
    text = (tmp_path / "log").read_bytes()
    assert len(text) > 39 * MIB, "positions stay what they were"
    assert text.startswith(b"first\n" + LINE)
    assert text.endswith(LINE * (MIB // len(LINE)) + b"last\n")


def test_a_short_log_is_left_alone(log: int, tmp_path: Path) -> None:
    bounded = BoundedFile(log, head=MIB, tail=2 * MIB)
    os.write(log, LINE * (3 * MIB // len(LINE)))
    bounded.keep_ends()
    assert b"\0" not in (tmp_path / "log").read_bytes()


def test_a_pipe_is_somebody_elses_to_bound() -> None:
    reading, writing = os.pipe()
    os.write(writing, LINE)
    BoundedFile(writing, head=0, tail=0).keep_ends()
    os.close(writing)
    with os.fdopen(reading, "rb") as output:
        assert output.read() == LINE


def test_what_a_worker_prints_is_copied_whole_and_given_back_to_the_disk(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run" / "attempt_0" / "0" / "stdout.log"
    path.parent.mkdir(parents=True)
    logs = WorkerLogs(tmp_path, processes=1, global_rank=lambda local: local + 3)
    lines = 0
    with path.open("wb") as worker:  # torchrun's redirect: the worker's own position, no appending
        for _ in range(10):
            worker.write(b"".join(b"%08d " % (lines + index) + LINE for index in range(20_000)))
            worker.flush()
            lines += 20_000
            logs.pump()
        worker.write(b"unfinished")
    logs.finish()
    printed = capfd.readouterr().out.splitlines()
    assert len(printed) == lines + 1
    assert [line[:17] for line in printed[::50_000]] == [f"[rank 3] {n:08d}" for n in (0, 50_000, 100_000, 150_000)] + [
        "[rank 3] unfinish"
    ]
    assert logs.last_lines(3).endswith("unfinished")
    assert path.stat().st_size > 13 * MIB
    assert on_disk(path) <= 2 * MIB


def test_a_line_without_an_end_is_shown_in_pieces(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run" / "attempt_0" / "0" / "stderr.log"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\r 50% of a progress bar" * 40_000)
    logs = WorkerLogs(tmp_path, processes=1, global_rank=lambda local: local)
    logs.pump()
    assert capfd.readouterr().out.count("progress bar") > 30_000
    logs.finish()
    assert max(map(len, logs.last_lines(0).split("\n"))) <= 2 << 16


def test_a_full_disk_costs_lines_and_not_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr("ctj_trainer.supervisor.logs._STDOUT", full)
    write_out("nobody will read this\n")
    os.close(full)
