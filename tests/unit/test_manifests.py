"""What an attempt becomes as Kubernetes objects."""

import json
from typing import Any

import pytest
from tests.unit.cluster_objects import JOB_UID, attempt

from ctj_api import names
from ctj_api.attempt import Attempt
from ctj_operator.cluster.manifests import CannotBuild, Owner, Pods, build_job, build_service, choose_pods

Document = dict[str, Any]


def owner(**changes: Any) -> Owner:
    return Owner(**{"name": "llama", "namespace": "research", "uid": JOB_UID, **changes})


def pods_of(spec: Document | None = None, *, of: Attempt | None = None, cache: str | None = None) -> Pods:
    return choose_pods(
        {"image": "team/llama@sha256:1", **(spec or {})},
        attempt=of or attempt(),
        default_image=None,
        default_checkpoint_claim="shared",
        default_cache_claim=cache,
    )


def job_of(of: Attempt | None = None, *, spec: Document | None = None, by: Owner | None = None) -> Document:
    one = of or attempt()
    return build_job(one, owner=by or owner(), pods=pods_of(spec, of=one))


def pod_spec(job: Document) -> Document:
    return dict(job["spec"]["template"]["spec"])


def trainer(job: Document) -> Document:
    return dict(pod_spec(job)["containers"][0])


def environment(job: Document) -> Document:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in trainer(job)["env"]}


def volume(job: Document, name: str) -> Document:
    return next(dict(one) for one in pod_spec(job)["volumes"] if one["name"] == name)


def test_any_pods_failure_fails_the_attempt_and_no_rank_ever_lives_twice() -> None:
    spec = job_of(attempt(stage={"nodes": 4}))["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (4, 4, "Indexed")
    assert (spec["backoffLimit"], spec["podReplacementPolicy"]) == (0, "Failed")
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


def test_the_job_is_named_by_stage_and_attempt_and_controlled_by_its_training_job() -> None:
    metadata = job_of(attempt(number=7))["metadata"]
    assert (metadata["name"], metadata["namespace"]) == ("llama-full-7", "research")
    (reference,) = metadata["ownerReferences"]
    assert reference["uid"] == JOB_UID
    assert reference["controller"]
    assert reference["blockOwnerDeletion"]


def test_labels_of_job_and_pods_tell_job_uid_stage_and_attempt() -> None:
    job = job_of(attempt(number=7))
    expected = {
        names.LABEL_JOB: "llama",
        names.LABEL_JOB_UID: JOB_UID,
        names.LABEL_STAGE: "full",
        names.LABEL_ATTEMPT: "7",
    }
    for labels in (job["metadata"]["labels"], job["spec"]["template"]["metadata"]["labels"]):
        assert expected.items() <= labels.items()


def test_the_attempt_travels_whole_in_one_variable() -> None:
    one = attempt(number=3, lineage=[{"attempt": 1, "maxStep": 5}])
    assert Attempt.from_document(json.loads(environment(job_of(one))[names.ENV_ATTEMPT])) == one


def test_each_pod_learns_its_rank_from_its_index() -> None:
    source = environment(job_of())[names.ENV_NODE_RANK]
    assert source == {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/job-completion-index']"}}


def test_one_pod_talks_to_itself_and_needs_no_service() -> None:
    one = attempt(stage={"nodes": 1})
    assert environment(job_of(one))[names.ENV_MASTER_ADDR] == "127.0.0.1"
    assert build_service(one, owner=owner()) is None
    assert "subdomain" not in pod_spec(job_of(one))


def test_several_pods_find_rank_0_by_name_before_anything_is_ready() -> None:
    one = attempt(number=2, stage={"nodes": 2})
    job, service = job_of(one), build_service(one, owner=owner())
    assert service is not None
    name = service["metadata"]["name"]
    assert environment(job)[names.ENV_MASTER_ADDR] == f"{job['metadata']['name']}-0.{name}"
    assert pod_spec(job)["subdomain"] == name
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()


def test_the_control_annotation_appears_as_a_file_in_a_whole_folder() -> None:
    job = job_of()
    (item,) = volume(job, "ctj-control")["downwardAPI"]["items"]
    assert item["fieldRef"]["fieldPath"] == f"metadata.annotations['{names.ANNOTATION_CONTROL}']"
    mount = next(one for one in trainer(job)["volumeMounts"] if one["name"] == "ctj-control")
    assert environment(job)[names.ENV_CONTROL_FILE] == f"{mount['mountPath']}/{item['path']}"
    assert "subPath" not in mount


def test_checkpoints_of_two_jobs_of_one_name_do_not_meet() -> None:
    roots = {environment(job_of(by=owner(uid=uid)))[names.ENV_CHECKPOINT_ROOT] for uid in ("aaaaaaaa-1", "bbbbbbbb-1")}
    assert roots == {"/ctj/checkpoints/research/llama-aaaaaaaa", "/ctj/checkpoints/research/llama-bbbbbbbb"}


def test_the_specs_claim_wins_over_the_operators() -> None:
    training = {"steps": 10, "globalBatchSize": 8, "microBatchSize": 4}
    own = attempt(training={**training, "checkpoint": {"volume": {"claimName": "mine"}}})
    assert volume(job_of(own), "ctj-checkpoints") == {
        "name": "ctj-checkpoints",
        "persistentVolumeClaim": {"claimName": "mine"},
    }
    assert volume(job_of(), "ctj-checkpoints")["persistentVolumeClaim"] == {"claimName": "shared"}


@pytest.mark.parametrize(
    ("own", "of_the_operator", "kept"),
    [
        (None, None, {"emptyDir": {}}),
        (None, "warm", {"persistentVolumeClaim": {"claimName": "warm"}}),
        ("mine", "warm", {"persistentVolumeClaim": {"claimName": "mine"}}),
        ("mine", None, {"persistentVolumeClaim": {"claimName": "mine"}}),
    ],
)
def test_compiled_code_is_kept_on_the_jobs_claim_or_the_operators(
    own: str | None, of_the_operator: str | None, kept: Document
) -> None:
    one = attempt(**({"compile": {"cache": {"volume": {"claimName": own}}}} if own else {}))
    job = build_job(one, owner=owner(), pods=pods_of(of=one, cache=of_the_operator))
    assert volume(job, "ctj-cache") == {"name": "ctj-cache", **kept}


def test_every_stage_and_pod_finds_compiled_code_in_the_same_folder() -> None:
    places = set()
    for one in (attempt(), attempt(number=2, stage={"name": "wide", "strategy": "ddp", "nodes": 4})):
        job = build_job(one, owner=owner(), pods=pods_of(of=one, cache="warm"))
        (mount,) = (mount for mount in trainer(job)["volumeMounts"] if mount["name"] == "ctj-cache")
        places.add((environment(job)[names.ENV_CACHE_DIR], mount["mountPath"], mount.get("subPath")))
    ((variable, path, below),) = places
    assert (variable, below) == (path, None)


def test_a_job_without_image_and_claim_names_both_at_once() -> None:
    with pytest.raises(CannotBuild, match=r"spec\.image.*spec\.training\.checkpoint\.volume"):
        choose_pods({}, attempt=attempt(), default_image=None, default_checkpoint_claim=None, default_cache_claim=None)


def test_gpus_are_limits_and_do_not_displace_the_overlays_resources() -> None:
    overlay = {"template": {"resources": {"requests": {"cpu": "8"}, "limits": {"memory": "64Gi"}}}}
    resources = trainer(job_of(attempt(stage={"gpusPerNode": 8}), spec=overlay))["resources"]
    assert resources["limits"] == {"memory": "64Gi", "nvidia.com/gpu": "8"}
    assert resources["requests"] == {"cpu": "8", "nvidia.com/gpu": "8"}


def test_pods_meet_the_restricted_security_standard() -> None:
    job = job_of()
    assert pod_spec(job)["securityContext"]["runAsNonRoot"]
    assert pod_spec(job)["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod_spec(job)["automountServiceAccountToken"] is False
    container = trainer(job)["securityContext"]
    assert (container["allowPrivilegeEscalation"], container["readOnlyRootFilesystem"]) == (False, True)
    assert container["capabilities"] == {"drop": ["ALL"]}


def test_whatever_the_trainer_writes_to_is_a_volume() -> None:
    job = job_of()
    paths = {mount["mountPath"] for mount in trainer(job)["volumeMounts"] if not mount.get("readOnly")}
    variables = environment(job)
    assert {variables[names.ENV_RUN_DIR], variables[names.ENV_CACHE_DIR], variables["HOME"], "/dev/shm"} <= paths
    assert any(variables[names.ENV_CHECKPOINT_ROOT].startswith(f"{path}/") for path in paths)
    assert trainer(job)["terminationMessagePath"] == variables[names.ENV_TERMINATION_FILE]


def test_the_overlay_is_laid_over_but_never_over_the_trainers_own_settings() -> None:
    overlay = {
        "labels": {"team": "nlp", names.LABEL_ATTEMPT: "99"},
        "env": [{"name": "NCCL_DEBUG", "value": "INFO"}, {"name": names.ENV_ATTEMPT, "value": "forged"}],
        "volumes": [{"name": "data", "emptyDir": {}}, {"name": "ctj-run", "hostPath": {"path": "/"}}],
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        "nodeSelector": {"gpu": "h200"},
        "sidecars": [{"name": "logger", "image": "logger:1"}],
        "securityContext": {"fsGroup": 7},
        "terminationGracePeriodSeconds": 300,
    }
    job = job_of(spec={"template": overlay})
    spec, labels = pod_spec(job), job["spec"]["template"]["metadata"]["labels"]
    assert (labels["team"], labels[names.LABEL_ATTEMPT]) == ("nlp", "1")
    assert environment(job)["NCCL_DEBUG"] == "INFO"
    assert environment(job)[names.ENV_ATTEMPT] != "forged"
    assert volume(job, "data") == {"name": "data", "emptyDir": {}}
    assert volume(job, "ctj-run") == {"name": "ctj-run", "emptyDir": {}}
    assert spec["nodeSelector"] == {"gpu": "h200"}
    assert [container["name"] for container in spec["containers"]] == ["trainer", "logger"]
    assert (spec["securityContext"]["fsGroup"], spec["securityContext"]["runAsNonRoot"]) == (7, True)
    assert (spec["terminationGracePeriodSeconds"], environment(job)[names.ENV_GRACE_SECONDS]) == (300, "300")


def test_a_queued_job_is_created_suspended_with_kueues_labels_and_topology() -> None:
    queue = {"kueue.x-k8s.io/queue-name": "gpus", "team": "nlp"}
    topology = {"kueue.x-k8s.io/podset-required-topology": "rack", "kueue.x-k8s.io/elastic-job": "false", "note": "x"}
    job = job_of(by=owner(labels=queue, annotations=topology))
    assert job["spec"]["suspend"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert "team" not in job["metadata"]["labels"]
    assert job["metadata"]["annotations"] == {"kueue.x-k8s.io/elastic-job": "false"}
    annotations = job["spec"]["template"]["metadata"]["annotations"]
    assert annotations == {"kueue.x-k8s.io/podset-required-topology": "rack"}


def test_a_job_without_a_queue_starts_at_once() -> None:
    assert job_of()["spec"]["suspend"] is False
