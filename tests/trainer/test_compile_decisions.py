"""Which steps are timed, when compiled is kept, and what counts as a storm. No model, no torch."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.trainer.messages import attempt

from ctj_api.attempt import Attempt, Mode
from ctj_api.spec import Compile, Keep, Precision, Tolerances
from ctj_api.tolerances import limits_for
from ctj_trainer.compile.timing import Speed, StepTime, TimingPlan, measure_speed, plan_timing
from ctj_trainer.compile.verdict import Cause, Decision, ProbeResult, give_up, judge_probe, judge_speed, store, stored
from ctj_trainer.compile.watch import CompileFacts, StormRule

LIMITS = limits_for(Tolerances(), Precision.FP32)
EQUAL = judge_probe(ProbeResult(loss_relative=1e-8, grad_norm_relative=1e-7), LIMITS)


def plan(**changes: object) -> TimingPlan:
    return plan_timing(Attempt.from_document(attempt(**changes)))


def modes(timing: TimingPlan, last: int) -> str:
    return "".join(timing.mode_of(step)[0] for step in range(1, last + 1))


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        ({"start": 0, "end": 12}, "CCCECECCCCCC"),  # two warm steps, four blocks of one, saved at 9
        ({"start": 0, "end": 6}, "CCCCCC"),  # too short to time
        ({"start": 9, "end": 24, "replay": {"attempt": 1, "fromStep": 9, "toStep": 12}}, 12 * "C" + "CCEECCEECCCC"),
    ],
)
def test_timing_blocks_alternate_between_warm_up_and_the_steps_the_next_stage_replays(
    window: dict[str, object], expected: str
) -> None:
    assert modes(plan(**window), len(expected)) == expected


def test_a_long_stage_is_timed_over_twenty_steps_of_each_form() -> None:
    timing = plan(end=1000)
    assert timing.block == 10
    assert modes(timing, 1000).count("E") == 20


def times(timing: TimingPlan, *, compiled: float, eager: float) -> list[StepTime]:
    steps = range(1, timing.last + 3)
    seconds = {Mode.COMPILED: compiled, Mode.EAGER: eager}
    return [StepTime(step=s, mode=timing.mode_of(s), seconds=seconds[timing.mode_of(s)]) for s in steps]


def test_speed_is_the_ratio_of_medians_of_timed_steps() -> None:
    timing = plan(end=24)
    taken = times(timing, compiled=1.0, eager=1.5)
    taken[0] = replace(taken[0], seconds=60.0)  # warm-up
    taken[3] = replace(taken[3], seconds=90.0, compiling=True)
    speed = measure_speed(timing, taken)
    assert speed == Speed(compiled_seconds=1.0, eager_seconds=1.5)
    assert speed.speedup == 1.5


def test_a_side_without_a_sample_is_no_measurement() -> None:
    timing = plan(end=24)
    taken = [t for t in times(timing, compiled=1.0, eager=1.5) if t.mode is Mode.COMPILED]
    assert measure_speed(timing, taken) is None


@pytest.mark.parametrize(
    ("keep", "eager_seconds", "mode"),
    [
        (Keep.IF_FASTER, 1.04, Mode.COMPILED),
        (Keep.IF_FASTER, 1.02, Mode.EAGER),
        (Keep.IF_CORRECT, 0.5, Mode.COMPILED),
    ],
)
def test_a_correct_form_is_kept_by_its_rule(keep: Keep, eager_seconds: float, mode: Mode) -> None:
    speed = Speed(compiled_seconds=1.0, eager_seconds=eager_seconds)
    decision = judge_speed(EQUAL, speed, Compile(keep=keep), compile_seconds=10.0)
    assert decision.verdict.mode is mode
    assert decision.verdict.speedup == eager_seconds
    assert not decision.is_eager_throughout


def test_break_even_is_compile_time_over_time_saved_per_step() -> None:
    speed = Speed(compiled_seconds=1.0, eager_seconds=1.25)
    assert judge_speed(EQUAL, speed, Compile(), compile_seconds=10.0).verdict.break_even_steps == 40


def test_too_short_a_stage_keeps_the_correct_form_and_says_that_it_was_not_timed() -> None:
    decision = judge_speed(EQUAL, None, Compile(), compile_seconds=10.0)
    assert decision.verdict.mode is Mode.COMPILED
    assert "not timed" in decision.verdict.reason


@pytest.mark.parametrize(
    "probe",
    [
        ProbeResult(loss_relative=1e-3, grad_norm_relative=0.0),
        ProbeResult(loss_relative=0.0, grad_norm_relative=1e-3),
        ProbeResult(loss_relative=float("nan"), grad_norm_relative=0.0),
        ProbeResult(problem="backend_failed: no compiler"),
    ],
)
def test_what_is_not_shown_equal_runs_eager_from_the_first_step(probe: ProbeResult) -> None:
    decision = judge_probe(probe, LIMITS)
    assert decision.verdict.mode is Mode.EAGER
    assert decision.is_eager_throughout


def test_a_stored_verdict_is_found_for_its_stage_only(tmp_path: Path) -> None:
    older, newer = tmp_path / "1", tmp_path / "2"
    older.mkdir()
    newer.mkdir()
    store(EQUAL, older, stage="ddp")
    storm = give_up(EQUAL, cause=Cause.COMPILER, reason="recompile_storm: 3 in 20 steps")
    store(storm, newer, stage="fsdp")
    assert stored([newer, older], stage="ddp") == EQUAL
    assert stored([newer, older], stage="fsdp") == storm
    assert stored([newer, older], stage="zero3") is None
    (newer / "verdict.json").write_text('{"stage": "fsdp", "mo')  # cut by a full disk
    assert stored([newer, older], stage="fsdp") is None


def test_giving_up_keeps_the_evidence() -> None:
    decision = give_up(EQUAL, cause=Cause.COMPILER, reason="recompile_limit: forward: x")
    assert decision.verdict.probe_loss_relative == 1e-8
    assert decision == Decision(cause=Cause.COMPILER, verdict=decision.verdict)


def storm_after(recompiles: list[int]) -> int | None:
    """First step with a complaint, given the total of recompilations after each step."""
    rule = StormRule()
    rule.settle(CompileFacts(recompiles=5))
    for step, total in enumerate(recompiles, start=1):
        if rule.judge(step, CompileFacts(recompiles=5 + total)):
            return step
    return None


@pytest.mark.parametrize(
    ("recompiles", "step"),
    [
        ([0, 1, 2, 3], 4),
        ([0, 1, 1, 2, 2], None),
        ([1, 2, *(19 * [2]), 3], None),  # the third is outside the window of the first two
        ([3], 1),
    ],
)
def test_three_recompiles_within_twenty_steps_are_a_storm(recompiles: list[int], step: int | None) -> None:
    assert storm_after(recompiles) == step


def test_a_failure_or_a_limit_counts_at_once_and_is_named() -> None:
    assert StormRule().judge(1, CompileFacts(failures=1, failure_reason="x")) == "backend_failed: x"
    assert StormRule().judge(1, CompileFacts(limit_hits=1, recompile_reason="y")) == "recompile_limit: y"
