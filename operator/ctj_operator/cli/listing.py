"""`ctj list` and `ctj watch`: local jobs seen from outside, without touching them."""

import time
from pathlib import Path

from ctj_api.exit_codes import RunExit
from ctj_api.status import Phase
from ctj_operator.cli import words
from ctj_operator.cli.places import stored_jobs
from ctj_operator.cli.screens import screen_for_output
from ctj_operator.core.decision import Event, EventType
from ctj_operator.local.lock import holder_of
from ctj_operator.local.refusal import Refusal
from ctj_operator.local.runner import Screen, snapshot
from ctj_operator.local.store import Store

_POLL_SECONDS = 0.25
_OVER = {Phase.SUCCEEDED: RunExit.SUCCEEDED, Phase.FAILED: RunExit.FAILED, Phase.HELD: RunExit.HELD}


def rows(work_dir: Path) -> list[dict[str, object]]:
    """Return one document per job; a job whose files cannot be read has a `problem` instead of figures."""
    return [_row(store) for store in stored_jobs(work_dir)]


def _row(store: Store) -> dict[str, object]:
    row: dict[str, object] = {"name": store.folder.name, "folder": str(store.folder)}
    try:
        spec, status = store.read_job().parsed_spec(), store.read_status().status
    except Refusal as problem:
        return {**row, "problem": str(problem)}
    return {
        **row,
        "phase": status.phase.value,
        "stage": status.stage,
        "step": status.step,
        "steps": spec.training.steps,
        "mode": status.mode.value if status.mode else "",
        "attempt": status.attempt,
        "runBy": holder_of(store.folder) or "",
    }


def table(work_dir: Path) -> str:
    """Return the jobs as aligned text."""
    listed = rows(work_dir)
    if not listed:
        return f"No jobs in {work_dir}. Start one with: ctj run FILE"
    header = ("NAME", "PHASE", "STAGE", "STEP", "MODE", "ATTEMPT", "RUN BY")
    cells = [header] + [
        (
            str(row["name"]),
            str(row["phase"]),
            str(row["stage"] or "-"),
            f"{row['step']}/{row['steps']}",
            str(row["mode"] or "-"),
            str(row["attempt"]),
            str(row["runBy"] or "-"),
        )
        for row in listed
        if "problem" not in row
    ]
    broken = [f"{row['name']}: {row['problem']}" for row in listed if "problem" in row]
    return "\n".join([*(words.aligned(cells) if len(cells) > 1 else []), *broken])


def watch(store: Store, *, json: bool, plain: bool) -> RunExit:
    """Follow a job until it is over or nobody runs it any more."""
    with screen_for_output(json=json, plain=plain) as screen:
        return _follow(store, screen)


def _follow(store: Store, screen: Screen) -> RunExit:
    try:
        store.read_job().parsed_spec()
    except Refusal as problem:  # what happens can still be followed
        screen.note(str(problem))
    shown = max(0, len(store.read_events()) - 3)  # a little of the past, to know where we are
    while True:
        held_before_reading = holder_of(store.folder)
        status = store.read_status().status
        events = store.read_events()
        for event in events[shown:]:
            screen.event(Event(type=EventType(event["type"]), reason=event["reason"], message=event["message"]))
        shown = len(events)
        screen.show(snapshot(store, status))
        if held_before_reading is None:
            outcome = _OVER.get(status.phase, RunExit.STOPPED)
            screen.note(f"{store.folder.name}: {words.phase_and_place(status)}; nobody runs it now")
            return outcome
        time.sleep(_POLL_SECONDS)
