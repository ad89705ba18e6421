"""Files of a job that were broken by hand: one line about them, and everything else goes on."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.workplace import Workplace, job_document

from ctj_api.status import Status
from ctj_operator.core.decision import Event, EventType
from ctj_operator.local.store import EVENTS_FILE, JOB_FILE, STATUS_FILE, Store


@pytest.fixture
def jobs(place: Workplace) -> dict[str, Store]:
    """Two jobs; `tiny` is the one that gets broken."""
    stores = {}
    for name in ("tiny", "whole"):
        folder = place.job_folder.with_name(name)
        folder.mkdir(parents=True)
        stores[name] = Store(folder)
        stores[name].submit({**job_document(), "metadata": {"name": name}})
    return stores


def edit(store: Store, change: Callable[[dict[str, Any]], Any]) -> None:
    document = json.loads((store.folder / JOB_FILE).read_text())
    change(document["spec"])
    (store.folder / JOB_FILE).write_text(json.dumps(document))


BREAKS: dict[str, tuple[Callable[[Store], Any], str]] = {
    "a value of another type": (
        lambda store: edit(store, lambda spec: spec["training"].update(steps="x")),
        "spec.training.steps",
    ),
    "an unknown value": (
        lambda store: edit(store, lambda spec: spec["ladder"][1].update(strategy="magic")),
        "spec.ladder",
    ),
    "a part that is gone": (lambda store: edit(store, lambda spec: spec.pop("training")), "spec.training"),
    "a ladder that does not add up": (
        lambda store: edit(store, lambda spec: spec["ladder"][0].pop("steps")),
        "spec.ladder",
    ),
    "no JSON": (lambda store: (store.folder / JOB_FILE).write_text("{"), "is damaged"),
    "no map": (lambda store: (store.folder / JOB_FILE).write_text("[]"), "is damaged"),
    "a status that is none": (lambda store: (store.folder / STATUS_FILE).write_text("{}"), "is damaged"),
}


@pytest.mark.parametrize("broken", BREAKS)
def test_list_says_which_file_is_broken_and_shows_the_other_jobs(
    place: Workplace, jobs: dict[str, Store], broken: str
) -> None:
    breaks, word = BREAKS[broken]
    breaks(jobs["tiny"])
    listed = place.ctj("list")
    assert listed.code == 0
    assert "whole  Pending" in listed.out
    (line,) = (line for line in listed.out.splitlines() if line.startswith("tiny"))
    assert str(jobs["tiny"].folder.relative_to(place.folder)) in line
    assert word in line
    rows = {row["name"]: row for row in map(json.loads, place.ctj("list", "--json").out.splitlines())}
    assert ("problem" in rows["tiny"], "problem" in rows["whole"]) == (True, False)


@pytest.mark.parametrize("broken", BREAKS)
@pytest.mark.parametrize("command", ["explain", "watch", "report", "pause", "retry", "eager", "run"])
def test_no_command_answers_a_broken_file_with_a_traceback(
    place: Workplace, jobs: dict[str, Store], command: str, broken: str
) -> None:
    breaks, word = BREAKS[broken]
    breaks(jobs["tiny"])
    ended = place.ctj(command, "ctj-runs/tiny")
    said = ended.out + ended.err
    assert word in said, said
    assert "Traceback" not in said
    assert (command == "run" and ended.code == 2) or ended.code in {0, 4, 130}, said


def test_explain_shows_what_is_known_beside_the_broken_file(place: Workplace, jobs: dict[str, Store]) -> None:
    jobs["tiny"].write_status(Status(stage="ddp", step=9), over=0)
    BREAKS["an unknown value"][0](jobs["tiny"])
    out = place.ctj("explain", "tiny").out
    assert "tiny: Pending in stage ddp, step 9" in out
    assert "What to do next" in out


def test_an_unknown_name_is_answered_although_another_jobs_file_is_broken(
    place: Workplace, jobs: dict[str, Store]
) -> None:
    BREAKS["no JSON"][0](jobs["tiny"])
    refused = place.ctj("explain", "nobody")
    assert (refused.code, "jobs there: tiny, whole" in refused.err) == (2, True)


def test_lines_that_are_no_events_are_left_out(jobs: dict[str, Store]) -> None:
    store = jobs["whole"]
    store.append_event(Event(type=EventType.NORMAL, reason="Told", message="so"), at=1.0)
    with (store.folder / EVENTS_FILE).open("a") as file:
        file.write('{"type": "Odd", "reason": "", "message": ""}\n{"type": "Normal"}\n[]\n{"torn')
    assert [event["reason"] for event in store.read_events()] == ["Told"]
