"""Every name that two sides must agree on: API group, labels, annotations, environment, children, files."""

GROUP = "training.ctj.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "CompiledTrainingJob"
PLURAL = "compiledtrainingjobs"
SHORT_NAME = "ctj"
CATEGORY = "training"

LABEL_JOB = f"{GROUP}/job"
LABEL_JOB_UID = f"{GROUP}/job-uid"
LABEL_STAGE = f"{GROUP}/stage"
LABEL_ATTEMPT = f"{GROUP}/attempt"

ANNOTATION_CONTROL = f"{GROUP}/control"
# Verbs on the job; the value is any token not handled before.
VERB_APPROVE = f"{GROUP}/approve"
VERB_FORCE_EAGER = f"{GROUP}/force-eager"
VERB_RETRY_COMPILE = f"{GROUP}/retry-compile"
VERB_ROLLBACK = f"{GROUP}/rollback"
VERBS = (VERB_APPROVE, VERB_FORCE_EAGER, VERB_RETRY_COMPILE, VERB_ROLLBACK)

ENV_ATTEMPT = "CTJ_ATTEMPT"
ENV_CONTROL_FILE = "CTJ_CONTROL_FILE"
ENV_CHECKPOINT_ROOT = "CTJ_CHECKPOINT_ROOT"
ENV_CACHE_DIR = "CTJ_CACHE_DIR"
ENV_RUN_DIR = "CTJ_RUN_DIR"
ENV_TERMINATION_FILE = "CTJ_TERMINATION_FILE"
ENV_METRICS_PORT = "CTJ_METRICS_PORT"
ENV_NODE_RANK = "CTJ_NODE_RANK"
ENV_MASTER_ADDR = "CTJ_MASTER_ADDR"
ENV_MASTER_PORT = "CTJ_MASTER_PORT"
ENV_GRACE_SECONDS = "CTJ_GRACE_SECONDS"
ENV_HANG_SECONDS = "CTJ_HANG_SECONDS"
ENV_HEARTBEAT_SECONDS = "CTJ_HEARTBEAT_SECONDS"
ENV_HOLD_SECONDS = "CTJ_PEER_LOST_HOLD_SECONDS"
ENV_WORKER_MODULE = "CTJ_WORKER_MODULE"
ENV_PARENT = "CTJ_PARENT_PID"
ENV_AGENT_RECORD = "CTJ_AGENT_RECORD"
ENV_TRAINER_PYTHON = "CTJ_TRAINER_PYTHON"
ENV_OPERATOR_PREFIX = "CTJ_OPERATOR_"
ENV_PROFILES_FILE = "CTJ_PROFILES_FILE"

MASTER_PORT = 29500  # torchrun's own default; every pod has a network of its own
GRACE_SECONDS = 60  # where the spec gives none: 45 for a checkpoint, 15 for the launcher to end
HANG_SECONDS = 300.0
HEARTBEAT_SECONDS = 60.0
HOLD_SECONDS = 15.0

# Files that one side writes and the other reads, below the checkpoint root and the run folder.
REPORT_FILE = "report.json"
STEPS_FILE = "steps.jsonl"
MANIFEST_FILE = "manifest.json"
EXPORT_FOLDER = "export"
TRACKERS_FOLDER = "trackers"
CACHE_FOLDER = "compile-cache"
PROGRESS_FILE = "progress.json"

# What each is for, printed in docs/reference.
LABELS = {
    LABEL_JOB: "name of the job, on everything that belongs to it",
    LABEL_JOB_UID: "uid of the job: a job of the same name later never takes these for its own",
    LABEL_STAGE: "name of the stage",
    LABEL_ATTEMPT: "number of the attempt",
}
ANNOTATIONS = {
    ANNOTATION_CONTROL: "on pods, by the operator: what the attempt must do now, as JSON; the newest wins",
    VERB_APPROVE: "on the job, by a person: promote the held stage",
    VERB_FORCE_EAGER: "on the job, by a person: go on without compiled code",
    VERB_RETRY_COMPILE: "on the job, by a person: compile and compare again",
    VERB_ROLLBACK: "on the job, by a person: back to the last good stage",
}
ENVIRONMENT = {
    ENV_ATTEMPT: "the attempt as JSON: all that a trainer knows of its job",
    ENV_CONTROL_FILE: "file with the newest control state",
    ENV_CHECKPOINT_ROOT: "one folder per job: attempts, their checkpoints, manifests and reports",
    ENV_CACHE_DIR: "compile cache of the node",
    ENV_RUN_DIR: "scratch of this pod: progress, marks, logs",
    ENV_TERMINATION_FILE: "file that becomes the pod's termination message",
    ENV_METRICS_PORT: "port of this pod's metrics; none if absent",
    ENV_NODE_RANK: "index of this pod",
    ENV_MASTER_ADDR: "host of pod 0",
    ENV_MASTER_PORT: "port of the rendezvous",
    ENV_GRACE_SECONDS: "seconds from SIGTERM to the kill: the pod's grace period",
    ENV_HANG_SECONDS: f"seconds without a step after which an attempt hangs; {HANG_SECONDS:.0f} if absent",
    ENV_HEARTBEAT_SECONDS: f"seconds without a sign of life after which a pod hangs; {HEARTBEAT_SECONDS:.0f} if absent",
    ENV_HOLD_SECONDS: f"seconds a pod waits for the cause after it lost a peer; {HOLD_SECONDS:.0f} if absent",
    ENV_WORKER_MODULE: "module whose `main()` a worker runs; for tests",
    ENV_PARENT: "set by the supervisor: pid that agent and workers live below",
    ENV_AGENT_RECORD: "set by the supervisor: file in which torchrun's agent says how its workers ended",
    ENV_PROFILES_FILE: "the platform's hardware profiles, laid over the shipped ones; none if absent",
}
ENVIRONMENT_OUTSIDE = {
    ENV_TRAINER_PYTHON: "of `ctj run`: interpreter that has the trainer, where it is not ctj's own",
    f"{ENV_OPERATOR_PREFIX}<FLAG>": "of the operator: a flag that is not given, in capitals, with _ for -; "
    "all but --namespace, which may be repeated",
}

# A Job's pods get the hostname <job>-<index>, at most 63 characters: name, stage, attempt (5 digits), index (3).
MAX_JOB_AND_STAGE = 63 - len("-") - len("-99999") - len("-999")


def child_name(job: str, stage: str, attempt: int) -> str:
    """Name of the Indexed Job, its Service and its local process group."""
    return f"{job}-{stage}-{attempt}"


def attempt_folder(attempt: int) -> str:
    """Folder of one attempt below the checkpoint root."""
    return f"attempt-{attempt:05d}"


def step_folder(step: int) -> str:
    """Folder of one checkpoint below its attempt's folder."""
    return f"step-{step:08d}"
