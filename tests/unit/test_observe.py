"""What Jobs and pods of the API server mean to the core."""

import json
from typing import Any

import pytest
from tests.unit.cluster_objects import JOB, condition, ended, job_object, pod_object

from ctj_operator.cluster.caches import Children
from ctj_operator.cluster.observe import SETTLE_SECONDS, build_children, parse_report
from ctj_operator.cluster.records import parse_pod, read_time
from ctj_operator.core.observed import Child, ChildState, PodPhase

Document = dict[str, Any]

END = "2026-01-01T00:00:00Z"
LONG_AFTER = (read_time(END) or 0.0) + 10 * SETTLE_SECONDS
REPORT = json.dumps({"attempt": 1, "stage": "full", "exitCode": 0, "step": 10})


def children_of(*objects: Document, now: float = LONG_AFTER, removed: str = "") -> tuple[Child, ...]:
    caches = Children(on_change=lambda _: None)
    for document in objects:
        (caches.pods if "nodeName" in document["spec"] else caches.jobs).put(document)
    if removed:
        caches.pods.remove(removed)
    return build_children(
        jobs=caches.jobs.of_job(JOB),
        pods=caches.pods.of_job(JOB),
        progress_of=lambda _: None,
        now=now,
    )


def child_of(*objects: Document, now: float = LONG_AFTER, removed: str = "") -> Child:
    (child,) = children_of(*objects, now=now, removed=removed)
    return child


@pytest.mark.parametrize(
    ("conditions", "state"),
    [
        ([], ChildState.ACTIVE),
        ([condition("SuccessCriteriaMet")], ChildState.ACTIVE),
        ([condition("FailureTarget")], ChildState.ACTIVE),
        ([condition("Complete")], ChildState.SUCCEEDED),
        ([condition("Failed")], ChildState.FAILED),
        ([{**condition("Failed"), "status": "False"}], ChildState.ACTIVE),
    ],
)
def test_only_final_conditions_end_a_child(conditions: list[Document], state: ChildState) -> None:
    assert child_of(job_object(conditions=conditions)).state is state


def test_a_child_lives_while_any_of_its_pods_does() -> None:
    failed = job_object(conditions=[condition("Failed")])
    first = pod_object(uid="a", phase="Failed", **ended(1))
    assert child_of(failed, first, pod_object(uid="b", index=1)).state is ChildState.ACTIVE
    assert child_of(failed, first, pod_object(uid="b", index=1), removed="b").state is ChildState.FAILED


def test_the_end_of_a_job_waits_a_moment_for_the_reports_of_its_pods() -> None:
    complete = job_object(conditions=[condition("Complete")])
    just_after = (read_time(END) or 0.0) + 1
    assert child_of(complete, now=just_after).state is ChildState.ACTIVE
    reported = pod_object(phase="Succeeded", **ended(0, message=REPORT))
    child = child_of(complete, reported, now=just_after)
    assert child.state is ChildState.SUCCEEDED
    assert child.pods[0].report is not None
    assert child.pods[0].report.step == 10


def test_a_child_is_done_with_its_last_pod_but_fails_only_when_no_other_pod_can_come() -> None:
    two = job_object()
    two["spec"]["completions"] = 2
    first = pod_object(uid="a", phase="Succeeded", **ended(0))
    assert child_of(two, first).state is ChildState.ACTIVE
    assert child_of(two, first, pod_object(uid="b", index=1, phase="Succeeded")).state is ChildState.SUCCEEDED
    assert child_of(two, pod_object(phase="Failed", **ended(1))).state is ChildState.ACTIVE


def test_pods_whose_job_is_gone_still_count_as_an_attempt_that_is_ending() -> None:
    child = child_of(pod_object(number=4, deleting=True))
    assert (child.attempt, child.state, child.deleting) == (4, ChildState.ACTIVE, True)


def test_an_object_of_our_labels_but_another_owner_is_not_ours() -> None:
    assert not child_of(job_object(owner="somebody-else")).ours
    assert child_of(job_object()).ours


def test_our_pods_are_no_evidence_for_a_job_of_another_owner() -> None:
    ours, theirs = children_of(job_object(), job_object(uid="copy", owner="somebody-else"), pod_object())
    assert (len(ours.pods), len(theirs.pods)) == (1, 0)


def test_attempts_come_oldest_first() -> None:
    seen = children_of(job_object(uid="b", number=10), job_object(uid="a", number=9))
    assert [child.attempt for child in seen] == [9, 10]


def test_suspension_from_outside_is_seen() -> None:
    job = job_object()
    job["spec"]["suspend"] = True
    assert child_of(job).suspended


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (ended(137, reason="OOMKilled"), "OOMKilled"),
        (ended(1), ""),
        ({"reason": "Evicted", "message": "the node was low on memory"}, "Evicted"),
        (
            {"containerStatuses": [{"name": "trainer", "state": {"waiting": {"reason": "ImagePullBackOff"}}}]},
            "ImagePullBackOff",
        ),
        ({"containerStatuses": [{"name": "trainer", "state": {"waiting": {"reason": "ContainerCreating"}}}]}, ""),
        ({"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]}, "Unschedulable"),
    ],
)
def test_a_pods_reason_is_the_platforms_word(status: Document, reason: str) -> None:
    assert parse_pod(pod_object(phase="Pending", **status)).reason == reason


def test_the_trainers_exit_code_counts_and_no_sidecars() -> None:
    pod = child_of(job_object(), pod_object(phase="Failed", **ended(13))).pods[0]
    assert (pod.exit_code, pod.phase, pod.finished_at) == (13, PodPhase.FAILED, read_time(END))


def test_a_disruption_is_told_apart_from_a_failure() -> None:
    drained = pod_object(phase="Failed", conditions=[condition("DisruptionTarget")])
    assert parse_pod(drained).disrupted
    assert not parse_pod(pod_object(phase="Failed")).disrupted


def test_a_pod_deleted_while_it_ran_is_a_disruption_and_its_last_words_stay() -> None:
    pod = child_of(job_object(), pod_object(), removed="pod-1").pods[0]
    assert (pod.phase, pod.reason, pod.disrupted) == (PodPhase.FAILED, "Deleted", True)
    over = child_of(job_object(), pod_object(phase="Failed", **ended(11)), removed="pod-1").pods[0]
    assert (over.exit_code, over.disrupted) == (11, False)


def test_an_unreachable_node_may_still_run_its_pod() -> None:
    assert parse_pod(pod_object(phase="Unknown")).alive


@pytest.mark.parametrize("message", ["", "Segmentation fault", "{", '{"attempt": 1}', "[1]", '{"attempt": "x"}'])
def test_any_other_last_words_are_no_report(message: str) -> None:
    assert parse_report(message) is None
