"""What people ask for beside the spec: approve, force-eager, retry-compile, rollback, and the retry token.

Each new token acts once; it is remembered in `status.handled`.
"""

from collections.abc import Callable

from ctj_api.attempt import Mode
from ctj_api.names import VERB_APPROVE, VERB_FORCE_EAGER, VERB_RETRY_COMPILE, VERB_ROLLBACK, VERBS
from ctj_api.spec import CompileScope
from ctj_api.status import StagePhase, StageStatus, Status
from ctj_api.thresholds import Verdict
from ctj_operator.core import gates, ladder, remedies
from ctj_operator.core.finishing import promote
from ctj_operator.core.situation import Situation
from ctj_operator.core.stopping import Stop, stop


def obey(situation: Situation) -> Situation:
    """Do what every new token asks for, and remember the token."""
    for verb in VERBS:
        token = situation.observed.annotations.get(verb)
        if token is None or situation.status.handled.get(verb) == token:
            continue
        situation = situation.change(handled={**situation.status.handled, verb: token})
        situation = _ACTIONS[verb](situation)
        if situation.end is not None:
            break
    return situation


def ignore(situation: Situation) -> Situation:
    """Remember tokens that come after the end, so that a later retry does not act on them."""
    fresh = {verb: token for verb, token in situation.observed.annotations.items() if verb in VERBS}
    if fresh.items() <= situation.status.handled.items():
        return situation
    situation = situation.change(handled={**situation.status.handled, **fresh})
    return situation.warn("NothingToDo", "the job has ended; spec.retryToken starts it again")


def _approve(situation: Situation) -> Situation:
    held = situation.status.hold
    if held is None:
        return situation.warn("NothingToDo", "approve: the job is not held")
    why = f"approved by a person although {held.message}"
    situation = situation.remedy("Approve", reason=held.reason, evidence=held.message)
    return promote(situation, situation.status.stage, why=why)


def _force_eager(situation: Situation) -> Situation:
    active = ladder.active_stage(situation.status)
    if active is None:
        return situation.warn("NothingToDo", "force-eager: no stage is left to run")
    for name in _from(situation.status, active.name):
        situation = situation.change_stage(name, eager_because="forced by a person")
    situation = situation.remedy("ForceEager", reason="Requested", evidence="asked for by a person")
    current = situation.status.current
    if current is not None and current.mode is Mode.COMPILED and current.compile_control is Mode.COMPILED:
        situation = situation.change_current(compile_control=Mode.EAGER, control_sequence=current.control_sequence + 1)
    return situation.tell("ForceEager", f"stage {active.name} and later ones run eager from now on")


def _retry_compile(situation: Situation) -> Situation:
    active = ladder.active_stage(situation.status)
    if active is None or situation.spec.compile.scope is CompileScope.DISABLED:
        return situation.warn("NothingToDo", "retry-compile: no stage is left, or spec.compile.scope is disabled")
    current = situation.status.current
    if current is not None and situation.stage(current.stage).mode is Mode.COMPILED and not active.eager_because:
        return situation.warn("NothingToDo", f"retry-compile: stage {active.name} runs compiled")
    for name in _from(situation.status, active.name):
        situation = situation.change_stage(name, eager_because="")
    situation = situation.change_stage(active.name, retry_compile=True)
    situation = situation.remedy("RetryCompile", reason="Requested", evidence="asked for by a person")
    if current is not None and not current.stopping:
        return stop(situation, Stop.RETRY_COMPILE, "it starts again and measures compiled against eager")
    return situation.tell("RetryCompile", f"stage {active.name} measures compiled against eager when it starts")


def _roll_back(situation: Situation) -> Situation:
    stage = situation.stage(situation.status.stage) if situation.status.stage else None
    obstacle = "no stage has run" if stage is None else remedies.nothing_to_go_back_to(situation, stage)
    if stage is None or obstacle:
        return situation.warn("NothingToDo", f"rollback: {obstacle}")
    if situation.status.current is not None:
        return stop(situation, Stop.ROLLBACK, "a rollback was asked for")
    return remedies.roll_back(situation, stage, reason="Requested", evidence="asked for by a person")


_ACTIONS: dict[str, Callable[[Situation], Situation]] = {
    VERB_APPROVE: _approve,
    VERB_FORCE_EAGER: _force_eager,
    VERB_RETRY_COMPILE: _retry_compile,
    VERB_ROLLBACK: _roll_back,
}


def _from(status: Status, first: str) -> list[str]:
    names = [stage.name for stage in status.ladder]
    return names[names.index(first) :]


def _did_not_pass(stage: StageStatus) -> bool:
    """Return whether the stage's last attempt came to its end and was not good enough."""
    if not stage.gates or stage.gates[0].attempt != stage.attempts[-1]:
        return False
    return any(verdict.verdict is not Verdict.PASSED for verdict in gates.enforced(stage.gates))


def rearm(situation: Situation) -> Situation:
    """Give a held or failed job new budgets and let its stage run again; the evidence so far stays in remedies.

    A stage whose gates failed or were held starts again from its start, one that crashed from its newest checkpoint.
    """
    status = situation.status
    stage = situation.stage(status.stage) if status.stage else status.ladder[0]
    judged = _did_not_pass(stage)
    situation = situation.change_stage(
        stage.name,
        phase=StagePhase.PENDING,
        eager_because="",
        micro_batch_size=None,
        gates=[],
        retry_compile=judged,
        lineage=ladder.base_lineage(stage) if judged else stage.lineage,
        checkpoint=None if judged else stage.checkpoint,
        finished_at=None,
    )
    since = stage.start_step if judged else status.restarts.since_step
    situation = situation.change(
        hold=None,
        finished_at=None,
        fallbacks_used=0,
        rollbacks_used=0,
        non_finite_used=False,
        active_seconds=0.0,
        restarts=status.restarts.model_copy(update={"failures": 0, "disruptions": 0, "since_step": since}),
    )
    situation = situation.remedy(
        "Retry", reason="Requested", evidence=f"spec.retryToken {situation.spec.retry_token!r}"
    )
    return situation.tell("Retry", f"gates and budgets are armed again; stage {stage.name} runs again")
