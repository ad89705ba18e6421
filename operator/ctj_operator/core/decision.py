"""What `decide` wants: the next status, and what to do once that status is stored. Values only."""

from dataclasses import dataclass
from enum import StrEnum

from ctj_api.attempt import Attempt
from ctj_api.control import Control
from ctj_api.status import Status


class EventType(StrEnum):
    """The two types Kubernetes knows."""

    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line for people; posted after the status write, never the only record of anything."""

    type: EventType
    reason: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Acting on it twice ends the same: children have deterministic names, deletes carry a uid, control is a level."""

    status: Status
    create: Attempt | None = None
    """Attempt whose child must exist (create if absent)."""
    delete: tuple[str, ...] = ()
    """Uids of children to remove."""
    control: Control | None = None
    """State every pod of the current attempt must see."""
    events: tuple[Event, ...] = ()
    requeue_after: float | None = None
    """Seconds until this job must be looked at even if nothing happens."""
    delete_job: bool = False
    """Its time to live is over."""
