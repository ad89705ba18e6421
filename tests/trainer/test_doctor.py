"""The lists are answered one to one, and --isolate says which combination breaks."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer import hooked_models as h
from tests.trainer.unready_models import Ready
from torch import nn

from ctj_trainer.checks.articles import ITEMS, Topic
from ctj_trainer.checks.at_start import exclude_hooks
from ctj_trainer.checks.ci import check_ci
from ctj_trainer.checks.finding import Verdict, violations
from ctj_trainer.checks.forms import try_form
from ctj_trainer.checks.hook_audit import check_hooks
from ctj_trainer.checks.isolate import Form, Tried, judge
from ctj_trainer.checks.model_checks import Setting, check_recipe, check_script
from ctj_trainer.checks.order_test import ORDER_TEST, judge_orders, order_test
from ctj_trainer.checks.trial import Trial
from ctj_trainer.recipe import RecipeContext, load_recipe

X = torch.linspace(-1, 1, 16).view(2, 8)
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

LISTS: dict[Topic, tuple[str, ...]] = {
    Topic.COMPILE: (
        "used together",
        "before prepare",
        "prepare, then compile with dynamic",
        "length vary without dynamic",
        "fullgraph on",
        "safe helper",
        "versions known",
        "order test pass",
    ),
    Topic.OFFLOAD: (
        "unsupported",
        "pre- and post-forward hooks excluded",
        "together broken",
        "wrapped in no_compile",
        "audit pass",
        "only computation",
        "guard in CI",
    ),
    Topic.REGIONAL: (
        "High throughput",
        "Fast start",
        "FSDP2 and DeepSpeed",
        "without changing code",
        "as fast as compiling everything",
        "compile time much shorter",
        "shrink with the batch size",
        "grow with the model's size",
        "large models with larger batches",
    ),
    Topic.ENABLEMENT: (
        "loss per step and gradient norm",
        "peak memory",
        "samples per second",
        "all-reduce happen only in backward",
        "dynamic branch",
        "bound to FSDP and resharded",
    ),
}
"""Every question of the lists, by the words that tell it."""


def test_every_item_of_the_lists_is_a_line_of_the_doctor() -> None:
    asked = [(item.topic, item.question) for item in ITEMS]
    expected = [(topic, words) for topic, questions in LISTS.items() for words in questions]
    assert len(asked) == len(expected)
    for (topic, question), (wanted, words) in zip(asked, expected, strict=True):
        assert topic is wanted
        assert words in question
    assert all(item.answer for item in ITEMS)


def test_every_rule_that_an_item_names_is_judged_by_some_check() -> None:
    """A rule nobody judges would answer "not applicable" for ever."""
    from ctj_trainer.checks.machine import check_machine

    recipe = load_recipe("tests.trainer.odd_recipes:build", {}, RecipeContext(device=torch.device("cpu"), seed=0))
    exclude_hooks(torch.nn.Identity())  # as a job does: an earlier test of this process may have imported DeepSpeed
    findings = [
        *check_recipe(recipe, Setting()),
        *check_script(Path(__file__)),
        *check_machine({}, cache=Path("/nonexistent")),
        *order_test(),
        *check_ci(Path("/nonexistent")),
        *judge({form: Tried(graphs=1) for form in Form}),
    ]
    judged = {(finding.check, finding.rule) for finding in findings}
    named = {(rule.check, rule.name) for item in ITEMS for rule in item.rules}
    assert named <= judged
    assert [f for f in violations(findings) if f.check in ("check", "ddp", "fsdp", "offload")] == []
    documents = [item.judged(findings) for item in ITEMS]
    assert all(document["verdict"] in ("compliant", "violating", "not-applicable", "advice") for document in documents)
    assert json.dumps(documents)


def test_an_item_takes_the_worst_verdict_of_its_rules() -> None:
    (item,) = [item for item in ITEMS if "order test" in item.question]
    good, bad = ORDER_TEST.holds(evidence="fine"), ORDER_TEST.fails(evidence="gradients differ", remedy="install")
    assert item.judged([good])["verdict"] == "compliant"
    assert item.judged([good, bad]) | {"rules": [], "answer": ""} == {
        "list": "Compile with Accelerate",
        "question": item.question,
        "verdict": "violating",
        "found": ["gradients differ"],
        "answer": "",
        "rules": [],
    }


@pytest.mark.parametrize("trouble", ["no graph was made", "gradients differ from eager", "RuntimeError: refused"])
def test_a_failing_order_is_named(trouble: str) -> None:
    (finding,) = judge_orders({"prepare, then compile": trouble, "compile in place, then prepare": ""})
    assert finding.verdict is Verdict.VIOLATING
    assert finding.evidence == f"prepare, then compile: {trouble}"


# -- which combination breaks

WORKS = {form: Tried(loss=1.0, gradient=2.0, graphs=2) for form in Form}


@pytest.mark.parametrize(
    ("form", "change", "conclusion"),
    [
        (Form.EAGER, {"error": "ValueError: no"}, "the model itself"),
        (Form.COMPILED, {"error": "InductorError: no"}, "compile"),
        (Form.COMPILED, {"loss": 1.1}, "compile"),
        (Form.PREPARED, {"error": "RuntimeError: device mismatch"}, "prepare and offload"),
        (Form.BOTH, {"error": "Unsupported: hook"}, "both together"),
        (Form.BOTH, {"breaks": 6}, "both together"),
        (Form.BOTH, {"graphs": 0}, "both together"),
        (Form.BOTH, {"gradient": 2.1}, "both together"),
    ],
)
def test_the_combination_that_breaks_is_concluded(form: Form, change: dict[str, Any], conclusion: str) -> None:
    found = violations(judge(WORKS | {form: replace(WORKS[form], **change)}))
    assert found[-1].subject == f"conclusion: {conclusion}"
    if form is Form.BOTH:
        assert "each works alone: a hook is traced, and keeping hooks out of graphs cures it" in found[-1].evidence
        assert "no_compile" in found[-1].remedy


def stack(place: Callable[[nn.Module], None]) -> Trial:
    def build() -> nn.Module:
        torch.manual_seed(0)
        model = h.Stack(2)
        for block in model.blocks:
            place(block)
        return model

    return replace(Trial.of(build, X), blocks=lambda model: list(model.blocks))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["CpuOffload", "AlignDevicesHook", "streamed"])
def test_hooks_that_break_only_together_with_compile_are_found_and_cured(kind: str) -> None:
    """Offload alone is fine, compile alone is fine, together broken."""
    trial = stack(h.EVERY_KIND[kind])
    found = violations(judge({form: try_form(trial, form) for form in Form}))
    assert [f.subject for f in found] == ["both, as usual", "conclusion: both together"]
    assert "cures it" in found[-1].evidence


@pytest.mark.parametrize("trial", [stack(lambda _: None), Trial.of(Ready, X)], ids=["stack", "ready"])
def test_models_without_hooks_work_in_every_form(trial: Trial) -> None:
    assert violations(judge({form: try_form(trial, form) for form in Form})) == []


def test_a_form_that_kills_its_process_is_an_answer_of_that_form(tmp_path: Path) -> None:
    code = "import os\ndef build(config, context):\n    os._exit(7)\n"
    (tmp_path / "dies.py").write_text(code, encoding="utf-8")
    program = (
        "from ctj_trainer.checks.isolate import Form, _in_a_process as run;"
        "print(run({'recipe': {'name': 'dies:build'}}, Form.BOTH).error)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(Path(part).absolute()) for part in sys.path if part)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )
    assert done.stdout.startswith("exit code 7"), done.stderr


# -- the audit, and the audit in CI


@pytest.mark.parametrize("kind", ["Moving", "GroupOffloadingHook", "move_weights"])
def test_a_traced_hook_is_a_finding_with_its_module(kind: str) -> None:
    found = violations(check_hooks(stack(h.EVERY_KIND[kind]).build()))
    assert {finding.subject for finding in found} >= {"blocks.0", "blocks.1"}
    assert "exclude_all" in found[0].rewrite


@pytest.mark.parametrize("kind", ["CpuOffload", "streamed"])
def test_excluded_hooks_are_compliant(kind: str) -> None:
    (finding,) = [f for f in check_hooks(stack(h.EVERY_KIND[kind]).build()) if "checkpoint function" not in f.evidence]
    assert finding.verdict is Verdict.COMPLIANT


@pytest.mark.parametrize("pipeline", [".github/workflows/test.yml", ".gitlab-ci.yml", "Jenkinsfile"])
def test_ci_without_the_audit_is_violating_and_with_it_compliant(pipeline: str, tmp_path: Path) -> None:
    assert check_ci(tmp_path)[0].verdict is Verdict.NOT_APPLICABLE
    file = tmp_path / pipeline
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("run: pytest\n", encoding="utf-8")
    (missing,) = check_ci(tmp_path)
    assert missing.verdict is Verdict.VIOLATING
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_model.py").write_text("assert_all_disabled(model)\n", encoding="utf-8")
    assert check_ci(tmp_path)[0].verdict is Verdict.COMPLIANT
    file.write_text("run: ctj check mine:build\n", encoding="utf-8")
    assert check_ci(tmp_path)[0].subject == pipeline
