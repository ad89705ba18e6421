"""What does a stage report, and when? The memory it expects at once, its measurements when it ends."""

from collections.abc import Sequence

from ctj_api.exit_codes import ExitCode
from ctj_api.report import MemoryPrediction
from ctj_trainer.evidence import RankFigures, measure
from ctj_trainer.loop import Loop
from ctj_trainer.outcome import Outcome, replay_reference
from ctj_trainer.recipe import Recipe
from ctj_trainer.scene import Scene


def report_expected_memory(scene: Scene, recipe: Recipe) -> Sequence[MemoryPrediction]:
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


def report_end(scene: Scene, loop: Loop, memory: Sequence[MemoryPrediction], exit_code: ExitCode) -> None:
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
