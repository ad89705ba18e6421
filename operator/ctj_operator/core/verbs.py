"""What people ask for beside the spec: approve, force-eager, retry-compile, rollback, and the retry token.

Each new token acts once; it is remembered in `status.handled`. What can have no effect is answered with the reason:
by an event, or by the command line before it is even stored.
"""

from collections.abc import Callable

from ctj_api.attempt import Mode
from ctj_api.names import VERB_APPROVE, VERB_FORCE_EAGER, VERB_RETRY_COMPILE, VERB_ROLLBACK, VERBS
from ctj_api.spec import CompileScope, Spec
from ctj_api.status import ConditionType, StagePhase, StageStatus, Status
from ctj_api.thresholds import Verdict
from ctj_operator.core import conditions, gates, ladder, remedies
from ctj_operator.core.finishing import promote
from ctj_operator.core.situation import Situation
from ctj_operator.core.stopping import StopReason, ask_to_stop


def obey(situation: Situation) -> Situation:
    """Do what every new token asks for, and remember the token."""
    for verb in VERBS:
        token = situation.observed.annotations.get(verb)
        if token is None or situation.status.handled.get(verb) == token:
            continue
        situation = situation.change(handled={**situation.status.handled, verb: token})
        obstacle = _OBSTACLES[verb](situation.spec, situation.status)
        situation = _ACTIONS[verb](situation) if not obstacle else _answer(situation, _word(verb), obstacle)
        if situation.end is not None:
            break
    return situation


def ignore(situation: Situation) -> Situation:
    """Remember what is asked for after the end, so that a later retry does not act on it, and say why it is ignored."""
    status = situation.status
    asked = {verb: token for verb, token in situation.observed.annotations.items() if verb in VERBS}
    fresh = [verb for verb, token in asked.items() if status.handled.get(verb) != token]
    words = [_word(verb) for verb in fresh]
    if situation.spec.retry_token != status.retry_token:
        words.append("spec.retryToken")
    if not words:
        return situation
    situation = situation.change(handled={**status.handled, **asked}, retry_token=situation.spec.retry_token)
    return _answer(situation, ", ".join(words), over(situation.spec, status))


def over(spec: Spec, status: Status) -> str:
    """Return why nothing that is asked of a finished job has an effect; empty while it may go on."""
    if conditions.is_true(status, ConditionType.SUCCEEDED):
        return "the job has succeeded, nothing is left to train; create another job to train again"
    if conditions.is_true(status, ConditionType.FAILED) and not _retries(spec, status):
        return "the job has failed, nothing of it runs; retry it first (spec.retryToken, `ctj retry`), then ask again"
    return ""


def why_not(verb: str, spec: Spec, status: Status) -> str:
    """Return why `verb` (an annotation of the job) would do nothing; empty where it has an effect.

    Raises:
        SpecProblem: the job was never looked at, and its spec cannot be run.
    """
    if not status.ladder:
        status = status.model_copy(update={"ladder": ladder.first_statuses(spec)})
    finished = over(spec, status)
    about_to_run = conditions.is_finished(status) and not finished
    return finished if finished or about_to_run else _OBSTACLES[verb](spec, status)


def why_no_retry(spec: Spec, status: Status) -> str:
    """Return why a new spec.retryToken would do nothing; empty where it starts the job again."""
    if conditions.is_true(status, ConditionType.SUCCEEDED):
        return over(spec, status)
    waits = status.hold is not None or conditions.is_true(status, ConditionType.FAILED)
    return "" if waits else "the job has not failed and is not held, so there is nothing to arm again"


def _retries(spec: Spec, status: Status) -> bool:
    """A retry token that nobody has seen yet."""
    return spec.retry_token != status.retry_token


def _not_held(_spec: Spec, status: Status) -> str:
    return "" if status.hold is not None else "the job is not held"


def _nothing_to_run(_spec: Spec, status: Status) -> str:
    return "" if ladder.active_stage(status) is not None else "no stage is left to run"


def _compiles_already(spec: Spec, status: Status) -> str:
    active = ladder.active_stage(status)
    if active is None or spec.compile.scope is CompileScope.DISABLED:
        return "no stage is left, or spec.compile.scope is disabled"
    current = status.current
    if current is not None and active.mode is Mode.COMPILED and not active.eager_because:
        return f"stage {active.name} runs compiled"
    return ""


def _nowhere_to_go_back_to(spec: Spec, status: Status) -> str:
    return remedies.nothing_to_go_back_to(spec, status, status.stage) if status.stage else "no stage has run"


_OBSTACLES: dict[str, Callable[[Spec, Status], str]] = {
    VERB_APPROVE: _not_held,
    VERB_FORCE_EAGER: _nothing_to_run,
    VERB_RETRY_COMPILE: _compiles_already,
    VERB_ROLLBACK: _nowhere_to_go_back_to,
}


def _answer(situation: Situation, asked: str, why: str) -> Situation:
    return situation.warn("NothingToDo", f"{asked} is ignored: {why}")


def _word(verb: str) -> str:
    return verb.rpartition("/")[2]


def _approve(situation: Situation) -> Situation:
    held = situation.status.hold
    assert held is not None
    why = f"approved by a person although {held.message}"
    situation = situation.remedy("Approve", reason=held.reason, evidence=held.message)
    return promote(situation, situation.status.stage, why=why)


def _force_eager(situation: Situation) -> Situation:
    active = ladder.active_stage(situation.status)
    assert active is not None
    for name in _from(situation.status, active.name):
        situation = situation.change_stage(name, eager_because="forced by a person")
    situation = situation.remedy("ForceEager", reason="Requested", evidence="asked for by a person")
    current = situation.status.current
    if current is not None and current.mode is Mode.COMPILED and current.compile_control is Mode.COMPILED:
        situation = situation.change_current(compile_control=Mode.EAGER, control_sequence=current.control_sequence + 1)
    return situation.tell("ForceEager", f"stage {active.name} and later ones run eager from now on")


def _retry_compile(situation: Situation) -> Situation:
    active = ladder.active_stage(situation.status)
    assert active is not None
    for name in _from(situation.status, active.name):
        situation = situation.change_stage(name, eager_because="")
    situation = situation.change_stage(active.name, retry_compile=True)
    situation = situation.remedy("RetryCompile", reason="Requested", evidence="asked for by a person")
    current = situation.status.current
    if current is not None and not current.stopping:
        return ask_to_stop(situation, StopReason.RETRY_COMPILE, "it starts again and measures compiled against eager")
    return situation.tell("RetryCompile", f"stage {active.name} measures compiled against eager when it starts")


def _roll_back(situation: Situation) -> Situation:
    if situation.status.current is not None:
        return ask_to_stop(situation, StopReason.ROLLBACK, "a rollback was asked for")
    stage = situation.stage(situation.status.stage)
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
