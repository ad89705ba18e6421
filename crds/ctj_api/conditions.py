"""Every condition's closed list of reasons, and what each means: part of the API, printed in docs/reference."""

from ctj_api.status import ConditionType

_FAILURES = {
    "RetryLimit": "spec.restart.maxFailures restarts brought no new checkpoint.",
    "DisruptionLimit": "spec.restart.maxDisruptions disruptions came without a new checkpoint in between.",
    "Configuration": "A trainer refused its configuration (exit code 10); the same would happen again.",
    "UserCode": "The recipe's code raised (exit code 11); the same would happen again.",
    "UserCodeOrImage": "An exit code that is not ours: user code or the image.",
    "CompileFailed": "Compilation failed where eager is impossible (exit code 17).",
    "OutOfMemory": "Out of memory with the smallest micro batch, and no stage shards more.",
    "NonFinite": "Loss or gradient norm was not finite again, in eager, from the last finite checkpoint.",
    "GateFailed": "A gate with onFailure Fail failed.",
    "HoldTimeout": "Nobody approved in time; onTimeout is Fail or there was nothing to roll back to.",
    "DeadlineExceeded": "spec.activeDeadlineSeconds of running time are used up.",
    "PendingDeadlineExceeded": "An attempt waited spec.pendingDeadlineSeconds without a first step.",
}
_HOLDS = {
    "GateInconclusive": "An enforced gate lacks a measurement: no data neither passes nor condemns.",
    "GateFailed": "A gate failed, and its remedy is Hold or is used up.",
}

REASONS: dict[ConditionType, dict[str, str]] = {
    ConditionType.ACCEPTED: {
        "SpecAccepted": "The spec can be run.",
        "InvalidSpec": "The stored spec cannot be run; the message names every problem. Nothing is started.",
    },
    ConditionType.ADMITTED: {
        "Admitted": "The attempt's Job may run.",
        "WaitingForQuota": "The attempt's Job is suspended from outside (Kueue): waiting for quota.",
        "NoAttempt": "There is no attempt to admit.",
        "NotCreated": "The attempt's Job was not seen yet.",
    },
    ConditionType.RUNNING: {
        "PodsRunning": "Pods of the current attempt run.",
        "PodsPending": "Pods of the current attempt wait for a node, an image or a volume.",
        "WaitingForQuota": "The attempt's Job waits for quota.",
        "NotCreated": "The attempt's Job was not seen yet.",
        "NoAttempt": "Nothing runs and nothing is about to.",
        "Finished": "The job has ended.",
    },
    ConditionType.PROGRESSING: {
        "Starting": "An attempt starts: processes, data, checkpoint.",
        "Compiling": "The trainer compiles or compares compiled with eager.",
        "Training": "Steps are being done.",
        "Saving": "A checkpoint or the final weights are being written.",
        "Restarting": "An attempt ended early; the next one starts from the newest checkpoint.",
        "Stopping": "The attempt saves a checkpoint and ends, as asked.",
        "CleaningUp": "Children of earlier attempts must be gone before anything starts.",
        "WaitingForQuota": "The attempt's Job waits for quota.",
        "Blocked": "The attempt's Job cannot be created; see Degraded.",
        "Held": "A person must approve.",
        "Suspended": "spec.suspend is true.",
        "InvalidSpec": "The spec must be repaired.",
        "Finished": "The job has ended.",
    },
    ConditionType.COMPILED: {
        "Compiled": "The stage runs, or ran last, compiled.",
        "TrainerChoseEager": "The trainer compared and kept eager; the message says why.",
        "FellBack": "A remedy or a person turned compilation off for this stage.",
        "CompileDisabled": "spec.compile.scope is disabled.",
        "NotYetDecided": "No stage has decided yet.",
    },
    ConditionType.GATE_PASSED: {
        "AllPassed": "Every enforced gate of the last judged stage passed.",
        "Approved": "A person approved the stage although its gates did not pass.",
        "GateFailed": "An enforced gate of the last judged stage failed.",
        "GateInconclusive": "An enforced gate of the last judged stage lacks a measurement.",
        "NotEvaluated": "No stage was judged yet.",
    },
    ConditionType.DEGRADED: {
        "AsExpected": "Nothing is out of order.",
        "NameTaken": "Somebody else owns an object of the name the attempt needs; it is never adopted.",
        "ChildCreateFailed": "The attempt's Job was refused; the message is the API server's.",
        "PodsCannotStart": "A pod cannot start: image, volume, or no node fits.",
        "Restarts": "Attempts failed or were disrupted since the newest checkpoint.",
    },
    ConditionType.HELD: {"NotHeld": "Nobody needs to approve anything.", **_HOLDS},
    ConditionType.SUSPENDED: {
        "NotSuspended": "spec.suspend is false.",
        "Stopping": "spec.suspend is true and the attempt still saves its checkpoint.",
        "SuspendRequested": "spec.suspend is true and no pod is left.",
    },
    ConditionType.ROLLED_BACK: {
        "NotRolledBack": "No stage was given up.",
        "GateFailed": "A stage's gates failed; the job finishes in the last good stage.",
        "HoldTimeout": "Nobody approved in time; the job finishes in the last good stage.",
        "Requested": "A person asked for it; the job finishes in the last good stage.",
    },
    ConditionType.SUCCEEDED: {
        "AllStagesPassed": "All steps are done and the last stage passed its gates.",
        "FinishedAfterRollback": "All steps are done, in an earlier stage than asked for.",
        "NotFinished": "The job has not ended.",
        "Failed": "The job failed.",
    },
    ConditionType.FAILED: {"NotFailed": "The job has not failed.", **_FAILURES},
}
"""The first pass sets them all; `Unknown` is used with NoAttempt, NotCreated, NotYetDecided and NotEvaluated only."""
