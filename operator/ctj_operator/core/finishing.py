"""What a stage that did all its steps is worth: its gates, then promotion or a remedy. Promotion happens only here."""

from ctj_api.attempt import Mode
from ctj_api.report import CheckpointRef, Report
from ctj_api.spec import GateMode, Measurement, OnFailure
from ctj_api.status import ConditionType, GateVerdict, Stable, StagePhase, StageStatus
from ctj_api.thresholds import Verdict
from ctj_operator.core import gates, ladder, remedies
from ctj_operator.core.endings import Ending
from ctj_operator.core.situation import Situation
from ctj_operator.core.times import stamp

# Strongest first: where several gates fail, the strongest answer is given.
_STRENGTH = (OnFailure.FAIL, OnFailure.ROLLBACK, OnFailure.HOLD, OnFailure.FALLBACK)
_EAGER_FIRST = frozenset({"finite", "parity"})
"""Default gates that a fault of compilation can explain: the same stage in eager is the smaller remedy."""


def finish_stage(situation: Situation, ending: Ending, stage: StageStatus) -> Situation:
    """Judge a stage that is done and take the next step."""
    verdicts = _verdicts(situation, ending, stage)
    situation = situation.change_stage(
        stage.name, gates=verdicts, checkpoint=_end_checkpoint(ending, stage), finished_at=stamp(situation.now)
    )
    failed = gates.blocking(verdicts, Verdict.FAILED)
    if failed:
        situation = situation.change_stage(stage.name, phase=StagePhase.FAILED, message=gates.described(failed)[:1024])
        return _answer(situation, stage, failed, compiled=_ran_compiled(ending.report))
    missing = gates.blocking(verdicts, Verdict.INCONCLUSIVE)
    if missing:
        evidence = gates.described(missing)
        return remedies.hold(situation, stage, reason="GateInconclusive", message=evidence)
    return promote(situation, stage.name, why=_passed(verdicts))


def _verdicts(situation: Situation, ending: Ending, stage: StageStatus) -> list[GateVerdict]:
    report = ending.report
    before = ladder.last_passed(situation.status, before=stage.name)
    evidence = gates.StageEvidence(
        attempt=ending.attempt,
        measurements=_measurements(report, before),
        compiled=report is None or _ran_compiled(report),
        replayed=ladder.replay_of(situation.status, stage) is not None,
        has_predecessor=before is not None,
    )
    stage_rules = gates.rules(situation.spec, stage.name)
    return gates.judge(stage_rules, evidence)


def _ran_compiled(report: Report | None) -> bool:
    return report is not None and report.mode is Mode.COMPILED


def _measurements(report: Report | None, before: StageStatus | None) -> dict[Measurement, float]:
    """Complete the report: the ratio to the stage before is ours to form, the probe may be in a reused verdict."""
    if report is None:
        return {}
    found = dict(report.measurements)
    if report.compile is not None:
        for measurement, value in (
            (Measurement.PROBE_LOSS_RELATIVE, report.compile.probe_loss_relative),
            (Measurement.PROBE_GRAD_NORM_RELATIVE, report.compile.probe_grad_norm_relative),
        ):
            if value is not None:
                found.setdefault(measurement, value)
    speed = found.get(Measurement.SAMPLES_PER_SECOND_PER_PROCESS)
    reference = before.measurements.get(Measurement.SAMPLES_PER_SECOND_PER_PROCESS) if before is not None else None
    if speed is not None and reference is not None and float(reference) > 0:
        found.setdefault(Measurement.THROUGHPUT_RATIO, speed / float(reference))
    return found


def _end_checkpoint(ending: Ending, stage: StageStatus) -> CheckpointRef:
    told = ending.report.checkpoint if ending.report is not None else None
    return told if told is not None else CheckpointRef(attempt=ending.attempt, step=stage.end_step)


def _answer(situation: Situation, stage: StageStatus, failed: list[GateVerdict], *, compiled: bool) -> Situation:
    can_go_eager = remedies.may_fall_back(situation, compiled=compiled)
    answers = {_wanted(verdict, can_go_eager=can_go_eager) for verdict in failed}
    answer = next(one for one in _STRENGTH if one in answers)
    evidence = gates.described(failed)
    stage = situation.stage(stage.name)
    match answer:
        case OnFailure.FAIL:
            return situation.fail("GateFailed", f"stage {stage.name}: {evidence}")
        case OnFailure.ROLLBACK:
            return remedies.roll_back_or_hold(situation, stage, reason="GateFailed", evidence=evidence)
        case OnFailure.FALLBACK if can_go_eager:
            return remedies.fall_back(situation, stage, reason="GateFailed", evidence=evidence)
        case _:
            return remedies.hold(situation, stage, reason="GateFailed", message=evidence)


def _wanted(verdict: GateVerdict, *, can_go_eager: bool) -> OnFailure:
    if can_go_eager and verdict.name in _EAGER_FIRST:
        return OnFailure.FALLBACK
    return verdict.on_failure


def _passed(verdicts: list[GateVerdict]) -> str:
    names = [verdict.name for verdict in gates.enforced(verdicts)]
    dry = [f"{verdict.name} {verdict.verdict}" for verdict in verdicts if verdict.mode is GateMode.DRY_RUN]
    return ", ".join(names) + " passed" + (f" (dry run: {', '.join(dry)})" if dry else "")


def promote(situation: Situation, name: str, *, why: str) -> Situation:
    """Take a stage as good: it becomes the stable one, and the next stage, or the end, follows."""
    stage = situation.stage(name)
    checkpoint = stage.checkpoint or CheckpointRef(attempt=situation.status.attempt, step=stage.end_step)
    mode = stage.mode or Mode.EAGER
    situation = situation.change_stage(name, phase=StagePhase.PASSED, checkpoint=checkpoint, message=why[:1024])
    situation = situation.change(hold=None, stable=Stable(stage=name, mode=mode, checkpoint=checkpoint))
    if stage.end_step >= situation.spec.training.steps:
        rolled = situation.status.rollbacks_used > 0
        message = f"step {stage.end_step} reached in stage {name}: {why}"
        situation = situation.finish(
            ConditionType.SUCCEEDED, reason="FinishedAfterRollback" if rolled else "AllStagesPassed", message=message
        )
        return situation.tell("Succeeded", message)
    situation = situation.tell("StagePassed", f"stage {name}: {why}")
    return _enter_next(situation, name)


def _enter_next(situation: Situation, name: str) -> Situation:
    """Enter the stage above `name`, skipping those the memory prediction rules out; the last is always tried."""
    names = [stage.name for stage in situation.spec.ladder]
    *optional, last = names[names.index(name) + 1 :]
    for candidate in optional:
        too_big = _cannot_fit(situation.stage(candidate))
        if not too_big:
            return enter(situation, candidate)
        situation = skip(situation, candidate, why=too_big)
    return enter(situation, last)


def _cannot_fit(stage: StageStatus) -> str:
    predicted, limit = stage.predicted_memory_bytes, stage.memory_limit_bytes
    if predicted is None or limit is None or predicted <= limit:
        return ""
    return f"needs about {predicted / 2**30:.2f} GiB per process and has {limit / 2**30:.2f} GiB"


def skip(situation: Situation, name: str, *, why: str) -> Situation:
    """Leave a stage out of the ladder."""
    situation = situation.change_stage(name, phase=StagePhase.SKIPPED, message=why[:1024])
    return situation.warn("StageSkipped", f"stage {name} is skipped: {why}")


def enter(situation: Situation, name: str) -> Situation:
    """Make `name` the next stage to run; its budgets start anew."""
    ready = ladder.entered(situation.spec, situation.status, name)
    situation = situation.change_stage(
        name, start_step=ready.start_step, end_step=ready.end_step, lineage=ready.lineage
    )
    restarts = situation.status.restarts.model_copy(
        update={"failures": 0, "disruptions": 0, "since_step": ready.start_step}
    )
    return situation.change(stage=name, restarts=restarts)
