"""What one attempt looks like as Kubernetes objects: an Indexed Job and, for several pods, a headless Service.

Pure: builds documents, never sends them. Created once and never re-applied, since Kueue edits a Job after admission.
"""

from dataclasses import dataclass, field
from typing import Any

from ctj_api import names
from ctj_api.attempt import Attempt
from ctj_api.spec import PodTemplate

Document = dict[str, Any]

TRAINER = "trainer"
METRICS_PORT = 9402
FALLBACK_GROUP = 65532  # "nonroot": owns the volumes where the image runs as any other user

_KUEUE = "kueue.x-k8s.io/"
_KUEUE_QUEUE = f"{_KUEUE}queue-name"
_KUEUE_POD_SET = f"{_KUEUE}podset-"
LABEL_INDEX = "batch.kubernetes.io/job-completion-index"

_ROOT = "/ctj"
_CONTROL_FOLDER = f"{_ROOT}/control"
_CONTROL_FILE = f"{_CONTROL_FOLDER}/control.json"
_CHECKPOINTS = f"{_ROOT}/checkpoints"
_CACHE = f"{_ROOT}/cache"
_RUN = f"{_ROOT}/run"
_TERMINATION_FILE = "/dev/termination-log"


class CannotBuild(ValueError):
    """The job lacks something only a person can give; the message says what and where."""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """What children inherit from their CompiledTrainingJob beside the attempt itself."""

    name: str
    namespace: str
    uid: str
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Pods:
    """How the pods of one attempt are run: from the spec, completed by the operator's defaults."""

    image: str
    checkpoint_claim: str
    cache_claim: str | None
    """Keeps compiled code for every pod, stage and job that mounts it; without one it lives as long as the pod."""
    template: PodTemplate


def choose_pods(
    spec: Document,
    *,
    attempt: Attempt,
    default_image: str | None,
    default_checkpoint_claim: str | None,
    default_cache_claim: str | None,
) -> Pods:
    """Complete the spec with the operator's defaults.

    Raises:
        CannotBuild: neither names an image or a place for checkpoints.
    """
    image = spec.get("image") or default_image
    volume = attempt.training.checkpoint.volume
    claim = volume.claim_name if volume else default_checkpoint_claim
    missing = []
    if not image:
        missing.append("spec.image is absent and the operator has no --default-image; name the trainer image")
    if not claim:
        missing.append(
            "spec.training.checkpoint.volume is absent and the operator has no --checkpoint-claim; "
            "name a PersistentVolumeClaim, since an attempt continues from the checkpoints of the one before"
        )
    if not image or not claim:
        raise CannotBuild("; ".join(missing))
    cache = attempt.compile.cache
    return Pods(
        image=image,
        checkpoint_claim=claim,
        cache_claim=cache.volume.claim_name if cache else default_cache_claim,
        template=PodTemplate.from_document(spec.get("template", {})),
    )


def build_job(attempt: Attempt, *, owner: Owner, pods: Pods) -> Document:
    """Build the Indexed Job of `attempt`: any pod's failure fails it, and the operator replaces the whole attempt."""
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            **_build_metadata(attempt, owner=owner),
            "labels": {**_select(owner.labels, prefix=_KUEUE), **_build_labels(attempt)},
            "annotations": _select(owner.annotations, prefix=_KUEUE, but=_KUEUE_POD_SET),
        },
        "spec": {
            "completions": attempt.stage.nodes,
            "parallelism": attempt.stage.nodes,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "podReplacementPolicy": "Failed",  # never two live pods with one rank
            "suspend": _KUEUE_QUEUE in owner.labels,  # Kueue unsuspends it when there is quota
            "template": _build_pod_template(attempt, owner=owner, pods=pods),
        },
    }


def build_service(attempt: Attempt, *, owner: Owner) -> Document | None:
    """Build the headless Service that gives pods their names; one pod needs none (it alone costs 6 writes)."""
    if attempt.stage.nodes == 1:
        return None
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {**_build_metadata(attempt, owner=owner), "labels": _build_labels(attempt)},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # rendezvous happens before anything is ready
            "selector": _build_identity_labels(attempt),
            "ports": [{"name": "rendezvous", "port": names.MASTER_PORT}],
        },
    }


def _build_metadata(attempt: Attempt, *, owner: Owner) -> Document:
    return {
        "name": names.child_name(owner.name, attempt.stage.name, attempt.attempt),
        "namespace": owner.namespace,
        "ownerReferences": [
            {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "name": owner.name,
                "uid": owner.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }


def _build_identity_labels(attempt: Attempt) -> dict[str, str]:
    """Labels that select one attempt's pods; the uid keeps a recreated job from adopting old ones."""
    return {names.LABEL_JOB_UID: attempt.job.uid, names.LABEL_ATTEMPT: str(attempt.attempt)}


def _build_labels(attempt: Attempt) -> dict[str, str]:
    return {
        **_build_identity_labels(attempt),
        names.LABEL_JOB: attempt.job.name,
        names.LABEL_STAGE: attempt.stage.name,
        "app.kubernetes.io/name": "ctj-trainer",
        "app.kubernetes.io/instance": attempt.job.name,
        "app.kubernetes.io/managed-by": "ctj-operator",
    }


def _build_pod_template(attempt: Attempt, *, owner: Owner, pods: Pods) -> Document:
    template = pods.template
    spec: Document = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,  # trainers have no business with the API
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": template.grace_seconds,
        "securityContext": {
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
            "fsGroup": FALLBACK_GROUP,
            "fsGroupChangePolicy": "OnRootMismatch",
            **(template.security_context or {}),
        },
        "containers": [_build_trainer(attempt, owner=owner, pods=pods), *(template.sidecars or [])],
        "volumes": _merge_named(template.volumes or [], _build_volumes(pods)),
    }
    if attempt.stage.nodes > 1:
        spec["subdomain"] = names.child_name(owner.name, attempt.stage.name, attempt.attempt)
    spec |= _build_placement(template)
    return {
        "metadata": {
            "labels": {**(template.labels or {}), **_build_labels(attempt)},
            "annotations": {
                **(template.annotations or {}),
                **_select(owner.annotations, prefix=_KUEUE_POD_SET),
            },
        },
        "spec": spec,
    }


def _build_placement(template: PodTemplate) -> Document:
    """Where the pods may run and as whom: the overlay's fields that we have no opinion on."""
    fields = {
        "nodeSelector": template.node_selector,
        "tolerations": template.tolerations,
        "affinity": template.affinity,
        "imagePullSecrets": template.image_pull_secrets,
        "serviceAccountName": template.service_account_name,
        "schedulerName": template.scheduler_name,
        "priorityClassName": template.priority_class_name,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _build_trainer(attempt: Attempt, *, owner: Owner, pods: Pods) -> Document:
    template = pods.template
    mounts: list[Document] = [
        {"name": "ctj-control", "mountPath": _CONTROL_FOLDER, "readOnly": True},  # a folder: a subPath never changes
        {"name": "ctj-checkpoints", "mountPath": _CHECKPOINTS},
        {"name": "ctj-cache", "mountPath": _CACHE},
        {"name": "ctj-run", "mountPath": _RUN},
        {"name": "ctj-tmp", "mountPath": "/tmp"},  # the root file system is read-only
        {"name": "ctj-shm", "mountPath": "/dev/shm"},
    ]
    return {
        "name": TRAINER,
        "image": pods.image,
        "command": ["python", "-m", "ctj_trainer.supervisor"],
        "env": _merge_named(template.env or [], _build_environment(attempt, owner=owner, template=template)),
        "resources": _build_resources(attempt, template=template),
        "ports": [{"name": "metrics", "containerPort": METRICS_PORT}],
        "volumeMounts": _merge_named(template.volume_mounts or [], mounts),
        "terminationMessagePath": _TERMINATION_FILE,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }


def _build_resources(attempt: Attempt, *, template: PodTemplate) -> Document:
    """Add the stage's GPUs to what the overlay asks for; requests of extended resources follow their limits."""
    resources: Document = dict(template.resources or {})
    if attempt.stage.gpus_per_node:
        gpus = {"nvidia.com/gpu": str(attempt.stage.gpus_per_node)}
        resources["limits"] = {**resources.get("limits", {}), **gpus}
        if "requests" in resources:
            resources["requests"] = {**resources["requests"], **gpus}
    return resources


def _build_environment(attempt: Attempt, *, owner: Owner, template: PodTemplate) -> list[Document]:
    child = names.child_name(owner.name, attempt.stage.name, attempt.attempt)
    values = {
        names.ENV_ATTEMPT: attempt.model_dump_json(by_alias=True, exclude_none=True),
        names.ENV_CONTROL_FILE: _CONTROL_FILE,
        names.ENV_CHECKPOINT_ROOT: f"{_CHECKPOINTS}/{owner.namespace}/{owner.name}-{owner.uid[:8]}",
        names.ENV_CACHE_DIR: _CACHE,
        names.ENV_RUN_DIR: _RUN,
        names.ENV_TERMINATION_FILE: _TERMINATION_FILE,
        names.ENV_METRICS_PORT: str(METRICS_PORT),
        names.ENV_MASTER_ADDR: f"{child}-0.{child}" if attempt.stage.nodes > 1 else "127.0.0.1",
        names.ENV_MASTER_PORT: str(names.MASTER_PORT),
        names.ENV_GRACE_SECONDS: str(template.grace_seconds),
        "HOME": "/tmp",  # libraries that write below it must find it writable
    }
    rank: Document = {"fieldRef": {"fieldPath": f"metadata.labels['{LABEL_INDEX}']"}}
    variables: list[Document] = [{"name": name, "value": value} for name, value in values.items()]
    return [*variables, {"name": names.ENV_NODE_RANK, "valueFrom": rank}]


def _build_volumes(pods: Pods) -> list[Document]:
    control = {"path": "control.json", "fieldRef": {"fieldPath": f"metadata.annotations['{names.ANNOTATION_CONTROL}']"}}
    kept = {"persistentVolumeClaim": {"claimName": pods.cache_claim}} if pods.cache_claim else {"emptyDir": {}}
    return [
        {"name": "ctj-control", "downwardAPI": {"items": [control]}},
        {"name": "ctj-checkpoints", "persistentVolumeClaim": {"claimName": pods.checkpoint_claim}},
        {"name": "ctj-cache", **kept},
        {"name": "ctj-run", "emptyDir": {}},
        {"name": "ctj-tmp", "emptyDir": {}},
        {"name": "ctj-shm", "emptyDir": {"medium": "Memory"}},  # 64 MiB, the default, starves loaders and gloo
    ]


def _merge_named(theirs: list[Document], ours: list[Document]) -> list[Document]:
    """Join two lists of named objects; ours replace theirs of the same name."""
    taken = {item["name"] for item in ours}
    return [item for item in theirs if item.get("name") not in taken] + ours


def _select(values: dict[str, str], *, prefix: str, but: str | None = None) -> dict[str, str]:
    return {k: v for k, v in values.items() if k.startswith(prefix) and not (but and k.startswith(but))}
