"""One stage on one rank, from recipe to report: build, compile in place, lay out, restore, train, export, prove."""

import dataclasses
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from ctj_api.attempt import Attempt, Mode
from ctj_api.exit_codes import ExitCode
from ctj_api.names import EXPORT_FOLDER, attempt_folder
from ctj_api.report import MAX_NOTICES, MemoryPrediction
from ctj_api.spec import Fallback, Strategy
from ctj_trainer import progress
from ctj_trainer.checkpoint import Checkpoints, Committed
from ctj_trainer.compile.errors import LateRankError
from ctj_trainer.compile.lengths import Lengths
from ctj_trainer.compile.policy import CompilePolicy
from ctj_trainer.compile.session import CompileSession, NoFallbackError, why_not_compiled
from ctj_trainer.compile.sources import Layer
from ctj_trainer.compile.verdict import Decision, stored
from ctj_trainer.evaluation import Evaluator, hold_out
from ctj_trainer.evidence import RankFigures, measure
from ctj_trainer.gradients import Gradients
from ctj_trainer.hooks.frozen import FrozenHooks
from ctj_trainer.loop import Loop, NonFiniteError, Parts
from ctj_trainer.messages import MessageError
from ctj_trainer.outcome import Outcome, replay_reference
from ctj_trainer.ranks import Ranks
from ctj_trainer.recipe import Recipe, RecipeContext, blocks_of, load_recipe
from ctj_trainer.records import stage_history
from ctj_trainer.requests import Requests
from ctj_trainer.strategies import prepare
from ctj_trainer.strategies.foundation import no_kernel
from ctj_trainer.strategies.prepared import Prepared
from ctj_trainer.telemetry import Telemetry
from ctj_trainer.trackers import Trackers, tracking

if TYPE_CHECKING:
    from ctj_trainer.compile.cache import CompileCache

log = logging.getLogger("ctj")
POLICY_FILE = "compile-policy.json"


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

    def settled(self, policy: CompilePolicy) -> "Scene":
        """Return the scene of an attempt whose compile settings leave nothing open."""
        settings = policy.as_settings(self.attempt.compile)
        return dataclasses.replace(self, attempt=self.attempt.model_copy(update={"compile": settings}))

    @property
    def folder(self) -> Path:
        """This attempt's folder."""
        return self.root / attempt_folder(self.attempt.attempt)

    @property
    def ancestry(self) -> list[Path]:
        """Folders of the attempts this one continues, oldest first, its own last."""
        numbers = [entry.attempt for entry in self.attempt.lineage if entry.attempt != self.attempt.attempt]
        return [self.root / attempt_folder(number) for number in [*numbers, self.attempt.attempt]]


def run_stage(scene: Scene) -> str:
    """Train the attempt's window; returns why it stopped early, else an empty text. Collective.

    Raises:
        NonFiniteError: training has diverged; the report of it is written.
        CompiledCodeError: compiled code raised past the guard; the verdict for the next attempt is written.
        LateRankError: a rank did not end its warm-up in time; the verdict for the next attempt is written.
        NoFallbackError: compiled code is given up, and the job may not go on without it.
    """
    attempt = scene.attempt
    log.info("attempt %s", attempt.model_dump_json(by_alias=True, exclude_none=True))
    if scene.ranks.world_size != attempt.stage.world_size:
        raise MessageError(
            f"stage {attempt.stage.name} is laid out for {attempt.stage.world_size} processes, "
            f"{scene.ranks.world_size} were started"
        )
    checkpoints = Checkpoints.of(attempt, volume=scene.root, group=scene.ranks.control, notice=scene.notice)
    checkpoints.claim()
    context = RecipeContext(device=scene.ranks.device, seed=attempt.training.seed)
    recipe = load_recipe(attempt.recipe.name, attempt.recipe.config, context)
    recipe = hold_out(recipe, attempt.training.evaluation)
    policy = _policy(scene)
    scene = scene.settled(policy)
    _compare_ranks(scene, policy)
    memory = _predicted(scene, recipe)
    scene.telemetry.phase(progress.LOADING)
    with _session(scene) as session:
        lengths = Lengths(policy.dynamic_dims) if session.is_compiled and policy.dynamic_dims else None
        prepared = _laid_out(scene, recipe, policy if session.is_compiled else None, lengths)
        session.attach(prepared.inner)
        hooks = _checked(scene, recipe, prepared) if session.is_compiled else None
        found = checkpoints.load(prepared)
        with _tracking(scene, found) as trackers:
            loop = _loop(
                scene,
                recipe,
                prepared,
                session=session,
                checkpoints=checkpoints,
                found=found,
                trackers=trackers,
                lengths=lengths,
            )
            stopped = _trained(scene, loop, memory, policy)
        for text in hooks.changes(prepared.inner) if hooks else ():
            scene.notice(text)
        if not stopped:
            _export(scene, recipe, prepared)
        _report(scene, loop, memory, ExitCode.STOPPED if stopped else ExitCode.DONE)
        prepared.close()
    scene.telemetry.phase(progress.DONE)
    return stopped


def _trained(scene: Scene, loop: Loop, memory: Sequence[MemoryPrediction], policy: CompilePolicy) -> str:
    session = loop.parts.session
    may_be_eager = policy.fallback is Fallback.EAGER
    try:
        _warm_up(scene, loop, policy, memory)
        return loop.run()
    except NonFiniteError:
        _report(scene, loop, memory, ExitCode.NON_FINITE)
        raise
    except NoFallbackError:
        _report(scene, loop, memory, ExitCode.COMPILE)
        raise
    except LateRankError as error:
        if not may_be_eager:
            raise NoFallbackError(str(error)) from error
        session.give_up_next(str(error))
        raise
    except Exception as error:
        refused = no_kernel(error, scene.attempt.training)
        if refused is not None:
            raise refused from error
        from ctj_trainer.failures import CompiledCodeError, kind_of

        is_unknown = kind_of(error) is ExitCode.USER_CODE
        reason = session.blame(error, step=loop.step + 1) if is_unknown else ""
        if not reason:
            raise
        if not may_be_eager:
            raise NoFallbackError(f"step {loop.step + 1}: {reason}; spec.compile.fallback is Fail") from error
        raise CompiledCodeError(f"step {loop.step + 1}: {reason}") from error


def _compare_ranks(scene: Scene, policy: CompilePolicy) -> None:
    """Refuse to compile on ranks that are not equal, before anything is built. Collective.

    Raises:
        RanksDifferError: what differs, on which rank.
    """
    if policy.compiles and scene.attempt.mode is Mode.COMPILED:
        from ctj_trainer.compile.fingerprint import fingerprint, refuse_differences

        refuse_differences(scene.ranks.gather(fingerprint(policy, scene.ranks.device.type)))


def _warm_up(scene: Scene, loop: Loop, policy: CompilePolicy, memory: Sequence[MemoryPrediction]) -> None:
    """Compile on every rank for the first batch and the declared shapes, then wait for the last rank. Collective.

    What was compiled is published at once: the next attempt may follow a crash.

    Raises:
        LateRankError: a rank did not come in time.
    """
    gradients, session = loop.parts.gradients, loop.parts.session
    if not session.compiles_from(loop.step + 1):
        return
    from ctj_trainer.compile.cache import CompileCache
    from ctj_trainer.compile.warmup import shaped, warm_up

    scene.telemetry.phase(progress.COMPILING)
    first = gradients.batches_of(loop.step + 1)[0]
    batches = [first, *(shaped(first, sizes) for sizes in policy.shapes)]
    cache = CompileCache(policy, rank=scene.ranks.rank)

    def run() -> None:
        warm_up(gradients.rehearse, batches, inner=loop.parts.prepared.inner, ranks=scene.ranks)
        scene.ranks.board.meet(timeout_seconds=policy.timeout_seconds)  # before anything collective

    with session.warming() as guard:
        cache.mended(run, guard=guard, ranks=scene.ranks, notice=scene.notice)
    log.info("warmed up on %d shapes in %.1f s", len(batches), session.warm_seconds)
    if scene.ranks.rank == 0:
        _publish(scene, session, cache, memory)


def _publish(scene: Scene, session: CompileSession, cache: "CompileCache", memory: Sequence[MemoryPrediction]) -> None:
    attempt = scene.attempt
    try:
        is_new = session.facts.cache_misses > 0
        session.archive = cache.publish(scene.root, before=attempt.compile_cache, compiled=is_new)
    except OSError as error:
        scene.notice(f"compiled code could not be published ({error.strerror}): another node compiles it again")
    if session.archive is not None:
        early = Outcome(
            attempt=attempt,
            exit_code=ExitCode.USER_CODE_OR_IMAGE,
            measurements={},
            memory=memory,
            notices=scene.notices,
            compile_cache=session.archive,
        )
        early.write(scene.run_dir)


def _predicted(scene: Scene, recipe: Recipe) -> Sequence[MemoryPrediction]:
    """The first attempt of a job predicts for the whole ladder. Rank 0 alone: the others load meanwhile.

    Written at once: a stage that then runs out of memory cannot report it.
    """
    if scene.ranks.rank != 0 or scene.attempt.lineage:
        return ()
    from ctj_trainer.memory_prediction import CannotPredict
    from ctj_trainer.preflight import predict

    try:
        memory = predict(scene.attempt, recipe, device=scene.ranks.device)
    except CannotPredict as error:
        scene.notice(str(error))
        return ()
    Outcome(attempt=scene.attempt, exit_code=ExitCode.USER_CODE_OR_IMAGE, measurements={}, memory=memory).write(
        scene.run_dir
    )
    return memory


@contextmanager
def _session(scene: Scene) -> Iterator[CompileSession]:
    """Guard compiled training while it lasts; import no compiler where nothing is compiled."""
    attempt, ranks = scene.attempt, scene.ranks
    # A retry was asked for: verdicts of earlier attempts do not count, its own (after a restart) does.
    folders = [scene.folder] if attempt.retry_compile else list(reversed(scene.ancestry))
    found: Decision | None = ranks.share(stored(folders, stage=attempt.stage.name) if ranks.rank == 0 else None)
    why = why_not_compiled(attempt, found)
    with ExitStack() as stack:
        guard = None
        if not why:
            from ctj_trainer.compile.guard import guarded

            guard = stack.enter_context(guarded(on_compiling=scene.telemetry.compiling))
        else:
            log.info("eager: %s", why)
        yield CompileSession(attempt, decision=found, guard=guard, folder=scene.folder, ranks=ranks)


def _policy(scene: Scene) -> CompilePolicy:
    """Put together how this attempt compiles, before anything is built; say it once, and store it.

    Raises:
        CompileConfigError: the installed torch cannot do it.
    """
    from ctj_trainer.compile.sources import environment_layer, resolve, spec_layer

    attempt = scene.attempt
    layers = (spec_layer(attempt.compile), environment_layer(os.environ))
    policy = _profiled(scene, *layers) if attempt.mode is Mode.COMPILED else resolve(*layers, switches=os.environ)
    for text in policy.notices:
        scene.notice(text)
    if scene.ranks.rank == 0:
        log.info("%s", "\n".join(policy.lines()))
        (scene.folder / POLICY_FILE).write_text(json.dumps(policy.to_document(), indent=2) + "\n")
    return policy


def _profiled(scene: Scene, *layers: Layer) -> CompilePolicy:
    """Let the hardware profile fill in what nobody said."""
    from ctj_trainer.compile.installed import check_installed
    from ctj_trainer.compile.profile import resolve_with_profile

    attempt = scene.attempt
    policy, profile = resolve_with_profile(
        *layers,
        profile=attempt.compile.profile,
        device=scene.ranks.device,
        precision=attempt.training.precision.value,
        environment=os.environ,
    )
    if policy.compiles:
        check_installed(policy)
    if profile is not None:
        log.info("%s", profile)
    return policy


def _laid_out(scene: Scene, recipe: Recipe, policy: CompilePolicy | None, lengths: Lengths | None) -> Prepared:
    attempt = scene.attempt

    def compile_in_place(model: nn.Module, strategy: Strategy) -> None:
        from ctj_trainer.checks.at_start import exclude_hooks
        from ctj_trainer.checks.switches import whole_activation_budget
        from ctj_trainer.compile.regions import place

        assert policy is not None
        for text in (*exclude_hooks(model), *whole_activation_budget(model)):
            scene.notice(text)
        blocks = blocks_of(model, recipe)
        placement = place(model, blocks, policy=policy, strategy=strategy, lengths=lengths)
        log.info("%s", placement)
        for text in placement.notices:
            scene.notice(text)

    return prepare(
        attempt.stage.strategy,
        recipe,
        training=attempt.training,
        micro_batch_size=attempt.micro_batch_size,
        device=scene.ranks.device,
        offload=attempt.stage.offload,
        place=compile_in_place if policy is not None else None,
    )


def _checked(scene: Scene, recipe: Recipe, prepared: Prepared) -> FrozenHooks:
    """Tell what would break compiled code here, and freeze the hooks it will be compiled with. Collective."""
    from ctj_trainer.checks.at_start import first_shapes, problems_at_start

    attempt, ranks = scene.attempt, scene.ranks
    shapes = first_shapes(recipe, attempt.training, ranks=ranks, micro_batch_size=attempt.micro_batch_size)
    for text in problems_at_start(prepared.inner, attempt.stage.strategy, shapes=shapes):
        scene.notice(text)
    return FrozenHooks.of(prepared.inner)


def _tracking(scene: Scene, found: Committed | None) -> AbstractContextManager[Trackers]:
    return tracking(
        scene.attempt,
        root=scene.root,
        is_first_rank=scene.ranks.rank == 0,
        resumed_at=found.ref.step if found else 0,
        notice=scene.notice,
    )


def _loop(  # noqa: PLR0913  # the pieces of a stage, put together in one place
    scene: Scene,
    recipe: Recipe,
    prepared: Prepared,
    *,
    session: CompileSession,
    checkpoints: Checkpoints,
    found: Committed | None,
    trackers: Trackers,
    lengths: Lengths | None,
) -> Loop:
    """Put the parts of the loop together."""
    gradients = Gradients(
        prepared,
        recipe,
        attempt=scene.attempt,
        ranks=scene.ranks,
        eagerly=session.eagerly,
        before_forward=lengths.see if lengths else lambda _: None,
    )
    parts = Parts(
        attempt=scene.attempt,
        ranks=scene.ranks,
        prepared=prepared,
        gradients=gradients,
        evaluator=Evaluator(prepared, recipe, attempt=scene.attempt, ranks=scene.ranks, eagerly=session.eagerly),
        session=session,
        checkpoints=checkpoints,
        requests=scene.requests,
        telemetry=scene.telemetry,
        trackers=trackers,
        notice=scene.notice,
    )
    resumed_at = found.ref.step if found else 0
    log.info("stage %s starts from step %d", scene.attempt.stage.name, resumed_at)
    history = stage_history(scene.ancestry, stage=scene.attempt.stage.name, until=resumed_at)
    session.remember(history.values())
    return Loop(parts, resumed_at=resumed_at, history=history, checkpoint=found.ref if found else None)


def _export(scene: Scene, recipe: Recipe, prepared: Prepared) -> None:
    """At the job's last step, in whatever stage, write the weights as other tools load them. Collective."""
    if recipe.export is None or not scene.attempt.is_last:
        return
    scene.telemetry.phase(progress.EXPORTING)
    weights = prepared.full_weights()
    if scene.ranks.rank == 0:
        recipe.export(weights, scene.root / EXPORT_FOLDER)


def _report(scene: Scene, loop: Loop, memory: Sequence[MemoryPrediction], exit_code: ExitCode) -> None:
    """Write the report. Collective: the worst rank's figures count."""
    session = loop.parts.session
    figures = RankFigures(
        memory_peak_ratio=scene.telemetry.memory().peak_ratio,
        recompiles_after_warmup=session.recompiles_after_warmup,
        graph_breaks=session.facts.graph_breaks,
        compile_seconds=session.facts.compile_seconds,
        cache_hit_ratio=session.facts.cache_hit_ratio,
    )
    everyone = scene.ranks.gather(figures)
    if scene.ranks.rank != 0:
        return
    measurements = measure(
        scene.attempt,
        steps=loop.records,
        reference=replay_reference(scene.attempt, scene.root),
        verdict=session.verdict,
        ranks=everyone,
    )
    Outcome(
        attempt=scene.attempt,
        exit_code=exit_code,
        start_step=loop.resumed_at,
        step=loop.step,
        checkpoint=loop.checkpoint,
        measurements=measurements,
        verdict=session.verdict,
        memory=memory,
        notices=scene.notices,
        compile_cache=session.archive,
    ).write(scene.run_dir)
