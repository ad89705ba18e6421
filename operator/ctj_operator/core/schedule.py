"""When a job must be looked at again although nothing may happen to it until then."""

from collections.abc import Iterator

from ctj_operator.core.progress import WRITE_SECONDS
from ctj_operator.core.situation import Situation
from ctj_operator.core.starting import ask_again_at
from ctj_operator.core.stopping import PATIENCE_SECONDS
from ctj_operator.core.times import moment

CLEANING_SECONDS = 5.0
BLOCKED_SECONDS = 30.0
_SOONEST = 0.05


def next_look(situation: Situation) -> float | None:
    """Return the seconds until the next time that matters, or None when only a change can matter."""
    if situation.end is not None:
        ttl = situation.spec.ttl_seconds_after_finished
        return None if ttl is None else float(ttl)
    waits = [wait for wait in _waits(situation) if wait is not None]
    return max(_SOONEST, min(waits)) if waits else None


def _waits(situation: Situation) -> Iterator[float | None]:
    status, spec, now = situation.status, situation.spec, situation.now
    if situation.other_live_children:
        yield CLEANING_SECONDS
    if status.hold is not None and not spec.suspend:
        yield moment(status.hold.deadline) - now
    current = status.current
    if current is None:
        return
    child = situation.child
    if child is None:
        yield BLOCKED_SECONDS if situation.name_taken_by is not None else ask_again_at(current) - now
    else:
        yield WRITE_SECONDS
    if current.stopping_since is not None:
        # After that the child is deleted; its going is an event of its own.
        yield max(moment(current.stopping_since) + PATIENCE_SECONDS - now, CLEANING_SECONDS)
    if spec.pending_deadline_seconds is not None and not current.first_step_seen:
        yield max(moment(current.recorded_at) + spec.pending_deadline_seconds - now, CLEANING_SECONDS)
    if spec.active_deadline_seconds is not None and current.running_since is not None:
        yield spec.active_deadline_seconds - status.active_seconds
