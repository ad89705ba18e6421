"""A job's folder behaves as the API server does: generations, compare-and-swap, whole files, nothing lost."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.workplace import job_document

from ctj_api.exit_codes import RunExit
from ctj_api.status import Phase, Status
from ctj_operator.core.decision import Event, EventType
from ctj_operator.core.reconcile import Conflict
from ctj_operator.local.store import Store, StoreError


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path)
    store.submit(job_document())
    return store


def with_steps(steps: int) -> dict[str, Any]:
    training = {**job_document()["spec"]["training"], "steps": steps}
    return job_document(training=training)


def test_the_first_submission_gets_a_uid_and_generation_one(store: Store) -> None:
    job = store.read_job()
    assert job.generation == 1
    assert job.identity.name == "tiny"
    assert job.identity.uid


def test_submitting_the_same_spec_again_changes_neither_uid_nor_generation(store: Store) -> None:
    before = store.read_job()
    assert store.submit(job_document()) == before


def test_a_default_written_out_is_no_new_generation(store: Store) -> None:
    training = {**job_document()["spec"]["training"], "seed": 0}
    assert store.submit(job_document(training=training)).generation == 1


def test_a_changed_spec_is_a_new_generation_of_the_same_job(store: Store) -> None:
    before = store.read_job()
    after = store.submit(with_steps(24))
    assert (after.generation, after.identity.uid) == (2, before.identity.uid)


def test_annotations_stay_when_the_file_is_submitted_again_and_are_no_new_generation(store: Store) -> None:
    store.annotate("training.ctj.dev/approve", "yes-1")
    job = store.submit(job_document())
    assert job.annotations == {"training.ctj.dev/approve": "yes-1"}
    assert job.generation == 1


def test_editing_a_field_of_the_spec_is_a_new_generation_only_if_it_changes(store: Store) -> None:
    store.edit_spec(suspend=False)
    assert store.read_job().generation == 1
    store.edit_spec(suspend=True)
    assert store.read_job().generation == 2


def test_a_status_written_over_a_version_seen_is_read_back(store: Store) -> None:
    store.write_status(Status(attempt=1), over=0)
    store.write_status(Status(attempt=2, phase=Phase.RUNNING), over=1)
    stored = store.read_status()
    assert (stored.version, stored.status.attempt, stored.status.phase) == (2, 2, Phase.RUNNING)


def test_a_status_written_over_an_older_version_is_refused_and_changes_nothing(store: Store) -> None:
    store.write_status(Status(attempt=1), over=0)
    with pytest.raises(Conflict):
        store.write_status(Status(attempt=7), over=0)
    assert store.read_status().status.attempt == 1


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"version": 1}', '{"version": 1, "status": {"attempt": "x"}}'])
def test_a_damaged_status_is_never_guessed_and_the_remedy_restores_the_one_before(store: Store, damage: str) -> None:
    store.write_status(Status(attempt=1), over=0)
    store.write_status(Status(attempt=2), over=1)
    path = store.folder / "status.json"
    path.write_text(damage)
    with pytest.raises(StoreError, match="damaged") as raised:
        store.read_status()
    assert raised.value.exit_code == RunExit.ENVIRONMENT
    assert "mv " in str(raised.value)
    assert "--fresh" in str(raised.value)
    assert path.read_text() == damage
    (store.folder / "status.json.previous").rename(path)  # what the message says
    assert store.read_status().status.attempt == 1


def test_a_damaged_job_says_so(store: Store) -> None:
    (store.folder / "job.json").write_text("{")
    with pytest.raises(StoreError, match="damaged"):
        store.read_job()


def test_moving_aside_keeps_every_file_and_two_in_one_second_do_not_meet(tmp_path: Path) -> None:
    kept = []
    for number in range(2):
        folder = tmp_path / "tiny"
        folder.mkdir()
        (folder / "mark").write_text(str(number))
        kept.append(Store(folder).move_aside())
    assert [(folder / "mark").read_text() for folder in kept] == ["0", "1"]
    assert not (tmp_path / "tiny").exists()


def test_events_are_read_back_without_a_torn_last_line(store: Store) -> None:
    store.append_event(Event(type=EventType.NORMAL, reason="Started", message="attempt 1"), at=1.0)
    with (store.folder / "events.jsonl").open("a") as file:
        file.write('{"at": 2.0, "rea')
    assert [event["reason"] for event in store.read_events()] == ["Started"]


def test_nothing_half_written_is_left_in_the_folder(store: Store) -> None:
    store.write_status(Status(attempt=1), over=0)
    names = {path.name for path in store.folder.iterdir()}
    assert names == {"job.json", "status.json", ".edit"}
    assert json.loads((store.folder / "job.json").read_text())["kind"] == "CompiledTrainingJob"
