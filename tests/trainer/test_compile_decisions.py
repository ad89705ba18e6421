"""Which steps are timed, when compiled is kept, and what counts as a storm. No model, no torch."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.trainer.messages import attempt

from ctj_api.attempt import Attempt, Mode
from ctj_api.spec import Compile, Keep, Precision, Tolerances
from ctj_api.tolerances import limits_for
from ctj_trainer.compile.causes import Event, EventKind, FaultClass, Place
from ctj_trainer.compile.complaint import Complaint, merged
from ctj_trainer.compile.pressure import Peaks, PressureRule, highest
from ctj_trainer.compile.storm import StormRule
from ctj_trainer.compile.timing import SlowDownRule, Speed, StepTime, TimingPlan, measure_speed, plan_timing
from ctj_trainer.compile.verdict import (
    Cause,
    Decision,
    ProbeResult,
    give_up,
    give_up_regions,
    judge_probe,
    judge_speed,
    store,
    stored,
)
from ctj_trainer.memory import MemoryUse

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


PLACE = Place(file="model.py", line=3, function="forward")
ATTRIBUTE = (
    "self.step == 3          # self.step += 1  # model.py:5 in forward "
    "(HINT: torch.compile considers integer attributes of the nn.Module to be static.)"
)
SIZE = "tensor 'x' size mismatch at index 1. expected 16, actual 24"


def storm_at(steps: list[int], text: str, *, users: int = 1, warm_steps: int = 0, declared: int = 0) -> int | None:
    """The step in which recompilations of one function, one in each of `steps`, become a storm."""
    rule = StormRule(declared_shapes=declared)
    for step in steps:
        event = Event(kind=EventKind.RECOMPILE, text=text, place=PLACE)
        if rule.judge(step, [event], is_warming=step <= warm_steps, instances=lambda _: users):
            return step
    return None


@pytest.mark.parametrize(
    ("steps", "storm"),
    [
        ([2, 3, 4], 4),
        ([2, 4], None),
        ([1, 2, 22], None),  # the third is outside the window of the first two
        ([1, 1, 1], 1),
    ],
)
def test_three_recompiles_for_another_value_within_twenty_steps_are_a_storm_c04(
    steps: list[int], storm: int | None
) -> None:
    assert storm_at(steps, ATTRIBUTE) == storm


def test_constants_of_each_layer_are_no_storm_while_the_first_steps_run() -> None:
    assert storm_at([1] * 12, ATTRIBUTE, users=12, warm_steps=2) is None
    assert storm_at([3, 3, 4], ATTRIBUTE, users=12, warm_steps=2) == 4  # all twelve have run by then: they change


def test_eight_lengths_in_random_order_are_a_set_and_not_a_storm_c30() -> None:
    assert storm_at([2, 3, 5, 6, 9, 14, 30], SIZE) is None
    assert storm_at(list(range(1, 13)), SIZE) == 9  # no limit of the job's own stopped it before
    assert storm_at(list(range(1, 13)), SIZE, declared=24) is None


def test_functions_are_judged_apart() -> None:
    rule = StormRule()
    for step in range(1, 6):
        event = Event(kind=EventKind.RECOMPILE, text=ATTRIBUTE, place=replace(PLACE, line=step))
        assert rule.judge(step, [event], is_warming=False, instances=lambda _: 1) is None


def test_a_storm_names_attribute_value_place_and_fix_c04() -> None:
    rule = StormRule()
    event = Event(kind=EventKind.RECOMPILE, text=ATTRIBUTE, place=PLACE)
    storm = rule.judge(4, [event] * 3, is_warming=False, instances=lambda _: 1)
    assert str(storm) == (
        "recompile_storm: 3 in 20 steps: integer attribute step changes (guarded on 3) at model.py:5 in forward; "
        "keep it as a tensor (a buffer), or move it out of forward"
    )


STORM = Complaint(fault=FaultClass.INT_ATTRIBUTE, reason="recompile_storm: step", regions=("blocks.1",))


def test_ranks_act_on_one_complaint_that_names_every_region_any_of_them_named() -> None:
    other = replace(STORM, regions=("blocks.0",), reason="backend_failed: x")
    assert merged([None, None]) is None
    assert merged([STORM, other]) == replace(STORM, regions=("blocks.0", "blocks.1"))
    assert merged([None, other]) == replace(other, reason="backend_failed: x (rank 1)")
    assert merged([STORM, replace(other, regions=())]) == replace(STORM, regions=())  # all of them


def test_a_region_given_up_leaves_the_verdict_and_is_told_in_it() -> None:
    decision = give_up_regions(EQUAL, STORM, names=("blocks.1",), step=7)
    verdict = decision.verdict
    assert verdict.mode is Mode.COMPILED
    assert (verdict.fault, verdict.eager_from_step) == ("int_attribute", 7)
    assert "eager: blocks.1 (1): recompile_storm: step" in verdict.reason
    assert not decision.is_eager_throughout
    timed = judge_speed(decision, Speed(compiled_seconds=1.0, eager_seconds=1.5), Compile(), compile_seconds=1.0)
    assert timed.eager_regions == ("blocks.1",)
    assert timed.verdict.reason.startswith("Correct, and 1.50 times as fast as eager")
    assert timed.verdict.reason.endswith("eager: blocks.1 (1): recompile_storm: step")
    both = give_up_regions(timed, replace(STORM, reason="again"), names=("blocks.0", "blocks.1"), step=9)
    assert both.verdict.reason.count("eager:") == 1


def test_a_decision_keeps_its_regions_over_a_restart(tmp_path: Path) -> None:
    decision = give_up_regions(EQUAL, STORM, names=("blocks.1",), step=7)
    store(decision, tmp_path, stage="ddp")
    assert stored([tmp_path], stage="ddp") == decision


@pytest.mark.parametrize(
    ("used", "complains"),
    [([0.98, 0.98, 0.98], True), ([0.98, 0.98, 0.5, 0.98, 0.98], False), ([0.96] * 9, False)],
)
def test_memory_pressure_is_three_samples_in_a_row_above_the_gates_threshold(
    used: list[float], complains: bool
) -> None:
    rule = PressureRule()
    said = [rule.judge(MemoryUse(used=int(share * 1000), peak=0, limit=1000)) for share in used]
    assert bool(said[-1]) is complains
    assert PressureRule().judge(MemoryUse(used=10, peak=10, limit=None)) == ""


def test_eager_is_no_remedy_for_memory_unless_every_rank_saw_it_need_less() -> None:
    less = Peaks(compiled=200, eager=100)
    assert less.why_not_eager == ""
    assert highest([less, less]).why_not_eager == ""
    assert "eager steps were seen to need" in highest([less, Peaks(compiled=200, eager=300)]).why_not_eager
    assert "not been measured" in highest([less, Peaks(compiled=200)]).why_not_eager


def test_compiled_steps_that_became_slower_than_eager_are_told_once() -> None:
    rule = SlowDownRule()

    def told(seconds: float, count: int) -> list[str]:
        taken = [StepTime(step=step, mode=Mode.COMPILED, seconds=seconds) for step in range(count)]
        return [text for time in taken if (text := rule.judge(time, eager_seconds=1.0))]

    assert told(1.09, 40) == []
    assert len(told(1.2, 60)) == 1
    assert told(9.0, 40) == []
    assert SlowDownRule().judge(StepTime(step=1, mode=Mode.COMPILED, seconds=9.0), eager_seconds=None) == ""
