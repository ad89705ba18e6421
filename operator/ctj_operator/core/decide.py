"""What must happen next to one job: the only place where attempts start, stages are promoted and remedies chosen.

Pure: the observation and the time go in, a Decision comes out. A pass has three beats: attend to the recorded attempt;
when there is none, start the next one unless something speaks against it; say what follows from the new status.
"""

from ctj_api.attempt import Mode
from ctj_api.control import CompileControl, Control, StopControl
from ctj_api.status import ConditionType
from ctj_operator.core import conditions, ladder, remedies
from ctj_operator.core.closing import close_attempt
from ctj_operator.core.decision import Decision, Event, EventType
from ctj_operator.core.endings import read_ending, vanished
from ctj_operator.core.ladder import SpecProblem
from ctj_operator.core.observed import Child, ChildState, Observed
from ctj_operator.core.progress import follow, settled
from ctj_operator.core.schedule import next_look
from ctj_operator.core.situation import Situation
from ctj_operator.core.starting import ask_again, build_attempt, start
from ctj_operator.core.stopping import StopReason, insist, is_late, stop_if_needed
from ctj_operator.core.times import moment
from ctj_operator.core.verbs import ignore, obey, rearm, why_no_retry

KEPT_CHILDREN = 8
"""Finished children kept, so that logs of the last attempts can be read; they hold no GPU. The rest go with the job."""


def decide(observed: Observed, *, now: float) -> Decision:
    """Return the next status of one job and what to do once it is stored."""
    if observed.deleting:
        mine = tuple(child.uid for child in observed.children if child.ours and not child.deleting)
        return Decision(status=observed.status, delete=mine)
    try:
        situation = _first_sight(observed, now)
    except SpecProblem as problem:
        return _refuse(observed, str(problem), now)
    if conditions.is_finished(observed.status):
        if situation.status.retry_token == situation.spec.retry_token or not _may_rearm(situation):
            return _after_the_end(situation)
        situation = rearm(situation)
    situation = _next(_take_token(situation))
    return _conclude(situation)


def _first_sight(observed: Observed, now: float) -> Situation:
    """Read the spec and, once in the life of a job, lay out its ladder."""
    spec = ladder.read_spec(observed.spec)
    planned = ladder.first_statuses(spec)
    situation = Situation(observed=observed, spec=spec, status=observed.status, now=now)
    if not situation.status.ladder:
        situation = situation.change(ladder=planned, retry_token=spec.retry_token)
    if [stage.name for stage in planned] != [stage.name for stage in situation.status.ladder]:
        raise SpecProblem("spec.ladder: stages cannot be renamed, added or removed once the job was seen")
    return _never_reuse_numbers(situation)


def _never_reuse_numbers(situation: Situation) -> Situation:
    """Skip numbers that children carry although the status does not know them (it was restored from a backup).

    To a runner with an old status this looks the same; its write fails, and nothing of its decision is done.
    """
    newest = max((child.attempt for child in situation.observed.children if child.ours), default=0)
    return situation if newest <= situation.status.attempt else situation.change(attempt=newest)


def _refuse(observed: Observed, problems: str, now: float) -> Decision:
    """Start nothing; an attempt that runs from an earlier spec is left alone."""
    status = conditions.refused(observed.status, problems=problems, generation=observed.generation, now=now)
    told = Event(type=EventType.WARNING, reason="InvalidSpec", message=problems[:1024])
    return Decision(status=status, events=(told,) if status != observed.status else ())


def _may_rearm(situation: Situation) -> bool:
    return conditions.is_true(situation.status, ConditionType.FAILED)


def _take_token(situation: Situation) -> Situation:
    """Arm a held job again on a new retry token; at any other time a token has nothing to do, and is told so."""
    token = situation.spec.retry_token
    if token == situation.status.retry_token:
        return situation
    obstacle = why_no_retry(situation.spec, situation.status)
    if situation.status.hold is not None:
        situation = rearm(situation)
    elif obstacle:
        situation = situation.warn("NothingToDo", f"spec.retryToken is ignored: {obstacle}")
    return situation.change(retry_token=token)


def _next(situation: Situation) -> Situation:
    """Take the first two beats."""
    situation = obey(situation)
    situation = situation.remove(*situation.other_live_children)
    if situation.end is None and situation.status.current is not None:
        situation = _attend(situation)
    if situation.end is None and situation.status.current is None:
        situation = _rest_or_start(situation)
    return situation


def _attend(situation: Situation) -> Situation:
    """Look after the recorded attempt."""
    child = situation.child
    if child is None:
        return _attend_absent(situation)
    if child.state is not ChildState.ACTIVE:
        return _close(situation, child)
    situation = follow(situation, child)
    if is_late(situation, child):
        return _too_late(situation).remove(child)
    situation = stop_if_needed(situation)
    if situation.current.stopping:
        situation = situation.change_current(child_seen=True)
    return insist(situation, child)


def _close(situation: Situation, child: Child) -> Situation:
    paused = situation.current.stopping == StopReason.SUSPENDED
    situation = close_attempt(situation, read_ending(child, now=situation.now))
    return situation.remove(child) if paused else situation


def _attend_absent(situation: Situation) -> Situation:
    """Tell a child that is gone from one that was not seen yet and one that cannot be made."""
    current = situation.current
    never_made = situation.name_taken_by is not None or bool(situation.observed.create_error)
    unwanted = bool(current.stopping) or situation.spec.suspend
    if current.child_seen:
        return close_attempt(situation, vanished(current.attempt, now=situation.now))
    if is_late(situation, None):
        return _too_late(situation)
    if never_made and unwanted:
        situation = situation.change_current(stopping=current.stopping or StopReason.SUSPENDED.value)
        return close_attempt(situation, vanished(current.attempt, now=situation.now))
    if situation.name_taken_by is not None or situation.other_live_children:
        return situation
    return ask_again(situation)


def _too_late(situation: Situation) -> Situation:
    limit = situation.spec.pending_deadline_seconds
    return situation.fail(
        "PendingDeadlineExceeded",
        f"attempt {situation.current.attempt} did no step in {limit} s (spec.pendingDeadlineSeconds)",
    )


def _rest_or_start(situation: Situation) -> Situation:
    """Start the next attempt unless an old one lives, a person is awaited, the job is paused or its time is over."""
    if situation.other_live_children or (situation.spec.suspend and situation.status.hold is None):
        return situation
    held = situation.status.hold
    if held is not None:
        if situation.spec.suspend or situation.now < moment(held.deadline):
            return situation
        situation = remedies.hold_timed_out(situation, situation.stage(situation.status.stage))
        if situation.end is not None:
            return situation
    limit = situation.spec.active_deadline_seconds
    if limit is not None and situation.status.active_seconds >= limit:
        return situation.fail("DeadlineExceeded", f"spec.activeDeadlineSeconds = {limit} is used up")
    return start(situation)


def _after_the_end(situation: Situation) -> Decision:
    """Keep the outcome; clear what still lives; go when the time to live is over."""
    situation = ignore(situation).remove(*situation.other_live_children)
    situation = situation.change(observed_generation=situation.observed.generation)
    ttl, finished = situation.spec.ttl_seconds_after_finished, situation.status.finished_at
    left = None if ttl is None or finished is None else moment(finished) + ttl - situation.now
    return Decision(
        status=situation.status,
        delete=situation.delete,
        events=situation.events,
        requeue_after=max(left, 0.0) if left is not None else None,
        delete_job=left is not None and left <= 0,
    )


def _conclude(situation: Situation) -> Decision:
    """Say what follows from the new status."""
    situation = situation.remove(*_surplus(situation))
    situation = conditions.derive(situation)
    status = settled(situation.observed.status, situation.status, now=situation.now)
    assert not situation.create or status is not situation.observed.status, "a child is only created after a write"
    return Decision(
        status=status,
        create=build_attempt(situation.spec, status, situation.observed.job) if situation.create else None,
        delete=situation.delete,
        control=_control(situation),
        # Where nothing was decided there is nothing to tell; else a pass that is repeated would repeat its events.
        events=situation.events if status is not situation.observed.status or situation.delete else (),
        requeue_after=next_look(situation),
    )


def _surplus(situation: Situation) -> tuple[Child, ...]:
    current = situation.status.current
    finished = [
        child
        for child in situation.observed.children
        if child.ours and child.state is not ChildState.ACTIVE and (current is None or child.attempt != current.attempt)
    ]
    return tuple(sorted(finished, key=lambda child: child.attempt)[:-KEPT_CHILDREN])


def _control(situation: Situation) -> Control | None:
    """Return the state all pods must see, once there is anything to tell them."""
    current, child = situation.status.current, situation.child
    if current is None or current.control_sequence == 0 or child is None or child.state is not ChildState.ACTIVE:
        return None
    return Control(
        attempt=current.attempt,
        sequence=current.control_sequence,
        compile=CompileControl.EAGER if current.compile_control is Mode.EAGER else CompileControl.AUTO,
        stop=StopControl.CHECKPOINT if current.stopping else StopControl.NONE,
        reason=current.stopping,
    )
