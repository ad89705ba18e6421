"""One stage on one rank, from recipe to report: build, compile in place, lay out, restore, train, export, prove."""

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

from ctj_api.exit_codes import ExitCode
from ctj_api.names import EXPORT_FOLDER
from ctj_api.report import MemoryPrediction
from ctj_api.spec import Fallback
from ctj_trainer import progress
from ctj_trainer.checkpoint import Checkpoints, Committed
from ctj_trainer.compile.errors import LateRankError
from ctj_trainer.compile.lengths import Lengths
from ctj_trainer.compile.policy import CompilePolicy
from ctj_trainer.compile.session import CompileSession, NoFallbackError, why_not_compiled
from ctj_trainer.compile.settle import compare_ranks, settle
from ctj_trainer.compile.verdict import Decision, stored
from ctj_trainer.evaluation import Evaluator, hold_out
from ctj_trainer.gradients import Gradients
from ctj_trainer.layout import check, lay_out
from ctj_trainer.loop import Loop, NonFiniteError, Parts
from ctj_trainer.messages import MessageError
from ctj_trainer.recipe import Recipe, RecipeContext, load_recipe
from ctj_trainer.records import stage_history
from ctj_trainer.reporting import report_end, report_expected_memory
from ctj_trainer.scene import Scene
from ctj_trainer.strategies.foundation import no_kernel
from ctj_trainer.strategies.prepared import Prepared
from ctj_trainer.trackers import Trackers, tracking

log = logging.getLogger("ctj")


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
    policy = settle(scene)
    scene = scene.settled(policy)
    compare_ranks(scene, policy)
    memory = report_expected_memory(scene, recipe)
    scene.telemetry.phase(progress.LOADING)
    with _session(scene) as session:
        lengths = Lengths(policy.dynamic_dims) if session.is_compiled and policy.dynamic_dims else None
        prepared = lay_out(scene, recipe, policy if session.is_compiled else None, lengths)
        session.attach(prepared.inner)
        hooks = check(scene, recipe, prepared) if session.is_compiled else None
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
        report_end(scene, loop, memory, ExitCode.STOPPED if stopped else ExitCode.DONE)
        prepared.close()
    scene.telemetry.phase(progress.DONE)
    return stopped


def _trained(scene: Scene, loop: Loop, memory: Sequence[MemoryPrediction], policy: CompilePolicy) -> str:
    session = loop.parts.session
    may_be_eager = policy.fallback is Fallback.EAGER
    try:
        if session.compiles_from(loop.step + 1):
            from ctj_trainer.compile.warmup import warm_up_ranks  # late: it knows the compiler

            warm_up_ranks(scene, loop, policy, memory)
        gc.enable()  # supervisor/child.py turns it off while everything is imported
        return loop.run()
    except NonFiniteError:
        report_end(scene, loop, memory, ExitCode.NON_FINITE)
        raise
    except NoFallbackError:
        report_end(scene, loop, memory, ExitCode.COMPILE)
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
