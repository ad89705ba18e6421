"""What the operator believes after watch events, its own writes and relists, in any order."""

from typing import Any

import pytest
from tests.unit.cluster_objects import JOB, JOB_UID, condition, ended, job_object, pod_object

from ctj_operator.cluster import caches
from ctj_operator.cluster.caches import Children, JobCache

Document = dict[str, Any]


def training_job(*, uid: str = JOB_UID, version: int, phase: str = "") -> Document:
    metadata = {"namespace": "research", "name": "llama", "uid": uid, "resourceVersion": str(version)}
    return {"metadata": {**metadata, "managedFields": [{}]}, "status": {"phase": phase}}


def changes() -> tuple[Children, list[str]]:
    heard: list[str] = []
    return Children(on_change=heard.append), heard


def test_an_old_event_after_our_own_write_changes_nothing() -> None:
    jobs = JobCache()
    assert jobs.put(training_job(version=9))
    assert jobs.put(training_job(version=10, phase="Running"))
    assert not jobs.put(training_job(version=9))
    assert not jobs.put(training_job(version=10))
    known = jobs.get("research/llama")
    assert known is not None
    assert known["status"]["phase"] == "Running"
    assert "managedFields" not in known["metadata"]


def test_an_answer_that_comes_after_the_deletion_raises_no_ghost() -> None:
    jobs = JobCache()
    jobs.put(training_job(version=9))
    jobs.remove(training_job(version=11))
    assert not jobs.put(training_job(version=10))
    assert jobs.get("research/llama") is None


def test_the_deletion_of_an_earlier_object_does_not_hide_its_successor() -> None:
    jobs = JobCache()
    jobs.put(training_job(uid="second", version=12))
    jobs.remove(training_job(uid="first", version=11))
    assert jobs.get("research/llama") is not None


def test_a_change_of_a_child_asks_for_its_job() -> None:
    children, heard = changes()
    children.jobs.put(job_object())
    children.pods.put(pod_object())
    assert heard == ["research/llama", "research/llama"]


def test_an_event_that_says_nothing_new_asks_for_nothing() -> None:
    children, heard = changes()
    children.jobs.put(job_object(version=10))
    children.jobs.put(job_object(version=10))
    children.jobs.put(job_object(version=11, ready=1))
    assert heard == ["research/llama"]
    children.jobs.put(job_object(version=12, conditions=[condition("Failed")]))
    assert len(heard) == 2


def test_a_relist_finds_missed_deletions_of_its_own_namespace_only() -> None:
    children, heard = changes()
    children.jobs.put(job_object(uid="kept"))
    children.jobs.put(job_object(uid="missed", number=2))
    children.jobs.keep_only(["kept"], version=20, namespace="elsewhere")
    assert len(children.jobs.of_job(JOB)) == 2
    children.jobs.keep_only(["kept"], version=20, namespace="research")
    assert [job.uid for job in children.jobs.of_job(JOB)] == ["kept"]
    assert len(heard) == 3


def test_a_child_created_while_the_listing_was_on_its_way_is_not_taken_for_deleted() -> None:
    children, _ = changes()
    children.jobs.put(job_object(version=21))
    children.jobs.keep_only([], version=20, namespace=None)
    children.jobs.put(job_object(version=22, conditions=[condition("Failed")]))
    assert [job.failed for job in children.jobs.of_job(JOB)] == [True]


def test_a_job_whose_deletion_was_missed_goes_with_the_next_listing() -> None:
    jobs = JobCache()
    jobs.put(training_job(version=9))
    assert jobs.keep_only([], version=8, namespace=None) == []
    assert jobs.keep_only([JOB_UID], version=20, namespace=None) == []
    assert jobs.keep_only([], version=20, namespace=None) == ["research/llama"]
    assert jobs.get("research/llama") is None


def test_the_last_words_of_a_pod_stay_until_its_job_is_gone() -> None:
    children, _ = changes()
    children.jobs.put(job_object())
    children.pods.put(pod_object(phase="Failed", **ended(11)))
    children.pods.remove("pod-1")
    children.pods.keep_only([], version=20, namespace=None)
    assert [pod.exit_code for pod in children.pods.of_job(JOB)] == [11]
    children.jobs.remove("job-1")
    assert children.pods.of_job(JOB) == []


def test_a_pod_that_goes_after_its_job_leaves_nothing_behind() -> None:
    children, _ = changes()
    children.jobs.put(job_object())
    children.pods.put(pod_object())
    children.jobs.remove("job-1")
    assert len(children.pods.of_job(JOB)) == 1  # it still runs
    children.pods.remove("pod-1")
    assert children.pods.of_job(JOB) == []


def forged_kind() -> Document:
    pod = pod_object()
    pod["metadata"]["ownerReferences"][0]["kind"] = "ReplicaSet"
    return pod


def not_controlled() -> Document:
    pod = pod_object()
    pod["metadata"]["ownerReferences"][0]["controller"] = False
    return pod


def unowned() -> Document:
    pod = pod_object(deleting=True)
    del pod["metadata"]["ownerReferences"]
    return pod


@pytest.mark.parametrize(
    "forged",
    [
        pod_object(namespace="elsewhere"),
        pod_object(namespace="elsewhere", deleting=True),
        pod_object(owner="job-of-somebody"),
        pod_object(owner="job-of-somebody", deleting=True),
        pod_object(phase="Failed", owner="job-of-somebody", **ended(13)),
        forged_kind(),
        not_controlled(),
        unowned(),
    ],
)
def test_labels_alone_make_no_pod_ours_neither_alive_nor_removed(forged: Document) -> None:
    children, _ = changes()
    children.pods.put(forged)
    children.jobs.put(job_object())
    assert children.pods.of_job(JOB) == []
    children.pods.remove("pod-1")
    assert children.pods.of_job(JOB) == []


def test_the_pods_of_somebody_elses_job_do_not_count() -> None:
    children, _ = changes()
    children.jobs.put(job_object(owner="somebody"))
    children.pods.put(pod_object())
    assert children.pods.of_job(JOB) == []
    assert not children.jobs.has(JOB, attempt=1)


def test_a_job_in_another_namespace_is_not_ours_whoever_owns_it() -> None:
    children, _ = changes()
    forged = job_object()
    forged["metadata"]["namespace"] = "elsewhere"
    children.jobs.put(forged)
    children.pods.put(pod_object(namespace="elsewhere"))
    assert children.jobs.of_job(JOB) == []
    assert children.pods.of_job(JOB) == []


def test_a_forged_suspended_job_takes_no_evidence_away() -> None:
    children, _ = changes()
    children.jobs.put(job_object())
    children.pods.put(pod_object(phase="Failed", **ended(11)))
    children.pods.remove("pod-1")
    forged = job_object(uid="forged", owner="somebody")
    forged["spec"]["suspend"] = True
    children.jobs.put(forged)
    children.jobs.remove("forged")
    assert [pod.exit_code for pod in children.pods.of_job(JOB)] == [11]


def test_a_pod_that_is_heard_of_before_its_job_counts_once_the_job_is_known() -> None:
    children, heard = changes()
    children.pods.put(pod_object())
    assert children.pods.of_job(JOB) == []
    heard.clear()
    children.jobs.put(job_object())
    assert [pod.uid for pod in children.pods.of_job(JOB)] == ["pod-1"]
    assert heard == ["research/llama"]


def test_who_hears_of_a_job_finds_its_pods() -> None:
    found: list[int] = []
    children = Children(on_change=lambda _: found.append(len(children.pods.of_job(JOB))))
    children.pods.put(pod_object())
    children.jobs.put(job_object())
    assert found == [0, 1]


def test_a_pod_whose_job_is_gone_is_alive_until_it_has_ended() -> None:
    children, _ = changes()
    children.jobs.put(job_object())
    children.pods.put(pod_object())
    children.jobs.remove("job-1")
    children.pods.put(pod_object(uid="late"))  # the other watch was behind
    children.pods.put(pod_object(version=11, deleting=True))
    assert [pod.alive for pod in children.pods.of_job(JOB)] == [True, True]
    children.pods.remove("pod-1")
    children.pods.remove("late")
    assert children.pods.of_job(JOB) == []


def test_a_job_that_is_gone_is_remembered_for_as_long_as_pods_of_it_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "_TOMBSTONES", 2)
    children, _ = changes()
    for number in range(1, 9):
        children.jobs.put(job_object(number=number))
        children.pods.put(pod_object(uid=f"pod-{number}", number=number))
        if number > 1:
            children.pods.remove(f"pod-{number}")
        children.jobs.remove(f"job-{number}")
    children.pods.put(pod_object(uid="late-2", number=2))
    assert [pod.uid for pod in children.pods.of_job(JOB)] == ["pod-1"]


def test_pods_on_their_way_out_after_a_job_that_went_before_the_operator_began_still_count() -> None:
    children, _ = changes()
    children.pods.put(pod_object(deleting=True))
    children.jobs.put(job_object(number=2))
    assert [pod.alive for pod in children.pods.of_job(JOB)] == [True]
    children.pods.remove("pod-1")
    assert children.pods.of_job(JOB) == []


def test_pods_that_kueue_takes_from_a_suspended_job_are_no_evidence_of_failure() -> None:
    children, _ = changes()
    suspended = job_object(version=12)
    suspended["spec"]["suspend"] = True
    children.jobs.put(job_object())
    children.pods.put(pod_object(uid="early"))
    children.pods.remove("early")  # its event came before the Job's
    children.pods.put(pod_object(uid="late"))
    children.jobs.put(suspended)
    children.pods.remove("late")
    assert children.pods.of_job(JOB) == []
