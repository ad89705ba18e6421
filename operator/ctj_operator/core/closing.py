"""What is kept of an attempt that ended, and who decides what follows."""

from dataclasses import replace

from ctj_api.report import CheckpointRef, Report
from ctj_operator.core import gates, ladder
from ctj_operator.core.endings import Ending, Kind
from ctj_operator.core.finishing import finish_stage
from ctj_operator.core.progress import account, reached
from ctj_operator.core.restarts import answer_failure
from ctj_operator.core.situation import Situation
from ctj_operator.core.stopping import StopReason, after_stop


def close_attempt(situation: Situation, ending: Ending) -> Situation:
    """Take over an ended attempt's results and decide what follows; afterwards no attempt is recorded."""
    current = situation.current
    situation = account(situation, until=ending.at)
    ending = _unless_early(ending, end_step=situation.stage(current.stage).end_step)
    situation, new_checkpoint = _note_checkpoint(situation, ending)
    stage = situation.stage(current.stage)
    newest = stage.checkpoint.attempt if stage.checkpoint is not None else None
    lineage = ladder.lengthened(stage, attempt=ending.attempt, checkpoint_attempt=newest)
    situation = situation.change_stage(stage.name, lineage=lineage)
    if ending.report is not None:
        situation = _take_report(situation, stage.name, ending.report)
    if ending.failure is not None and ending.kind is not Kind.STOPPED:
        situation = situation.change(first_failure=ending.failure)
    situation = situation.change(current=None)
    stage = situation.stage(stage.name)
    if current.stopping and (ending.kind is not Kind.DONE or current.stopping == StopReason.ROLLBACK):
        return after_stop(situation, stage, why=StopReason(current.stopping))
    if ending.kind is Kind.DONE:
        return finish_stage(situation, ending, stage)
    return answer_failure(situation, ending, stage, new_checkpoint=new_checkpoint)


def _unless_early(ending: Ending, *, end_step: int) -> Ending:
    """A trainer that says "done" before the stage's last step has not done it: never a promotion."""
    if ending.kind is not Kind.DONE or ending.report is None or ending.report.step >= end_step:
        return ending
    message = f"it ended well at step {ending.report.step}, but its stage ends at step {end_step}"
    return replace(ending, kind=Kind.FAILED, reason="EndedEarly", message=message)


def _note_checkpoint(situation: Situation, ending: Ending) -> tuple[Situation, bool]:
    """Keep the newest known checkpoint; a new one is progress, and the restart budgets start anew."""
    told = ending.report.checkpoint if ending.report is not None else None
    steps = [ending.seen_checkpoint_step, situation.current.checkpoint_step]
    if told is not None and told.attempt == ending.attempt:
        steps.append(told.step)
    newest = max((step for step in steps if step is not None), default=None)
    if newest is None:
        return situation, False
    stage = situation.stage(situation.current.stage)
    if stage.checkpoint is None or newest >= stage.checkpoint.step:
        reference = CheckpointRef(attempt=ending.attempt, step=newest)
        situation = situation.change_stage(stage.name, checkpoint=reference)
    restarts = situation.status.restarts
    if newest <= restarts.since_step:
        return situation, False
    reset = restarts.model_copy(update={"failures": 0, "disruptions": 0, "since_step": newest})
    return situation.change(restarts=reset), True


def _take_report(situation: Situation, stage: str, report: Report) -> Situation:
    # An attempt that ended before it had loaded anything says 0.
    came_to = max(report.step, report.start_step) or ladder.resume_step(situation.stage(stage))
    situation = reached(situation, came_to)
    situation = situation.change(mode=report.mode).change_stage(
        stage,
        mode=report.mode,
        measurements={name: gates.figure(value) for name, value in report.measurements.items()},
        compile_reason=report.compile.reason if report.compile is not None else situation.stage(stage).compile_reason,
    )
    if report.compile_cache is not None:
        situation = situation.change(compile_cache=report.compile_cache)
    known = {one.name for one in situation.status.ladder}
    for prediction in report.memory:
        if prediction.stage in known:
            situation = situation.change_stage(
                prediction.stage,
                predicted_memory_bytes=prediction.predicted_bytes,
                memory_limit_bytes=prediction.limit_bytes,
            )
    for notice in report.notices:
        situation = situation.warn("TrainerNotice", f"attempt {report.attempt}: {notice}")
    return situation
