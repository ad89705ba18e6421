"""How the next attempt is recorded, and what its child is told. Recorded first, created after the record is stored."""

import hashlib
import json
from dataclasses import replace

from ctj_api.attempt import Attempt, JobIdentity, LineageEntry, Mode
from ctj_api.spec import CompileScope, Spec
from ctj_api.status import CurrentAttempt, StagePhase, StageStatus, Status
from ctj_operator.core import ladder
from ctj_operator.core.progress import reached
from ctj_operator.core.situation import Situation
from ctj_operator.core.times import moment, stamp

CREATE_AGAIN_SECONDS = 5.0
"""How long a child that was asked for may stay invisible before it is asked for again; later ever longer, since each
time the status is written first. That write fails for a runner whose view is old, so it cannot revive an attempt."""
CREATE_AGAIN_AT_MOST_SECONDS = 300.0
MAX_ATTEMPTS_LISTED = 64


def start(situation: Situation) -> Situation:
    """Record the next attempt of the active stage and ask for its child."""
    stage = ladder.active_stage(situation.status)
    assert stage is not None, "a job without an active stage has ended"
    situation = situation.change_stage(
        stage.name, end_step=ladder.planned_end(situation.spec, situation.status, stage.name)
    )
    stage = situation.stage(stage.name)
    number = situation.status.attempt + 1
    current = CurrentAttempt(
        attempt=number,
        stage=stage.name,
        mode=requested_mode(situation.spec, stage),
        micro_batch_size=stage.micro_batch_size or situation.spec.training.micro_batch_size,
        floor_step=stage.start_step,
        lineage=stage.lineage,
        replay=ladder.replay_of(situation.status, stage),
        generation=situation.observed.generation,
        spec_hash=attempt_hash(situation.spec, situation.status, stage.name),
        recorded_at=stamp(situation.now),
        requested_at=stamp(situation.now),
        retry_compile=stage.retry_compile,
    )
    situation = situation.change(attempt=number, current=current, stage=stage.name)
    situation = reached(situation, ladder.resume_step(stage))
    situation = situation.change_stage(
        stage.name,
        phase=StagePhase.RUNNING,
        attempts=[*stage.attempts, number][-MAX_ATTEMPTS_LISTED:],
        started_at=stage.started_at or stamp(situation.now),
        retry_compile=False,
    )
    what = f"attempt {number}: stage {stage.name}, steps {stage.start_step} to {stage.end_step}, {current.mode}"
    return replace(situation, create=True).tell("AttemptStarted", what)


def ask_again(situation: Situation) -> Situation:
    """Ask once more for a child that should be there and was never seen."""
    if situation.now < ask_again_at(situation.current):
        return situation
    return replace(situation.change_current(requested_at=stamp(situation.now)), create=True)


def ask_again_at(current: CurrentAttempt) -> float:
    """Return when a child that is still not seen is asked for again."""
    waited = moment(current.requested_at) - moment(current.recorded_at)
    pause = min(max(CREATE_AGAIN_SECONDS, waited), CREATE_AGAIN_AT_MOST_SECONDS)
    return moment(current.requested_at) + pause


def requested_mode(spec: Spec, stage: StageStatus) -> Mode:
    """Return whether the trainer may compile; whether it does is decided by its own comparison."""
    if stage.eager_because or spec.compile.scope is CompileScope.DISABLED:
        return Mode.EAGER
    return Mode.COMPILED


def attempt_hash(spec: Spec, status: Status, stage: str) -> str:
    """Fingerprint all of the spec that the stage's pods depend on.

    Defaults are left out, so that a newer release with one more field does not restart what runs.
    """
    parts = spec.model_dump(
        mode="json",
        by_alias=True,
        exclude_defaults=True,
        include={"image", "recipe", "training", "compile", "template"},
    )
    own = ladder.stage_of(spec, stage).model_dump(mode="json", by_alias=True, exclude_defaults=True)
    document = {**parts, "stage": own, "end": ladder.planned_end(spec, status, stage)}
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]


def build_attempt(spec: Spec, status: Status, job: JobIdentity) -> Attempt:
    """Return the message for the recorded attempt; the same record gives the same message."""
    current = status.current
    assert current is not None, "only a recorded attempt is built"
    stage = next(stage for stage in status.ladder if stage.name == current.stage)
    return Attempt(
        job=job,
        attempt=current.attempt,
        stage=ladder.stage_of(spec, current.stage),
        window=ladder.attempt_window(spec, stage),
        ladder=list(spec.ladder),
        floor_step=current.floor_step,
        lineage=current.lineage,
        replay=current.replay,
        mode=current.mode,
        retry_compile=current.retry_compile,
        micro_batch_size=current.micro_batch_size,
        pinned=_pinned(status, stage),
        recipe=spec.recipe,
        training=spec.training,
        compile=spec.compile,
        compile_cache=status.compile_cache,
    )


def _pinned(status: Status, stage: StageStatus) -> list[LineageEntry]:
    """What later remedies go back to: where this stage starts, and the last stage known to be good."""
    pinned = ladder.base_lineage(stage)
    if status.stable is not None:
        good = status.stable.checkpoint
        pinned.append(LineageEntry(attempt=good.attempt, max_step=good.step))
    return pinned
