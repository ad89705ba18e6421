"""Verbs of the command line: what is stored, who acts on it, and what is refused because nothing would ever happen."""

import pytest
from tests.unit.workplace import Workplace, job_document

from ctj_api import names
from ctj_api.attempt import Mode
from ctj_api.report import CheckpointRef
from ctj_api.spec import Spec
from ctj_api.status import Condition, ConditionStatus, ConditionType, HoldState, Phase, Stable, StagePhase, Status
from ctj_operator.core.ladder import first_statuses
from ctj_operator.local.lock import hold
from ctj_operator.local.store import Store

NOW = "2026-01-01T00:00:00Z"
ANNOTATIONS = {
    "approve": names.VERB_APPROVE,
    "eager": names.VERB_FORCE_EAGER,
    "retry-compile": names.VERB_RETRY_COMPILE,
    "rollback": names.VERB_ROLLBACK,
}


def held() -> Status:
    """In the second stage, which may be approved, run again or given up."""
    single, ddp = first_statuses(Spec.from_document(job_document()["spec"]))
    return Status(
        phase=Phase.HELD,
        stage="ddp",
        ladder=[single.model_copy(update={"phase": StagePhase.PASSED}), ddp],
        stable=Stable(stage="single", mode=Mode.COMPILED, checkpoint=CheckpointRef(attempt=1, step=6)),
        hold=HoldState(since=NOW, deadline=NOW, reason="GateInconclusive"),
    )


def ended(kind: ConditionType) -> Status:
    """Over, after which nothing that the held job could be asked for is left."""
    over = Condition(type=kind, status=ConditionStatus.TRUE, reason="Told", last_transition_time=NOW)
    return held().model_copy(update={"hold": None, "phase": Phase(kind.value), "conditions": [over]})


@pytest.mark.parametrize("command", ANNOTATIONS)
def test_a_verb_is_a_new_token_each_time(place: Workplace, store: Store, command: str) -> None:
    store.write_status(held(), over=0)
    tokens = []
    for _ in range(2):
        assert place.ctj(command, "tiny").code == 0
        tokens.append(store.read_job().annotations[ANNOTATIONS[command]])
    assert tokens[0] != tokens[1]
    assert store.read_job().generation == 1


def test_pause_and_resume_set_the_spec_and_retry_its_token(place: Workplace, store: Store) -> None:
    store.write_status(held(), over=0)
    place.ctj("pause", "tiny")
    assert store.read_job().spec["suspend"] is True
    place.ctj("resume", "tiny")
    assert store.read_job().spec["suspend"] is False
    place.ctj("retry", "tiny")
    assert store.read_job().spec["retryToken"]


def test_a_verb_says_whether_anybody_acts_on_it(place: Workplace, store: Store) -> None:
    assert "go on with: ctj run" in place.ctj("eager", "tiny").out
    with hold(store.folder, command="ctj run job.yaml"):
        assert "acts on it" in place.ctj("eager", "tiny").out


@pytest.mark.parametrize("command", [*ANNOTATIONS, "pause", "resume", "retry"])
def test_what_is_asked_of_a_job_that_has_succeeded_is_refused(place: Workplace, store: Store, command: str) -> None:
    store.write_status(ended(ConditionType.SUCCEEDED), over=0)
    before = store.read_job()
    refused = place.ctj(command, "tiny")
    assert refused.code == 2
    assert f"{command}: the job has succeeded" in refused.err
    assert store.read_job() == before


@pytest.mark.parametrize("command", [*ANNOTATIONS, "pause"])
def test_what_is_asked_of_a_failed_job_is_refused_until_it_is_to_be_retried(
    place: Workplace, store: Store, command: str
) -> None:
    store.write_status(ended(ConditionType.FAILED), over=0)
    refused = place.ctj(command, "tiny")
    assert refused.code == 2
    assert "`ctj retry`" in refused.err
    assert place.ctj("retry", "tiny").code == 0
    assert place.ctj(command, "tiny").code == 0


@pytest.mark.parametrize(
    ("command", "why"),
    [("approve", "is not held"), ("rollback", "no stage has run"), ("retry", "has not failed and is not held")],
)
def test_what_has_nothing_to_act_on_is_refused_with_the_reason(
    place: Workplace, store: Store, command: str, why: str
) -> None:
    before = store.read_job()
    refused = place.ctj(command, "tiny")
    assert (refused.code, why in refused.err) == (2, True), refused.err
    assert store.read_job() == before
