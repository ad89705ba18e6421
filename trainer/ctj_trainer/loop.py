"""One stage's optimizer steps, read top to bottom: gradient, vote, update, record, act, save.

Every decision that must be the same on all ranks is voted once per step and acted on after the update, so that no rank
ever changes its course between two collectives.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ctj_api.attempt import Attempt, Mode
from ctj_api.report import CheckpointRef
from ctj_trainer import progress
from ctj_trainer.checkpoint import Checkpoints, Description
from ctj_trainer.compile.causes import REMEDIES, FaultClass
from ctj_trainer.compile.complaint import Complaint, merged
from ctj_trainer.compile.probe import Outcome
from ctj_trainer.compile.session import CompileSession
from ctj_trainer.evaluation import Evaluator
from ctj_trainer.gradients import COUNTING_NOTICE, Gradients, StepLoss
from ctj_trainer.loss_scale import FLOOR
from ctj_trainer.optimizer import Schedule
from ctj_trainer.ranks import Ranks
from ctj_trainer.records import StepRecord, forget_old
from ctj_trainer.requests import Request, Requests
from ctj_trainer.strategies.prepared import Prepared
from ctj_trainer.telemetry import Telemetry
from ctj_trainer.trackers import Trackers


class NonFiniteError(RuntimeError):
    """Loss or gradient norm is no number; nothing was updated or saved."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the loop works with."""

    attempt: Attempt
    ranks: Ranks
    prepared: Prepared
    gradients: Gradients
    evaluator: Evaluator
    session: CompileSession
    checkpoints: Checkpoints
    requests: Requests
    telemetry: Telemetry
    trackers: Trackers
    notice: Callable[[str], None]


class Loop:
    """Runs the steps of one stage."""

    def __init__(
        self, parts: Parts, *, resumed_at: int, history: Mapping[int, StepRecord], checkpoint: CheckpointRef | None
    ) -> None:
        self.parts = parts
        self._schedule = Schedule.of(parts.attempt.training)
        self._clip = float(parts.attempt.training.optimizer.gradient_clip)
        self._replay_until = parts.attempt.replay.to_step if parts.attempt.replay else 0
        self.resumed_at = resumed_at
        self.step = resumed_at
        self.records = dict(history)
        self.checkpoint = checkpoint

    def run(self) -> str:
        """Train to the end of the stage, or until asked to stop; returns why it stopped, empty at the end. Collective.

        Raises:
            NonFiniteError: training has diverged.
        """
        parts = self.parts
        if parts.session.needs_probe and self.step < parts.attempt.window.end_step:
            parts.telemetry.phase(progress.PROBING)
            self._probe(self.step + 1)
        parts.telemetry.phase(progress.TRAINING)
        for step in range(self.step + 1, parts.attempt.window.end_step + 1):
            stop = self._one(step)
            if stop:
                return stop
        return ""

    def _one(self, step: int) -> str:
        parts = self.parts
        began = time.perf_counter()
        facts_before = parts.session.facts
        parts.session.before_step(step)
        mode = parts.session.mode_of(step)
        if parts.session.measures_peak(step):
            parts.telemetry.start_peak()
        loss = parts.gradients.compute(step, parts.gradients.batches_of(step))
        asked, complaint = self._vote(parts.session.look(step, memory=parts.telemetry.last_memory))
        rate = self._schedule.learning_rate(step)
        norm = self._update(loss, rate)
        scale = parts.prepared.loss_scale
        skipped = scale is not None and scale.skipped and math.isfinite(loss.loss)
        if mode is Mode.COMPILED and not skipped and not _are_finite(loss, norm):
            mode, (loss, norm, complaint) = Mode.EAGER, self._again(step, rate, complaint)
        seconds = time.perf_counter() - began
        facts = parts.session.facts
        record = StepRecord(
            step=step,
            stage=parts.attempt.stage.name,
            attempt=parts.attempt.attempt,
            loss=loss.loss,
            grad_norm=norm,
            learning_rate=rate,
            seconds=seconds,
            mode=mode,
            tokens=loss.tokens,
            replay=step <= self._replay_until,
            compiling=facts.compile_seconds > facts_before.compile_seconds,
            recompiles=facts.recompiles,
            graphs=facts.graphs,
            compile_seconds=facts.compile_seconds,
            skipped=skipped,
            loss_scale=scale.state.scale if scale else None,
            evaluation_loss=self._evaluation_loss(step, loss, asked),
            at=time.time(),
        )
        self._publish(record, asked)
        peak = parts.telemetry.last_peak if parts.session.measures_peak(step) else None
        parts.session.after_step(step, seconds=seconds, compiling=record.compiling, peak=peak)
        self._act(asked, complaint)
        if asked.stop or self._is_save_due(step):
            self._save(step)
        return asked.stop

    def _probe(self, step: int) -> None:
        """Compare the two forms on the first micro batch of the coming step."""
        parts = self.parts
        batch = parts.gradients.batches_of(step)[:1]

        def run(seed: int) -> Outcome:
            loss = parts.gradients.compute(step, batch, seed_offset=seed)
            norm = parts.prepared.discard_gradients()
            if math.isfinite(norm) or scale is None or scale.state.scale <= FLOOR:
                return Outcome(loss=loss.loss, grad_norm=norm)
            scale.learn(norm)  # an overflow compares nothing
            return run(seed)

        scale = parts.prepared.loss_scale
        before = scale.state if scale else None
        for complaint in parts.session.run_probe(run, parts.prepared, step=step):
            parts.telemetry.fell_back(complaint.fault)
        if scale is not None and before is not None:
            scale.state, scale.skipped = before, False
        self._announce()

    def _vote(self, complaint: Complaint | None) -> tuple[Request, Complaint | None]:
        """Agree on what is asked. The texts are exchanged only where somebody asks for something."""
        parts = self.parts
        mine = parts.requests.now()
        ballot = [bool(mine.stop), bool(mine.eager), bool(complaint), -mine.sequence]
        stop, eager, complaining, minus_sequence = parts.ranks.vote(ballot)
        if not (stop or complaining) and not (eager and not parts.session.gave_up):
            return Request(sequence=-minus_sequence), None
        said = parts.ranks.gather((mine.stop, mine.eager, complaint))
        first = [next((texts[i] for texts in said if texts[i]), "") for i in range(2)]
        agreed = merged([complaint for *_, complaint in said])
        return Request(stop=first[0], eager=first[1], sequence=-minus_sequence), agreed

    def _update(self, loss: StepLoss, rate: float) -> float:
        if not math.isfinite(loss.loss):
            self.parts.prepared.discard_gradients()
            return math.nan
        norm = self.parts.prepared.step(learning_rate=rate, clip=self._clip)
        return norm if math.isfinite(norm) else math.inf  # inf or nan depends on the order of a sum over ranks

    def _evaluation_loss(self, step: int, loss: StepLoss, asked: Request) -> float | None:
        """Evaluate if it is time, and neither a stop nor a divergence comes first."""
        parts = self.parts
        if asked.stop or not math.isfinite(loss.loss) or not parts.evaluator.is_due(step):
            return None
        parts.telemetry.phase(progress.EVALUATING)
        found = parts.evaluator.loss(is_stopping=lambda: bool(parts.requests.now().stop))
        parts.telemetry.phase(progress.TRAINING)
        return found

    def _again(self, step: int, rate: float, complaint: Complaint | None) -> tuple[StepLoss, float, Complaint | None]:
        """Repeat a step that gave no number, eager: nothing was updated, and the loss and norm are every rank's."""
        parts = self.parts
        with parts.session.eagerly():
            loss = parts.gradients.compute(step, parts.gradients.batches_of(step))
        norm = self._update(loss, rate)
        if _are_finite(loss, norm):
            reason = f"not_finite: compiled gave no number in step {step}, eager did; {REMEDIES[FaultClass.NUMERICS]}"
            complaint = complaint or Complaint(fault=FaultClass.NUMERICS, reason=reason)
        return loss, norm, complaint

    def _publish(self, record: StepRecord, asked: Request) -> None:
        parts = self.parts
        self.records[record.step] = record
        forget_old(self.records, replay_until=self._replay_until)
        parts.telemetry.step(
            record,
            facts=parts.session.facts,
            num_samples=parts.attempt.training.global_batch_size // parts.ranks.world_size,
            sequence=asked.sequence,
        )
        parts.trackers.log(record)
        if not (record.skipped or (math.isfinite(record.loss) and math.isfinite(record.grad_norm))):
            parts.telemetry.non_finite()
            raise NonFiniteError(
                f"step {record.step}: loss {record.loss:g}, gradient norm {record.grad_norm:g}; nothing was updated or "
                "saved; lower spec.training.optimizer.learningRate, or look at the samples of this step"
            )
        self.step = record.step

    def _act(self, asked: Request, complaint: Complaint | None) -> None:
        """Change course between two steps."""
        parts = self.parts
        if parts.gradients.counts_by_forward:
            parts.notice(COUNTING_NOTICE)
        if parts.session.gave_up:
            return
        if asked.eager:
            parts.session.obey(asked.eager, step=self.step + 1)
            parts.telemetry.fell_back("control")
        elif complaint and parts.session.fall_back(complaint, step=self.step + 1):
            parts.telemetry.fell_back(complaint.fault)
        self._announce()

    def _announce(self) -> None:
        session = self.parts.session
        for text in session.notices.take():
            self.parts.notice(text)
        verdict = session.verdict
        if verdict is None or verdict.eager_from_step is None:
            return
        self.parts.notice(f"eager from step {verdict.eager_from_step} on: {verdict.eager_regions or verdict.reason}")

    def _is_save_due(self, step: int) -> bool:
        attempt = self.parts.attempt
        every = attempt.training.checkpoint.every_steps
        return step % every == 0 or step in attempt.window.save_at or step == attempt.window.end_step

    def _save(self, step: int) -> None:
        parts = self.parts
        parts.telemetry.phase(progress.SAVING)
        began = time.perf_counter()
        self.checkpoint = parts.checkpoints.save(
            parts.prepared,
            Description(
                step=step,
                stage=parts.attempt.stage.name,
                strategy=parts.attempt.stage.strategy,
                samples=step * parts.attempt.training.global_batch_size,
                finite=True,  # else NonFiniteError was raised
            ),
        )
        parts.telemetry.saved(step, time.perf_counter() - began)
        parts.telemetry.phase(progress.TRAINING)


def _are_finite(loss: StepLoss, norm: float) -> bool:
    return math.isfinite(loss.loss) and math.isfinite(norm)
