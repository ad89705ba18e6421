"""The default gates, the spec's gates, and what each verdict leads to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.job_story import GOOD, Story, job_spec, short_spec

from ctj_api.attempt import Mode
from ctj_api.spec import GateMode, Measurement, OnFailure, Spec
from ctj_api.status import ConditionType, GateVerdict, Phase, StagePhase
from ctj_api.thresholds import Verdict, evaluate
from ctj_operator.core import gates

M = Measurement


def judged(
    measured: dict[Measurement, float | None] | None = None,
    *,
    spec: dict[str, object] | None = None,
    compiled: bool = True,
    first: bool = False,
) -> dict[str, GateVerdict]:
    parsed = Spec.from_document(spec if spec is not None else job_spec())
    found = {**GOOD, M.THROUGHPUT_RATIO: 0.9, **(measured or {})}
    evidence = gates.StageEvidence(
        attempt=1,
        measurements={name: value for name, value in found.items() if value is not None},
        compiled=compiled,
        replayed=not first,
        has_predecessor=not first,
    )
    rules = gates.rules(parsed, "ddp")
    return {verdict.name: verdict for verdict in gates.judge(rules, evidence)}


def on_gpus() -> dict[str, object]:
    spec = job_spec()
    ladder = [{**stage, "gpusPerNode": stage.get("processesPerNode", 1)} for stage in spec["ladder"]]
    return {**spec, "ladder": [{k: v for k, v in stage.items() if k != "processesPerNode"} for stage in ladder]}


def test_good_figures_pass_every_default_gate() -> None:
    verdicts = judged()
    assert list(verdicts) == ["finite", "parity", "memory", "recompiles", "throughput"]
    assert {verdict.verdict for verdict in verdicts.values()} == {Verdict.PASSED}


@pytest.mark.parametrize(
    ("gate", "measurement", "at_limit", "beyond"),
    [
        ("finite", M.NON_FINITE_STEPS, 0.0, 1.0),
        ("parity", M.PROBE_LOSS_RELATIVE, 1e-6, 1.1e-6),
        ("parity", M.PROBE_GRAD_NORM_RELATIVE, 5e-6, 5.1e-6),
        ("parity", M.REPLAY_LOSS_RELATIVE, 1e-5, 1.1e-5),
        ("parity", M.REPLAY_GRAD_NORM_RELATIVE, 1e-3, 1.1e-3),
        ("memory", M.MEMORY_PEAK_RATIO, 0.95, 0.951),
        ("recompiles", M.RECOMPILES_AFTER_WARMUP, 2.0, 3.0),
        ("throughput", M.THROUGHPUT_RATIO, 0.7, 0.69),
    ],
)
def test_the_limits_of_the_default_gates_are_inclusive(
    gate: str, measurement: Measurement, at_limit: float, beyond: float
) -> None:
    assert judged({measurement: at_limit})[gate].verdict is Verdict.PASSED
    assert judged({measurement: beyond})[gate].verdict is Verdict.FAILED
    assert judged({measurement: float("nan")})[gate].verdict is Verdict.FAILED
    assert judged({measurement: None})[gate].verdict is Verdict.INCONCLUSIVE


def test_tolerances_follow_the_precision_and_the_spec() -> None:
    bf16 = job_spec(training={"precision": "bf16"})
    assert judged({M.REPLAY_GRAD_NORM_RELATIVE: 0.19}, spec=bf16)["parity"].verdict is Verdict.PASSED
    tighter = job_spec(training={"precision": "bf16"}, compile={"tolerances": {"windowGradNorm": "0.1"}})
    assert judged({M.REPLAY_GRAD_NORM_RELATIVE: 0.19}, spec=tighter)["parity"].verdict is Verdict.FAILED
    assert judged({M.REPLAY_LOSS_RELATIVE: 2e-3}, spec=tighter)["parity"].verdict is Verdict.PASSED


def test_all_exceeded_limits_are_reported() -> None:
    verdict = judged({M.PROBE_LOSS_RELATIVE: 1.0, M.REPLAY_LOSS_RELATIVE: 2.0})["parity"]
    told = gates.described([verdict])
    assert "probeLossRelative is 1 (max 1e-6)" in told
    assert "replayLossRelative is 2 (max 1e-5)" in told


def test_the_first_stage_has_nothing_to_repeat_and_says_so() -> None:
    verdicts = judged(first=True)
    assert [one.measurement for one in verdicts["parity"].evidence] == [
        M.PROBE_LOSS_RELATIVE,
        M.PROBE_GRAD_NORM_RELATIVE,
    ]
    assert "replayLossRelative left out: there is no earlier stage" in verdicts["parity"].note
    assert "throughput" not in verdicts


def test_an_eager_stage_has_no_probe_and_its_bad_probe_does_not_condemn_it() -> None:
    verdicts = judged({M.PROBE_LOSS_RELATIVE: 1.0, M.RECOMPILES_AFTER_WARMUP: 9.0}, compiled=False)
    assert verdicts["parity"].verdict is Verdict.PASSED
    assert "probeLossRelative left out: the stage ran eager" in verdicts["parity"].note
    assert "recompiles" not in verdicts


def test_throughput_counts_on_accelerators_only() -> None:
    assert judged()["throughput"].mode is GateMode.DRY_RUN
    assert judged(spec=on_gpus())["throughput"].mode is GateMode.ENFORCE


def p95(**changes: object) -> dict[str, object]:
    source = {"report": "stepTimeP95Seconds"}
    return {"name": "p95-step", "source": source, "thresholdRange": {"max": "1.2"}, **changes}


def test_a_gate_of_the_spec_joins_the_defaults_in_its_stages_only() -> None:
    here = judged({M.STEP_TIME_P95_SECONDS: 1.3}, spec=job_spec(gates=[p95(stages=["ddp"])]))
    assert here["p95-step"].verdict is Verdict.FAILED
    assert "p95-step" not in judged(spec=job_spec(gates=[p95(stages=["fsdp"])]))


@pytest.mark.parametrize(
    ("stages", "measurement"),
    [([], M.STEP_TIME_P95_SECONDS), (["ddp"], M.STEP_TIME_P95_SECONDS), (["fsdp"], M.MEMORY_PEAK_RATIO)],
)
def test_a_gate_with_a_default_gates_name_replaces_it_where_it_applies(
    stages: list[str], measurement: Measurement
) -> None:
    here = judged({M.MEMORY_PEAK_RATIO: 2.0}, spec=job_spec(gates=[p95(name="memory", stages=stages)]))
    assert [one.measurement for one in here["memory"].evidence] == [measurement]


@given(value=st.floats(), limits=st.tuples(st.sampled_from([-1.0, 0.0, 1e-6, 0.1]), st.sampled_from([0.3, 1.0, 1e30])))
def test_the_verdict_can_be_recomputed_from_the_stored_evidence(value: float, limits: tuple[float, float]) -> None:
    low, high = (repr(limit) for limit in limits)
    gate = p95(thresholdRange={"min": low, "max": high})
    verdict = judged({M.STEP_TIME_P95_SECONDS: value}, spec=job_spec(gates=[gate]))["p95-step"]
    stored = GateVerdict.from_document(verdict.to_document())
    (one,) = stored.evidence
    assert one.value is not None
    again = evaluate(float(one.value), minimum=float(one.min or 0), maximum=float(one.max or 0))
    assert again is stored.verdict is evaluate(value, minimum=limits[0], maximum=limits[1])


# What follows


def test_no_data_holds_the_job_and_never_rolls_back() -> None:
    story = Story()
    story.passes("single")
    story.runs()
    story.finishes(measured={M.REPLAY_LOSS_RELATIVE: None})
    assert story.status.phase is Phase.HELD
    assert story.says(ConditionType.HELD) == ("True", "GateInconclusive")
    assert story.says(ConditionType.GATE_PASSED) == ("False", "GateInconclusive")
    assert "replayLossRelative was not measured" in story.condition(ConditionType.GATE_PASSED).message
    assert story.status.rollbacks_used == 0
    assert story.status.stable is not None
    assert story.status.stable.stage == "single", "what was not shown to be good is not stable"


def test_a_report_of_another_attempt_is_no_data() -> None:
    story = Story()
    story.look()
    story.runs()
    story.finishes(attempt=99)
    assert story.status.phase is Phase.HELD


@pytest.mark.parametrize(
    ("on_failure", "outcome"),
    [
        (OnFailure.ROLLBACK, ("single", StagePhase.FAILED, Phase.RESTARTING)),
        (OnFailure.FALLBACK, ("ddp", StagePhase.RUNNING, Phase.RESTARTING)),
        (OnFailure.HOLD, ("ddp", StagePhase.FAILED, Phase.HELD)),
        (OnFailure.FAIL, ("ddp", StagePhase.FAILED, Phase.FAILED)),
    ],
)
def test_a_failed_gate_does_what_its_spec_says(on_failure: OnFailure, outcome: tuple[str, StagePhase, Phase]) -> None:
    story = Story(job_spec(gates=[p95(onFailure=on_failure.value)]))
    story.look()
    story.runs()
    story.finishes(measured={M.STEP_TIME_P95_SECONDS: 1.0})
    story.runs()
    story.finishes(measured={M.STEP_TIME_P95_SECONDS: 1.3})
    assert (story.status.stage, story.stage("ddp").phase, story.status.phase) == outcome
    assert any("stepTimeP95Seconds is 1.3 (max 1.2)" in event.message for event in story.events)


def test_a_dry_run_is_shown_and_never_blocks() -> None:
    story = Story(short_spec(gates=[p95(mode="DryRun", onFailure="Fail")]))
    story.passes("single")
    assert story.stage("single").phase is StagePhase.PASSED
    shown = {verdict.name: verdict.verdict for verdict in story.stage("single").gates}
    assert shown["p95-step"] is Verdict.INCONCLUSIVE
    assert "p95-step Inconclusive" in story.stage("single").message


def test_the_strongest_answer_wins() -> None:
    story = Story(job_spec(gates=[p95(onFailure="Hold"), p95(name="final", onFailure="Fail")]))
    story.look()
    story.runs()
    story.finishes(measured={M.STEP_TIME_P95_SECONDS: 9.0})
    assert story.status.phase is Phase.FAILED
    message = story.condition(ConditionType.FAILED).message
    assert "p95-step" in message
    assert "final" in message


def test_throughput_is_compared_with_the_stage_before() -> None:
    story = Story(on_gpus())
    story.passes("single")
    story.runs()
    story.finishes(measured={M.SAMPLES_PER_SECOND_PER_PROCESS: 60.0})
    verdict = next(one for one in story.stage("ddp").gates if one.name == "throughput")
    assert (verdict.verdict, verdict.evidence[0].value) == (Verdict.FAILED, "0.6")
    assert story.status.stage == "single", "rolled back"


def test_a_reused_compile_verdict_brings_its_probe_along() -> None:
    """After a restart the trainer does not probe again; the stored verdict holds what was measured."""
    story = Story(short_spec())
    story.look()
    story.runs()
    report = story.report()
    assert report.compile is not None
    verdict = report.compile.model_copy(update={"probe_loss_relative": 2e-8, "probe_grad_norm_relative": 3e-8})
    story.finishes(measured={M.PROBE_LOSS_RELATIVE: None, M.PROBE_GRAD_NORM_RELATIVE: None}, compile=verdict)
    assert story.stage("single").phase is StagePhase.PASSED


def test_a_trainer_that_says_done_too_early_is_not_promoted() -> None:
    story = Story()
    story.look()
    story.runs()
    story.finishes(step=12)
    assert story.stage("single").phase is StagePhase.RUNNING
    assert story.status.restarts.total == 1
    assert story.attempt.attempt == 2


def test_bad_evidence_of_a_compiled_stage_first_leads_to_eager_then_to_rollback() -> None:
    story = Story()
    story.passes("single")
    story.runs()
    story.finishes(measured={M.REPLAY_LOSS_RELATIVE: 1.0})
    assert (story.attempt.stage.name, story.attempt.mode, story.attempt.attempt) == ("ddp", Mode.EAGER, 3)
    assert [entry.attempt for entry in story.attempt.lineage] == [1], "from the stage's start, not from bad steps"
    assert story.status.fallbacks_used == 1
    story.runs()
    story.finishes(measured={M.REPLAY_LOSS_RELATIVE: 1.0})
    assert story.attempt.stage.name == "single"
    assert [remedy.what for remedy in story.status.remedies] == ["Fallback", "Rollback"]
