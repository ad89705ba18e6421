"""One stage on one rank, from recipe to report: build, compile in place, lay out, restore, train, export, prove."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from ctj_api.attempt import Attempt, Mode
from ctj_api.exit_codes import ExitCode
from ctj_api.names import attempt_folder
from ctj_api.report import CheckpointRef, MemoryPrediction, Report
from ctj_api.spec import Strategy
from ctj_trainer import progress
from ctj_trainer.checkpoint import Checkpoints
from ctj_trainer.compile.session import CompileSession, why_not_compiled
from ctj_trainer.compile.verdict import Decision, stored
from ctj_trainer.evidence import RankFigures, measure
from ctj_trainer.gradients import Gradients
from ctj_trainer.loop import Loop, NonFiniteError, Parts
from ctj_trainer.ranks import Ranks
from ctj_trainer.recipe import Recipe, RecipeContext, blocks_of, load_recipe
from ctj_trainer.records import StepRecord, read_records, stage_history
from ctj_trainer.requests import Requests
from ctj_trainer.strategies import prepare
from ctj_trainer.strategies.prepared import Prepared
from ctj_trainer.telemetry import Telemetry

log = logging.getLogger("ctj")
MAX_NOTICES = 8
REPORT = "report.json"


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Where a stage runs and what it tells."""

    attempt: Attempt
    root: Path
    run_dir: Path
    ranks: Ranks
    telemetry: Telemetry
    requests: Requests
    notices: list[str] = field(default_factory=list)

    def notice(self, text: str) -> None:
        """Say it once, in the log and in the report."""
        if text not in self.notices and len(self.notices) < MAX_NOTICES:
            self.notices.append(text)
            log.info("notice: %s", text)

    @property
    def folder(self) -> Path:
        """This attempt's folder."""
        return self.root / attempt_folder(self.attempt.attempt)

    @property
    def lineage(self) -> list[Path]:
        """Folders of the attempts this one continues, oldest first, its own last."""
        numbers = [entry.attempt for entry in self.attempt.lineage if entry.attempt != self.attempt.attempt]
        return [self.root / attempt_folder(number) for number in [*numbers, self.attempt.attempt]]


def run_stage(scene: Scene) -> str:
    """Train the attempt's window; returns why it stopped early, else an empty text. Collective."""
    attempt, ranks = scene.attempt, scene.ranks
    log.info("attempt %s", attempt.model_dump_json(by_alias=True, exclude_none=True))
    checkpoints = Checkpoints.of(attempt, root=scene.root, group=ranks.control, notice=scene.notice)
    checkpoints.claim()
    context = RecipeContext(device=ranks.device, seed=attempt.training.seed)
    recipe = load_recipe(attempt.recipe.name, attempt.recipe.config, context)
    memory = _predicted(scene, recipe)
    scene.telemetry.phase(progress.LOADING)
    decision = ranks.share(stored(reversed(scene.lineage), stage=attempt.stage.name) if ranks.rank == 0 else None)
    with _session(scene, decision) as session:
        prepared = _laid_out(scene, recipe, is_compiled=session.is_compiled)
        loaded = checkpoints.load(prepared)
        resumed_at = loaded.ref.step if loaded else 0
        log.info("stage %s starts from step %d", attempt.stage.name, resumed_at)
        loop = _loop(scene, recipe, prepared, session, checkpoints, resumed_at)
        history = stage_history(scene.lineage, stage=attempt.stage.name, until=resumed_at)
        session.remember(history.values())
        outcome = _Outcome(scene, session, history, memory, start=resumed_at, found=loaded.ref if loaded else None)
        try:
            stopped = loop.run()
        except NonFiniteError:
            outcome.report(loop, ExitCode.NON_FINITE)
            raise
        if not stopped:
            _export(scene, recipe, prepared)
        outcome.report(loop, ExitCode.STOPPED if stopped else ExitCode.DONE)
        prepared.close()
    scene.telemetry.phase(progress.DONE)
    return stopped


def _predicted(scene: Scene, recipe: Recipe) -> list[MemoryPrediction]:
    """The first attempt of a job predicts for the whole ladder; rank 0 alone, the others load meanwhile."""
    if scene.ranks.rank != 0 or scene.attempt.lineage:
        return []
    from ctj_trainer.memory_prediction import CannotPredict
    from ctj_trainer.preflight import predict

    try:
        return predict(scene.attempt, recipe, device=scene.ranks.device)
    except CannotPredict as error:
        scene.notice(str(error))
        return []


@contextmanager
def _session(scene: Scene, decision: Decision | None) -> Iterator[CompileSession]:
    """Guard compiled training while it lasts; import no compiler where nothing is compiled."""
    why = why_not_compiled(scene.attempt, decision)
    with ExitStack() as stack:
        guard = None
        if not why:
            from ctj_trainer.compile.guard import guarded

            guard = stack.enter_context(guarded(on_compiling=scene.telemetry.compiling))
        else:
            log.info("eager: %s", why)
        yield CompileSession(scene.attempt, decision=decision, guard=guard, folder=scene.folder, ranks=scene.ranks)


def _laid_out(scene: Scene, recipe: Recipe, *, is_compiled: bool) -> Prepared:
    from ctj_trainer.compile.regions import place

    attempt = scene.attempt

    def compile_in_place(model: nn.Module, strategy: Strategy) -> None:
        placement = place(model, blocks_of(model, recipe), settings=attempt.compile, strategy=strategy)
        log.info("%s", placement)
        for text in placement.notices:
            scene.notice(text)

    return prepare(
        attempt.stage.strategy,
        recipe,
        training=attempt.training,
        micro_batch_size=attempt.micro_batch_size,
        device=scene.ranks.device,
        place=compile_in_place if is_compiled else None,
    )


def _loop(
    scene: Scene,
    recipe: Recipe,
    prepared: Prepared,
    session: CompileSession,
    checkpoints: Checkpoints,
    resumed_at: int,
) -> Loop:
    gradients = Gradients(
        prepared,
        recipe,
        training=scene.attempt.training,
        micro_batch_size=scene.attempt.micro_batch_size,
        ranks=scene.ranks,
        eagerly=session.eagerly,
    )
    parts = Parts(
        attempt=scene.attempt,
        ranks=scene.ranks,
        prepared=prepared,
        gradients=gradients,
        session=session,
        checkpoints=checkpoints,
        requests=scene.requests,
        telemetry=scene.telemetry,
        notice=scene.notice,
    )
    return Loop(parts, resumed_at=resumed_at)


def _export(scene: Scene, recipe: Recipe, prepared: Prepared) -> None:
    """After the last stage, write the weights as other tools load them. Collective."""
    if recipe.export is None or scene.attempt.stage.name != scene.attempt.ladder[-1].name:
        return
    scene.telemetry.phase(progress.EXPORTING)
    weights = prepared.full_weights()
    if scene.ranks.rank == 0:
        recipe.export(weights, scene.root / "export")


class _Outcome:
    """Turns what a stage did into its report."""

    def __init__(
        self,
        scene: Scene,
        session: CompileSession,
        history: dict[int, StepRecord],
        memory: list[MemoryPrediction],
        *,
        start: int,
        found: CheckpointRef | None,
    ) -> None:
        self._scene = scene
        self._session = session
        self._history = history
        self._memory = memory
        self._start = start
        self._found = found

    def report(self, loop: Loop, exit_code: ExitCode) -> None:
        """Write the report that the supervisor completes. Collective."""
        scene, session = self._scene, self._session
        figures = scene.ranks.gather(self._figures())
        if scene.ranks.rank != 0:
            return
        steps = {**self._history, **loop.records}
        verdict = session.verdict
        report = Report(
            attempt=scene.attempt.attempt,
            stage=scene.attempt.stage.name,
            exit_code=int(exit_code),
            mode=verdict.mode if verdict else Mode.EAGER,
            start_step=self._start,
            step=loop.step,
            checkpoint=loop.checkpoint or self._found,
            measurements=measure(
                scene.attempt, steps=steps, reference=self._reference(), verdict=verdict, ranks=figures
            ),
            compile=verdict,
            memory=self._memory,
            notices=scene.notices,
        )
        draft = scene.run_dir / f".{REPORT}.tmp"
        draft.write_text(report.model_dump_json(by_alias=True, exclude_none=True))
        draft.replace(scene.run_dir / REPORT)

    def _figures(self) -> RankFigures:
        facts = self._session.facts
        return RankFigures(
            memory_peak_ratio=self._scene.telemetry.memory().peak_ratio,
            recompiles_after_warmup=self._session.recompiles_after_warmup,
            graph_breaks=facts.graph_breaks,
            compile_seconds=facts.compile_seconds,
        )

    def _reference(self) -> dict[int, StepRecord]:
        """The previous stage's record of the window; its last steps may lie in more than one attempt."""
        replay = self._scene.attempt.replay
        if replay is None:
            return {}
        root, lineage = self._scene.root, self._scene.attempt.lineage
        numbers = [entry.attempt for entry in lineage if entry.attempt < replay.attempt] + [replay.attempt]
        last = read_records(root / attempt_folder(replay.attempt)).get(replay.to_step)
        folders = [root / attempt_folder(number) for number in numbers]
        return stage_history(folders, stage=last.stage, until=replay.to_step) if last else {}
