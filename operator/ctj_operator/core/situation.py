"""What one pass of `decide` works on: the observation, the parsed spec, and the status as it is being decided.

Frozen: every step returns a new Situation, so that a branch can be read, tested and thrown away alone.
"""

from dataclasses import dataclass, replace
from typing import Any

from ctj_api.names import child_name
from ctj_api.spec import Spec
from ctj_api.status import ConditionType, CurrentAttempt, Remedy, StageStatus, Status
from ctj_operator.core.decision import Event, EventType
from ctj_operator.core.observed import Child, ChildState, Observed, PodPhase
from ctj_operator.core.times import stamp

MAX_REMEDIES = 64


@dataclass(frozen=True, kw_only=True)
class End:
    """The job is over: Succeeded or Failed, and why."""

    condition: ConditionType
    reason: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Situation:
    """One job at one moment, half decided."""

    observed: Observed
    spec: Spec
    status: Status
    now: float
    events: tuple[Event, ...] = ()
    delete: tuple[str, ...] = ()
    create: bool = False
    """The child of the current attempt must be asked for once the status is stored."""
    end: End | None = None

    # What is there

    @property
    def current(self) -> CurrentAttempt:
        """The recorded attempt; only for steps that run while there is one."""
        assert self.status.current is not None
        return self.status.current

    @property
    def child(self) -> Child | None:
        """Our child of the recorded attempt, where it is visible."""
        current = self.status.current
        if current is None:
            return None
        mine = (child for child in self.observed.children if child.ours and child.attempt == current.attempt)
        return next(mine, None)

    @property
    def is_running(self) -> bool:
        """Whether all pods of the recorded attempt are up."""
        child = self.child
        nodes = next(stage.nodes for stage in self.spec.ladder if stage.name == self.current.stage)
        return child is not None and is_running(child, pods=nodes)

    @property
    def name_taken_by(self) -> Child | None:
        """Somebody else's object under the name our child needs."""
        current = self.status.current
        if current is None:
            return None
        name = child_name(self.observed.job.name, current.stage, current.attempt)
        return next((child for child in self.observed.children if not child.ours and child.name == name), None)

    @property
    def other_live_children(self) -> tuple[Child, ...]:
        """Children of other attempts that may still run: while there is one, nothing new may start."""
        current = self.status.current
        return tuple(
            child
            for child in self.observed.children
            if child.ours and child.state is ChildState.ACTIVE and (current is None or child.attempt != current.attempt)
        )

    def stage(self, name: str) -> StageStatus:
        """Status of one stage."""
        return next(stage for stage in self.status.ladder if stage.name == name)

    # What is decided

    def change(self, **fields: Any) -> "Situation":
        """Replace fields of the status."""
        assert fields.keys() <= Status.model_fields.keys(), fields.keys()
        return replace(self, status=self.status.model_copy(update=fields))

    def change_current(self, **fields: Any) -> "Situation":
        """Replace fields of the recorded attempt."""
        assert fields.keys() <= CurrentAttempt.model_fields.keys(), fields.keys()
        return self.change(current=self.current.model_copy(update=fields))

    def change_stage(self, name: str, **fields: Any) -> "Situation":
        """Replace fields of one stage's status."""
        assert fields.keys() <= StageStatus.model_fields.keys(), fields.keys()
        ladder = [stage.model_copy(update=fields) if stage.name == name else stage for stage in self.status.ladder]
        return self.change(ladder=ladder)

    def tell(self, reason: str, message: str) -> "Situation":
        """Add an event: something went as it should."""
        return self._event(EventType.NORMAL, reason, message)

    def warn(self, reason: str, message: str) -> "Situation":
        """Add an event: somebody may want to look."""
        return self._event(EventType.WARNING, reason, message)

    def _event(self, kind: EventType, reason: str, message: str) -> "Situation":
        return replace(self, events=(*self.events, Event(type=kind, reason=reason, message=message)))

    def remedy(self, what: str, *, reason: str, evidence: str) -> "Situation":
        """Keep what was done, why and on what evidence."""
        entry = Remedy(
            what=what,
            reason=reason,
            evidence=evidence[:1024],
            attempt=self.status.attempt,
            step=self.status.step,
            at=stamp(self.now),
        )
        return self.change(remedies=_bounded([*self.status.remedies, entry]))

    def remove(self, *children: Child) -> "Situation":
        """Delete children that are not on their way out already."""
        uids = tuple(child.uid for child in children if not child.deleting and child.uid not in self.delete)
        return replace(self, delete=self.delete + uids)

    def finish(self, condition: ConditionType, *, reason: str, message: str) -> "Situation":
        """End the job for good (until a retry token)."""
        over = replace(self.change(current=None, hold=None, finished_at=stamp(self.now)), create=False)
        return replace(over, end=End(condition=condition, reason=reason, message=message))

    def fail(self, reason: str, message: str) -> "Situation":
        """End the job as Failed."""
        return self.finish(ConditionType.FAILED, reason=reason, message=message).warn(reason, message)


def has_started(child: Child) -> bool:
    """Return whether any of its pods may have run."""
    return child.state is not ChildState.ACTIVE or any(pod.phase is not PodPhase.PENDING for pod in child.pods)


def is_running(child: Child, *, pods: int) -> bool:
    """Return whether all its `pods` are up, or on their way from there to the end."""
    up = [pod for pod in child.pods if pod.phase is not PodPhase.PENDING]
    return child.state is ChildState.ACTIVE and not child.suspended and len(up) >= pods


def _bounded(remedies: list[Remedy]) -> list[Remedy]:
    """Drop the oldest entry of a list that is full; plain restarts first, they are counted elsewhere."""
    if len(remedies) <= MAX_REMEDIES:
        return remedies
    surplus = next((one for one in remedies if one.what == "Restart"), remedies[0])
    return [one for one in remedies if one is not surplus]
