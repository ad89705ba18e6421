"""What follows when an attempt ends before its stage does: again, smaller, eager, in another stage, or never again.

Failures and disruptions have a budget each. Both count only while no new checkpoint was made in between, so that day 30
does not die of day 1's failures and no loop is endless.
"""

from collections.abc import Callable

from ctj_api.status import StagePhase, StageStatus
from ctj_operator.core import ladder
from ctj_operator.core.endings import Ending, Kind
from ctj_operator.core.finishing import enter, skip
from ctj_operator.core.situation import Situation


def answer_failure(situation: Situation, ending: Ending, stage: StageStatus, *, new_checkpoint: bool) -> Situation:
    """Decide what follows an attempt that did not finish."""
    if ending.kind is Kind.STOPPED and new_checkpoint:
        return _uncounted(situation, stage, ending)
    return _ANSWERS[ending.kind](situation, ending, stage)


def _again(situation: Situation, stage: StageStatus) -> Situation:
    """Leave the stage to be started again from its newest checkpoint."""
    restarts = situation.status.restarts
    situation = situation.change(restarts=restarts.model_copy(update={"total": restarts.total + 1}))
    return situation.change_stage(stage.name, phase=StagePhase.PENDING)


def _uncounted(situation: Situation, stage: StageStatus, ending: Ending) -> Situation:
    message = f"attempt {ending.attempt} was stopped from outside and saved a checkpoint; it is not counted"
    return _again(situation, stage).tell("Restarting", message)


def _count_failure(situation: Situation, ending: Ending, stage: StageStatus) -> Situation:
    spent, limit = situation.status.restarts.failures, situation.spec.restart.max_failures
    if spent >= limit:
        return _used_up(situation, ending, "RetryLimit", f"{limit} restarts")
    return _restart(situation, ending, stage, count=f"failure {spent + 1} of {limit}", failures=spent + 1)


def _count_disruption(situation: Situation, ending: Ending, stage: StageStatus) -> Situation:
    spent, limit = situation.status.restarts.disruptions, situation.spec.restart.max_disruptions
    if spent >= limit:
        return _used_up(situation, ending, "DisruptionLimit", f"{limit} disruptions")
    return _restart(situation, ending, stage, count=f"disruption {spent + 1} of {limit}", disruptions=spent + 1)


def _used_up(situation: Situation, ending: Ending, reason: str, budget: str) -> Situation:
    return situation.fail(reason, f"{budget} without a new checkpoint are used up; last: {_evidence(ending)}")


def _restart(situation: Situation, ending: Ending, stage: StageStatus, *, count: str, **spent: int) -> Situation:
    situation = situation.change(restarts=situation.status.restarts.model_copy(update=spent))
    situation = situation.remedy("Restart", reason=ending.reason, evidence=_evidence(ending))
    return _again(situation, stage).warn("Restarting", f"{_evidence(ending)}; all pods start again ({count})")


def _evidence(ending: Ending) -> str:
    return f"attempt {ending.attempt}: {ending.message}"


def _smaller(situation: Situation, ending: Ending, stage: StageStatus) -> Situation:
    """Out of memory: half the micro batch (the global batch stays), then a stage that shards more, then no more.

    The half need not divide a process's share: the trainer's last micro batch of a step is then a smaller one.
    """
    spec = situation.spec
    micro = stage.micro_batch_size or spec.training.micro_batch_size
    evidence = f"attempt {ending.attempt} in stage {stage.name}: {ending.message}"
    half = micro // 2
    if half >= 1:
        situation = situation.remedy("SmallerMicroBatch", reason=ending.reason, evidence=evidence)
        situation = situation.change_stage(stage.name, micro_batch_size=half)
        message = f"{evidence}; micro batch {micro} -> {half}, global batch stays {spec.training.global_batch_size}"
        return _again(situation, stage).warn("SmallerMicroBatch", message)
    above = ladder.more_sharded(spec, stage.name)
    if above is None:
        return situation.fail(
            "OutOfMemory", f"{evidence}; micro batch {micro} cannot be halved, and no stage shards more"
        )
    situation = situation.remedy("MoreSharding", reason=ending.reason, evidence=evidence)
    names = [one.name for one in spec.ladder]
    for name in names[names.index(stage.name) : names.index(above.name)]:
        situation = skip(situation, name, why=f"out of memory in {stage.name}: {ending.message}")
    situation = situation.warn("MoreSharding", f"{evidence}; stage {above.name} is next, it shards over more processes")
    return enter(situation, above.name)


def _eager_once(situation: Situation, ending: Ending, stage: StageStatus) -> Situation:
    """Loss or gradient norm not finite: from the last finite checkpoint in eager, once in the life of the job."""
    evidence = f"attempt {ending.attempt}: {ending.message}"
    if situation.status.non_finite_used:
        return situation.fail("NonFinite", f"loss or gradient norm is not finite again, now in eager; {evidence}")
    situation = situation.change(non_finite_used=True).remedy("Fallback", reason="NonFinite", evidence=evidence)
    situation = situation.change_stage(stage.name, eager_because=f"NonFinite: {evidence}"[:256])
    return _again(situation, stage).warn("Fallback", f"{evidence}; continues in eager from the last finite checkpoint")


def _never_again(situation: Situation, ending: Ending, stage: StageStatus) -> Situation:
    return situation.fail(ending.reason, f"stage {stage.name}, attempt {ending.attempt}: {ending.message}")


_ANSWERS: dict[Kind, Callable[[Situation, Ending, StageStatus], Situation]] = {
    Kind.STOPPED: _count_disruption,  # Somebody keeps stopping it before it can save: not endless either.
    Kind.DISRUPTED: _count_disruption,
    Kind.FAILED: _count_failure,
    Kind.OUT_OF_MEMORY: _smaller,
    Kind.NON_FINITE: _eager_once,
    Kind.PERMANENT: _never_again,
}
