"""One job's life told step by step to `decide`: children that do what the test says, and a clock that it moves."""

from dataclasses import replace
from typing import Any

from ctj_api.attempt import Attempt, JobIdentity, Mode
from ctj_api.control import Control
from ctj_api.report import CheckpointRef, CompileVerdict, Failure, MemoryPrediction, Progress, Report
from ctj_api.spec import Measurement
from ctj_api.status import Condition, ConditionType, StageStatus, Status
from ctj_operator.core.decide import decide
from ctj_operator.core.decision import Decision, Event
from ctj_operator.core.observed import Child, ChildState, Observed, Pod, PodPhase

Document = dict[str, Any]

START = 1_750_000_000.0
GOOD = {
    Measurement.NON_FINITE_STEPS: 0.0,
    Measurement.PROBE_LOSS_RELATIVE: 1e-8,
    Measurement.PROBE_GRAD_NORM_RELATIVE: 1e-7,
    Measurement.REPLAY_LOSS_RELATIVE: 1e-7,
    Measurement.REPLAY_GRAD_NORM_RELATIVE: 1e-6,
    Measurement.MEMORY_PEAK_RATIO: 0.5,
    Measurement.RECOMPILES_AFTER_WARMUP: 0.0,
    Measurement.SAMPLES_PER_SECOND_PER_PROCESS: 100.0,
    Measurement.STEP_TIME_P50_SECONDS: 0.5,
}


def job_spec(**changes: Any) -> Document:
    """Return a job of four stages, 120 steps; mappings are merged, other fields replaced."""
    spec: Document = {
        "recipe": {"name": "causal_lm"},
        "training": {"steps": 120, "globalBatchSize": 16, "microBatchSize": 4},
        "ladder": [
            {"name": "single", "strategy": "single", "steps": 20},
            {"name": "ddp", "strategy": "ddp", "steps": 20, "processesPerNode": 2},
            {"name": "fsdp", "strategy": "fsdp", "steps": 20, "processesPerNode": 2},
            {"name": "zero3", "strategy": "zero3", "processesPerNode": 2},
        ],
    }
    for key, value in changes.items():
        spec[key] = {**spec.get(key, {}), **value} if isinstance(value, dict) else value
    return spec


def short_spec(**changes: Any) -> Document:
    """Return a job of two stages: single to step 20, then ddp to step 40."""
    ladder = [
        {"name": "single", "strategy": "single", "steps": 20},
        {"name": "ddp", "strategy": "ddp", "processesPerNode": 2},
    ]
    return job_spec(**{"ladder": ladder, "training": {"steps": 40}, **changes})


class Story:
    """A job and its children. Deleted children are gone at once; created ones are seen at once, with pending pods."""

    def __init__(self, spec: Document | None = None) -> None:
        self.spec = spec if spec is not None else job_spec()
        self.generation = 1
        self.annotations: dict[str, str] = {}
        self.status = Status()
        self.children: list[Child] = []
        self.attempts: list[Attempt] = []
        """Every attempt a child was created for, in order."""
        self.events: list[Event] = []
        self.writes = 0
        self.control: Control | None = None
        self.create_error = ""
        self.now = START

    # The deciding side

    def observed(self) -> Observed:
        return Observed(
            job=JobIdentity(namespace="research", name="llama", uid="uid-of-llama"),
            generation=self.generation,
            resource_version=str(self.writes),
            spec=self.spec,
            status=self.status,
            annotations=self.annotations,
            children=tuple(self.children),
            create_error=self.create_error,
        )

    def look(self, *, after: float = 1.0) -> Decision:
        """Let some seconds pass, then decide, record and apply once."""
        self.now += after
        decision = decide(self.observed(), now=self.now)
        if decision.status != self.status:
            self.status = Status.from_document(decision.status.to_document())
            assert self.status == decision.status, "every field survives the API server"
            self.writes += 1
        self.children = [child for child in self.children if child.uid not in decision.delete]
        if decision.create is not None:
            self._create(decision.create)
        self.control = decision.control or self.control
        self.events += decision.events
        return decision

    def _create(self, attempt: Attempt) -> None:
        if any(child.attempt == attempt.attempt for child in self.children):
            return
        pods = tuple(Pod(name=f"pod-{n}", index=n, phase=PodPhase.PENDING) for n in range(attempt.stage.nodes))
        child = Child(
            name=f"llama-{attempt.stage.name}-{attempt.attempt}",
            uid=f"uid-{attempt.attempt}",
            attempt=attempt.attempt,
            state=ChildState.ACTIVE,
            pods=pods,
        )
        self.children.append(child)
        self.attempts.append(attempt)

    def edit(self, **changes: Any) -> None:
        """Edit the spec as job_spec does."""
        self.generation += 1
        for key, value in changes.items():
            self.spec = {
                **self.spec,
                key: {**self.spec.get(key, {}), **value} if isinstance(value, dict) else value,
            }

    # The children's side

    @property
    def attempt(self) -> Attempt:
        return self.attempts[-1]

    @property
    def child(self) -> Child:
        return next(child for child in self.children if child.attempt == self.attempt.attempt)

    def put(self, child: Child) -> None:
        self.children = [old for old in self.children if old.attempt != child.attempt] + [child]

    def runs(self, **progress: Any) -> Decision:
        """Let the pods run, and look; with figures given, the trainer has done a first step."""
        pods = tuple(replace(pod, phase=PodPhase.RUNNING, node="node-1") for pod in self.child.pods)
        child = replace(self.child, pods=pods, suspended=False)
        if progress:
            defaults = {"attempt": self.attempt.attempt, "phase": "Training", "mode": Mode.COMPILED, "loss": 2.0}
            child = replace(child, progress=Progress(**{**defaults, "updated_at": self.now, **progress}))
        self.put(child)
        return self.look()

    def report(self, *, exit_code: int = 0, mode: Mode | None = None, **fields: Any) -> Report:
        attempt = self.attempt
        end = attempt.window.end_step
        defaults: Document = {
            "attempt": attempt.attempt,
            "stage": attempt.stage.name,
            "mode": mode or attempt.mode,
            "step": end,
            "checkpoint": CheckpointRef(attempt=attempt.attempt, step=end),
            "measurements": dict(GOOD),
            "compile": CompileVerdict(mode=mode or attempt.mode, reason="correct and 1.21x faster"),
        }
        return Report(exit_code=exit_code, **{**defaults, **fields})

    def finishes(self, *, after: float = 10.0, **report: Any) -> Decision:
        """Let the attempt do all its steps; `measured` changes single measurements (None: not measured)."""
        measured = {**GOOD, **report.pop("measured", {})}
        report.setdefault("measurements", {name: value for name, value in measured.items() if value is not None})
        self._end(ChildState.SUCCEEDED, exit_code=0, report=self.report(**report), after=after)
        return self.look(after=0.0)

    def ends(
        self,
        exit_code: int | None,
        *,
        saved: int | None = None,
        memory: list[MemoryPrediction] | None = None,
        **pod: Any,
    ) -> Decision:
        """Let the attempt fail; `saved` is the step of the newest checkpoint it made."""
        report = None
        if exit_code is not None and exit_code != 137:
            report = self.report(
                exit_code=exit_code,
                step=saved or self.attempt.window.start_step,
                checkpoint=None if saved is None else CheckpointRef(attempt=self.attempt.attempt, step=saved),
                measurements={},
                memory=memory or [],
                failure=Failure(reason="Test", message=f"ended with {exit_code}", rank=0, last_lines="last line"),
            )
        self._end(ChildState.FAILED, exit_code=exit_code, report=report, after=10.0, **pod)
        return self.look(after=0.0)

    def _end(
        self, state: ChildState, *, exit_code: int | None, report: Report | None, after: float, **pod: Any
    ) -> None:
        phase = PodPhase.SUCCEEDED if state is ChildState.SUCCEEDED else PodPhase.FAILED
        self.now += after
        first, *others = self.child.pods
        ended = replace(first, phase=phase, exit_code=exit_code, report=report, finished_at=self.now, **pod)
        rest = [replace(other, phase=phase, exit_code=exit_code, finished_at=self.now) for other in others]
        self.put(replace(self.child, state=state, pods=(ended, *rest)))

    def passes(self, *stages: str) -> None:
        """Let the next stages run and pass, one after the other."""
        for stage in stages:
            if not self.attempts:
                self.look()
            assert self.attempt.stage.name == stage
            self.runs()
            self.finishes()

    def vanishes(self) -> Decision:
        """Let somebody delete the child."""
        self.children = [child for child in self.children if child.attempt != self.attempt.attempt]
        return self.look()

    # What a test asks

    def stage(self, name: str) -> StageStatus:
        return next(stage for stage in self.status.ladder if stage.name == name)

    def condition(self, kind: ConditionType) -> Condition:
        return next(one for one in self.status.conditions if one.type is kind)

    def says(self, kind: ConditionType) -> tuple[str, str]:
        """Return (status, reason) of a condition."""
        found = self.condition(kind)
        return found.status.value, found.reason

    @property
    def numbers(self) -> list[int]:
        """Numbers of all attempts that got a child."""
        return [attempt.attempt for attempt in self.attempts]
