"""A tiny world around one job, for random play: a store with compare-and-swap, children with a will of their own.

Shares no code with `decide`: what a child knows, which checkpoints exist and who is alive is kept here, and the world
complains by itself (AssertionError) when two attempts live at once or an attempt is sent to steps nobody has saved.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ctj_api.attempt import Attempt, JobIdentity, Mode
from ctj_api.report import CheckpointRef, Progress, Report
from ctj_api.spec import Measurement
from ctj_api.status import ConditionStatus, ConditionType, Phase, StagePhase, Status
from ctj_operator.core.decision import Decision
from ctj_operator.core.observed import Child, ChildState, Observed, Pod, PodPhase

START = 1_750_000_000.0
FIGURES = {
    "good": 0.0,
    "bad": 1e9,
    "missing": None,
}
_MEASURED = (
    Measurement.NON_FINITE_STEPS,
    Measurement.PROBE_LOSS_RELATIVE,
    Measurement.PROBE_GRAD_NORM_RELATIVE,
    Measurement.REPLAY_LOSS_RELATIVE,
    Measurement.REPLAY_GRAD_NORM_RELATIVE,
    Measurement.MEMORY_PEAK_RATIO,
    Measurement.RECOMPILES_AFTER_WARMUP,
)


@dataclass
class WorldChild:
    """One attempt's pods as they really are."""

    message: Attempt
    uid: str
    visible: bool = False
    running: bool = False
    queued: bool = False
    """Suspended by the queue."""
    deleting: bool = False
    over: str = ""
    """How it ended: "done" or an exit code as text."""
    step: int = 0
    saved: int | None = None
    report: Report | None = None
    finished_at: float = 0.0
    told_to_stop: bool = False

    @property
    def alive(self) -> bool:
        return not self.over


@dataclass
class World:
    """The truth, and what a runner may see of it."""

    spec: dict[str, Any]
    now: float = START
    status: Status = field(default_factory=Status)
    version: int = 0
    generation: int = 1
    annotations: dict[str, str] = field(default_factory=dict)
    children: list[WorldChild] = field(default_factory=list)
    born: int = 0
    checkpoints: dict[int, set[int]] = field(default_factory=dict)
    """Complete checkpoints of each attempt."""
    reached: dict[int, int] = field(default_factory=dict)
    """Last step each attempt trained."""
    evidence: dict[int, str] = field(default_factory=dict)
    """What the finished attempts measured: good, bad or missing."""
    endings: int = 0
    """Attempts that ended without finishing."""
    tokens: int = 0
    job_deleted: bool = False

    # What a runner does with it

    def observe(self) -> Observed:
        return Observed(
            job=JobIdentity(namespace="d", name="w", uid="u"),
            generation=self.generation,
            resource_version=str(self.version),
            spec=self.spec,
            status=self.status,
            annotations=dict(self.annotations),
            children=tuple(_seen(child, now=self.now) for child in self.children if child.visible),
        )

    def record(self, observed: Observed, decision: Decision) -> bool:
        """Compare and swap; return whether it was stored."""
        if observed.resource_version != str(self.version):
            return False
        self._check_write(self.status, decision.status)
        self.status = Status.from_document(decision.status.to_document())
        self.version += 1
        return True

    def actions(self, decision: Decision) -> list[Callable[[], None]]:
        """Return what applying the decision does to the world, one step after the other."""
        steps: list[Callable[[], None]] = [lambda uid=uid: self._delete(uid) for uid in decision.delete]  # type: ignore[misc]
        if decision.create is not None:
            message = decision.create
            steps.append(lambda: self._create(message))
        if decision.control is not None and decision.control.stop == "Checkpoint":
            attempt = decision.control.attempt
            steps.append(lambda: self._tell_to_stop(attempt))
        return steps

    def _create(self, message: Attempt) -> None:
        if any(child.message.attempt == message.attempt for child in self.children):
            return  # already exists
        assert not any(child.alive for child in self.children), "two live attempts"
        assert message.attempt <= self.status.attempt, "created before it was recorded"
        self.born += 1
        self.children.append(WorldChild(message=message, uid=f"uid-{self.born}", step=self._resume(message)))

    def _resume(self, message: Attempt) -> int:
        """Find the newest checkpoint the attempt may use, as a trainer does."""
        found = [
            step
            for entry in message.lineage
            for step in self.checkpoints.get(entry.attempt, set())
            if step <= entry.max_step
        ]
        own = self.checkpoints.get(message.attempt, set())
        start = max([*found, *own], default=0)
        assert start >= message.floor_step, "sent to a checkpoint that its lineage does not hold"
        assert start <= message.window.end_step, "sent to steps beyond its stage"
        assert message.window.start_step <= start or message.window.start_step == 0
        if message.replay is not None:
            assert self.reached[message.replay.attempt] >= message.replay.to_step, "nothing to compare with"
            assert message.replay.from_step == message.window.start_step
        return start

    def _delete(self, uid: str) -> None:
        for child in self.children:
            if child.uid == uid:
                child.deleting = True
                if child.over:
                    self.children.remove(child)
                return

    def _tell_to_stop(self, attempt: int) -> None:
        for child in self.children:
            if child.message.attempt == attempt and child.running:
                child.told_to_stop = True

    # What happens by itself

    def live(self) -> WorldChild | None:
        return next((child for child in self.children if child.alive), None)

    def save(self, child: WorldChild) -> None:
        child.saved = child.step
        self.checkpoints.setdefault(child.message.attempt, set()).add(child.step)

    def train(self, child: WorldChild, steps: int) -> None:
        """Do some steps, saving where the attempt must."""
        end = child.message.window.end_step
        for step in range(child.step + 1, min(child.step + steps, end) + 1):
            child.step = step
            if step in child.message.window.save_at:
                self.save(child)
        self.reached[child.message.attempt] = max(child.step, self.reached.get(child.message.attempt, 0))

    def finish(self, child: WorldChild, evidence: str, *, bad: int = 0) -> None:
        self.train(child, child.message.window.end_step)
        self.save(child)
        self.evidence[child.message.attempt] = evidence
        measured = dict.fromkeys(_MEASURED, 0.0)
        counting = _counting(child.message)
        which = counting[bad % len(counting)]
        figure = FIGURES[evidence]
        if figure is None:
            del measured[which]
        else:
            measured[which] = figure
        self._end(child, "done", measured=measured)

    def die(self, child: WorldChild, exit_code: int) -> None:
        self.endings += 1
        self._end(child, str(exit_code), measured={})

    def stop_as_told(self, child: WorldChild) -> None:
        if child.step > child.message.window.start_step:
            self.save(child)
        self.die(child, 143)

    def _end(self, child: WorldChild, over: str, *, measured: dict[Measurement, float]) -> None:
        child.over, child.running, child.finished_at, child.visible = over, False, self.now, True
        child.report = Report(
            attempt=child.message.attempt,
            stage=child.message.stage.name,
            exit_code=0 if over == "done" else int(over),
            mode=child.message.mode if child.message.mode is Mode.EAGER else Mode.COMPILED,
            step=child.step,
            checkpoint=None if child.saved is None else CheckpointRef(attempt=child.message.attempt, step=child.saved),
            measurements=measured,
        )
        if child.deleting:
            self.children.remove(child)

    def vanish(self, child: WorldChild) -> None:
        """Somebody deletes it, pods and all, without asking."""
        self.endings += child.alive
        self.children.remove(child)

    def edit(self, **changes: Any) -> None:
        self.spec = {**self.spec, **changes}
        self.generation += 1
        self.version += 1

    def annotate(self, verb: str) -> None:
        self.tokens += 1
        self.annotations[verb] = f"token-{self.tokens}"
        self.version += 1

    # What must hold at every write

    def _check_write(self, old: Status, new: Status) -> None:
        assert new.attempt >= old.attempt, "attempt numbers only grow"
        if is_over(old) and not self._retried(old):
            assert _outcome(new) == _outcome(old), "a terminal state was lost"
            assert new.current is None
        if new.current is not None:
            assert not is_over(new)
        self._check_promotions(old, new)
        self._check_budgets(new)

    def _retried(self, old: Status) -> bool:
        return old.phase is Phase.FAILED and self.spec.get("retryToken", "") != old.retry_token

    def _check_promotions(self, old: Status, new: Status) -> None:
        before = {stage.name: stage.phase for stage in old.ladder}
        for stage in new.ladder:
            if stage.phase is not StagePhase.PASSED or before.get(stage.name) is StagePhase.PASSED:
                continue
            approved = old.hold is not None and "approve" in "".join(self.annotations)
            assert stage.checkpoint is not None
            good = self.evidence.get(stage.checkpoint.attempt) == "good"
            assert good or approved, f"stage {stage.name} was promoted on {self.evidence} without approval"

    def _check_budgets(self, new: Status) -> None:
        limits = {"maxFailures": 3, "maxDisruptions": 20, **self.spec.get("restart", {})}
        assert new.restarts.failures <= limits["maxFailures"]
        assert new.restarts.disruptions <= limits["maxDisruptions"]
        assert new.restarts.total <= self.endings, "more restarts than attempts that ended"
        by_ending = ("Restart", "Fallback", "SmallerMicroBatch", "MoreSharding")
        paid = [(one.what, one.attempt) for one in new.remedies if one.what in by_ending]
        assert len(paid) == len(set(paid)), "one ending was paid for twice"


def _counting(message: Attempt) -> list[Measurement]:
    """Return the measurements that say something about this attempt."""
    counting = [Measurement.MEMORY_PEAK_RATIO, Measurement.NON_FINITE_STEPS]
    if message.replay is not None:
        counting.append(Measurement.REPLAY_LOSS_RELATIVE)
    if message.mode is Mode.COMPILED:
        counting.append(Measurement.PROBE_LOSS_RELATIVE)
    return counting


def _seen(child: WorldChild, *, now: float) -> Child:
    attempt = child.message.attempt
    phase = PodPhase.RUNNING if child.running else PodPhase.PENDING
    exit_code = None
    if child.over:
        phase = PodPhase.SUCCEEDED if child.over == "done" else PodPhase.FAILED
        exit_code = 0 if child.over == "done" else int(child.over)
    pod = Pod(
        name=f"pod-{attempt}",
        index=0,
        phase=phase,
        exit_code=exit_code,
        report=child.report,
        finished_at=child.finished_at if child.over else None,
    )
    state = ChildState.ACTIVE
    if child.over:
        state = ChildState.SUCCEEDED if child.over == "done" else ChildState.FAILED
    progress = None
    if child.running:
        trained = child.step > child.message.window.start_step
        progress = Progress(
            attempt=attempt,
            step=child.step,
            phase="Training" if trained else "Starting",
            mode=child.message.mode,
            loss=1.0 if trained else None,
            checkpoint_step=child.saved,
            updated_at=now,
        )
    return Child(
        name=f"w-{child.message.stage.name}-{attempt}",
        uid=child.uid,
        attempt=attempt,
        state=state,
        deleting=child.deleting,
        suspended=child.queued,
        pods=() if child.queued else (pod,),
        progress=progress,
    )


def is_over(status: Status) -> bool:
    return any(_outcome(status))


def _outcome(status: Status) -> tuple[bool, ...]:
    return tuple(
        any(one.type is kind and one.status is ConditionStatus.TRUE for one in status.conditions)
        for kind in (ConditionType.SUCCEEDED, ConditionType.FAILED)
    )
