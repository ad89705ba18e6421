"""What happened in each optimizer step? One line per step in `steps.jsonl` of the attempt's folder, by rank 0.

An interrupted attempt may have written steps that its successor repeats: the newer line of a step wins.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from ctj_api.attempt import Mode
from ctj_api.model import Contract
from ctj_api.names import STEPS_FILE

MOST_IN_MEMORY = 10_000
"""Steps a rank remembers, about 1 KB each: times and throughput of a long stage are those of its newest steps."""


class StepRecord(Contract):
    """One optimizer step; compile figures are totals since the attempt began."""

    step: int
    stage: str
    attempt: int
    loss: float
    grad_norm: float
    learning_rate: float
    seconds: float
    mode: Mode
    tokens: int
    replay: bool = False
    compiling: bool = False  # something was compiled in this step, so its duration says nothing about speed
    recompiles: int = 0
    graphs: int = 0
    compile_seconds: float = 0.0
    memory_bytes: int = 0
    skipped: bool = False  # fp16 gradients overflowed: no update, and a smaller loss scale from the next step on
    loss_scale: float | None = None
    evaluation_loss: float | None = None  # on held-out samples, after this step
    at: float | None = None  # end of the step, seconds since the epoch


class RecordWriter:
    """Appends lines; each is complete or, after a crash, the last and ignored."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / STEPS_FILE
        self._file: TextIO = path.open("a", encoding="utf-8")
        if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
            self._file.write("\n")  # the last line of a process that was killed

    def add(self, record: StepRecord) -> None:
        """Append one step."""
        self._file.write(record.model_dump_json(by_alias=True) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_records(folder: Path, *, until: int | None = None) -> dict[int, StepRecord]:
    """Return the steps of one attempt by number, up to and including `until`; a later line of a step wins."""
    try:
        lines = (folder / STEPS_FILE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    records: dict[int, StepRecord] = {}
    for line in lines:
        try:
            record = StepRecord.model_validate_json(line)
        except ValueError:
            continue  # torn by a kill
        if until is None or record.step <= until:
            records[record.step] = record
    return records


def stage_history(folders: Iterable[Path], *, stage: str, until: int) -> dict[int, StepRecord]:
    """Return the steps of a stage that earlier attempts left, oldest folder first, up to the resumed step."""
    history: dict[int, StepRecord] = {}
    for folder in folders:
        history.update({s: r for s, r in read_records(folder, until=until).items() if r.stage == stage})
    return history


def forget_old(records: dict[int, StepRecord], *, replay_until: int, most: int = MOST_IN_MEMORY) -> None:
    """Keep the replay window and the newest `most` steps; steps.jsonl holds all of them."""
    while len(records) > most:  # the oldest came first
        oldest = next((step for step in records if step > replay_until), None)
        if oldest is None:
            return
        del records[oldest]
