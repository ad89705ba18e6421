"""Rules that are read from a model's or a script's code: each is broken by at least three, and kept by two."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer import unready_models as m
from torch import nn

from ctj_trainer.checks import amp_source, control_flow, script_rules, topology
from ctj_trainer.checks.finding import Finding, Rule, Verdict, violations
from ctj_trainer.checks.source import forward_sources, script_source

VIOLATING: list[tuple[Rule, type[nn.Module]]] = [
    *(
        (control_flow.BRANCHES, k)
        for k in (m.BranchesOnSum, m.BranchesOnRouting, m.LoopsUntilSmall, m.BranchesOnWeights)
    ),
    *((control_flow.LOOPS, kind) for kind in (m.LoopsOverRows, m.LoopsByIndex, m.LoopsByContents)),
    *((control_flow.SHAPES, kind) for kind in (m.SelectsByMask, m.ListsNonzero, m.WhereWithOneArgument)),
    *((control_flow.ASSERTIONS, kind) for kind in (m.AssertsContents, m.RaisesOnNan, m.AssertsInHelper)),
    *((control_flow.HOST, kind) for kind in (m.LongestOfPacked, m.ConvertsToInt, m.ListsLengths)),
    *((topology.REGISTRATION, kind) for kind in (m.RegistersBuffer, m.MakesParameter, m.AddsModule)),
    *((topology.ATTRIBUTES, kind) for kind in (m.CountsCalls, m.KeepsLast, m.CachesInHelper)),
    *((amp_source.NESTED, kind) for kind in (m.NestsAutocast, m.SwitchesOff, m.NestsUnderDecorator)),
    *((amp_source.BY_HAND, kind) for kind in (m.EntersByHand, m.SetsAutocast, m.EntersOnStack)),
    *((amp_source.CONSTANTS, kind) for kind in (m.FixesHalfConstant, m.CallsHalf, m.MasksBeyondHalf)),
]


def findings_of(model: nn.Module) -> list[Finding]:
    sources = forward_sources(model)
    return [
        *control_flow.check_control_flow(sources),
        *topology.check_topology(sources),
        *amp_source.check_autocast(sources, compute_dtype=torch.float16),
    ]


def marked_line(kind: type[Any]) -> int:
    """The line of the class (or, for a helper, the first one after it) that carries `# <-`."""
    lines, _ = inspect.getsourcelines(inspect.getmodule(kind))
    start = inspect.getsourcelines(kind)[1]
    return next(number for number, line in enumerate(lines, 1) if number >= start and "# <-" in line)


@pytest.mark.parametrize(("rule", "kind"), VIOLATING, ids=lambda value: getattr(value, "__name__", None))
def test_a_violation_is_found_at_its_line_with_a_remedy(rule: Rule, kind: type[nn.Module]) -> None:
    model = nn.Sequential(kind(), kind())
    found = [f for f in violations(findings_of(model)) if f.rule == rule.name]
    assert [f.location.rsplit(":", 1)[-1] for f in found] == [str(marked_line(kind))]
    (finding,) = found
    assert finding.location.startswith("tests/trainer/unready_models.py:")
    assert finding.subject == "0 and 1 more"
    assert finding.remedy


@pytest.mark.parametrize("kind", m.READY)
def test_a_ready_model_breaks_no_rule(kind: type[nn.Module]) -> None:
    findings = findings_of(kind())
    assert violations(findings) == []
    assert {rule.name for rule, _ in VIOLATING} == {f.rule for f in findings if f.verdict is Verdict.COMPLIANT}


def rewrite_of(kind: type[nn.Module], rule: Rule) -> str:
    return next(f.rewrite for f in violations(findings_of(kind())) if f.rule == rule.name)


def test_a_branch_is_rewritten_as_cond() -> None:
    suggested = rewrite_of(m.BranchesOnSum, control_flow.BRANCHES)
    assert suggested == "y = torch.cond(x.sum() > 0, lambda x: self.linear(x), lambda x: x * 2, (x,))"
    linear = nn.Linear(8, 8)
    self, x = type("Self", (), {"linear": linear})(), torch.ones(2, 8)
    scope = {"self": self, "x": x, "torch": torch}
    exec(suggested, scope)
    assert torch.equal(scope["y"], linear(x))


def test_the_other_rewrites_are_code() -> None:
    assert rewrite_of(m.SelectsByMask, control_flow.SHAPES) == "torch.where(keep, x, 0)"
    assert (
        rewrite_of(m.AssertsContents, control_flow.ASSERTIONS) == "torch._assert((x > -1000000.0).all(), 'too small')"
    )
    assert rewrite_of(m.RaisesOnNan, control_flow.ASSERTIONS).startswith("torch._assert(~(torch.isnan(x).any())")
    assert rewrite_of(m.LoopsOverRows, control_flow.LOOPS).startswith("torch.vmap(lambda row: ...)(x)")
    assert "x.dtype" in rewrite_of(m.FixesHalfConstant, amp_source.CONSTANTS)
    assert "torch.finfo(x.dtype).min" in rewrite_of(m.MasksBeyondHalf, amp_source.CONSTANTS)
    assert "register_buffer('step'" in rewrite_of(m.CountsCalls, topology.ATTRIBUTES)


def test_a_number_read_in_each_of_four_layers_counts_four_breaks() -> None:
    """C28: file, line, op, breaks per step, and where to compute it instead."""
    found = violations(findings_of(nn.Sequential(*(m.LongestOfPacked() for _ in range(4)))))
    (finding,) = [f for f in found if f.rule == control_flow.HOST.name]
    assert "(item) breaks the graph 4 times per step" in finding.evidence
    assert "once in the collator" in finding.remedy


def test_a_constant_beyond_half_is_fine_in_fp32() -> None:
    sources = forward_sources(m.MasksBeyondHalf())
    assert violations(amp_source.check_autocast(sources, compute_dtype=torch.float32)) == []


# -- stored dtypes


def half_head() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2).half())


def half_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8).bfloat16())


def double_buffer() -> nn.Module:
    model = nn.Linear(8, 8)
    model.register_buffer("table", torch.zeros(2, dtype=torch.float64))
    return model


@pytest.mark.parametrize(
    ("build", "named"), [(half_head, "1.weight"), (half_norm, "1.weight"), (double_buffer, "table")]
)
def test_a_tensor_of_another_dtype_is_named(build: Any, named: str) -> None:
    found = violations(amp_source.check_stored_dtypes(build()))
    assert found[0].subject == named
    assert found[0].rewrite.startswith(f"{named}.to(torch.float32)")


def test_models_of_one_dtype_pass() -> None:
    counted = nn.BatchNorm1d(8)  # counts batches in int64
    for model in (nn.Linear(8, 8).bfloat16(), counted):
        assert violations(amp_source.check_stored_dtypes(model)) == []
    assert amp_source.check_stored_dtypes(nn.ReLU())[0].verdict is Verdict.NOT_APPLICABLE


# -- names


class NamesById(nn.Module):
    numbers = iter(range(1000))

    def __init__(self) -> None:
        super().__init__()
        self.add_module(f"layer_{next(self.numbers)}", nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return next(self.children())(x)


class Growing(m.AddsModule):
    pass


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(8))


@pytest.mark.parametrize(
    ("build", "word"),
    [(NamesById, "two builds"), (Growing, "extra.weight"), (lazy, "0.weight")],
    ids=["ids", "grows", "lazy"],
)
@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_names_that_change_are_found(build: Any, word: str) -> None:
    (finding,) = topology.check_names(build, lambda model: model(torch.ones(2, 8)))
    assert finding.verdict is Verdict.VIOLATING
    assert word in f"{finding.subject} {finding.evidence}"


@pytest.mark.parametrize("build", m.READY)
def test_names_that_stay_pass(build: Any) -> None:
    (finding,) = topology.check_names(build, lambda model: model(torch.ones(2, 8)))
    assert finding.verdict is Verdict.COMPLIANT


# -- scripts

PREPARED = "model, optimizer = accelerator.prepare(model, optimizer)\n"
SCALED = """
scaler = torch.amp.GradScaler()
optimizer = torch.optim.AdamW(model.parameters())
"""
GOOD_STEP = """
scaler.scale(loss).backward()
scaler.unscale_(optimizer)
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer)
scaler.update()
"""
LOOP = """
model = DistributedDataParallel(model)
for index, batch in enumerate(loader):
"""
SCRIPTS: list[tuple[Rule, str, str]] = [
    (script_rules.ORDER, "model = torch.compile(model)\n" + PREPARED, "1"),
    (script_rules.ORDER, "model = build()\nmodel = torch.compile(model, dynamic=True)\nmodel = DDP(model)\n", "2"),
    (script_rules.ORDER, "net = torch.compile(build(), mode='default')\nfully_shard(net)\n", "1"),
    (script_rules.DYNAMIC, PREPARED + "model = torch.compile(model, dynamic=False)\n", "2"),
    (script_rules.DYNAMIC, "torch.compile(step, dynamic=False)\n", "1"),
    (script_rules.DYNAMIC, "for block in model.blocks:\n    block.compile(dynamic=False)\n", "2"),
    (script_rules.FULLGRAPH, PREPARED + "model = torch.compile(model, fullgraph=True)\n", "2"),
    (script_rules.FULLGRAPH, "torch.compile(step, fullgraph=True)\n", "1"),
    (script_rules.FULLGRAPH, "model.compile(fullgraph=True)\n", "1"),
    (script_rules.SAFE, PREPARED + "model = torch.compile(model)\n", "2"),
    (script_rules.SAFE, "torch.compile(step)\n", "1"),
    (script_rules.SAFE, "model.compile()\n", "1"),
    (script_rules.SCALER, SCALED + GOOD_STEP.replace("scaler.scale(loss)", "loss"), "5"),
    (script_rules.SCALER, SCALED + GOOD_STEP.replace("scaler.unscale_(optimizer)\n", ""), "6"),
    (script_rules.SCALER, SCALED + GOOD_STEP.replace("scaler.step(optimizer)", "optimizer.step()"), "8"),
    (script_rules.SCALER, SCALED + GOOD_STEP.replace("scaler.update()\n", ""), "8"),
    (
        script_rules.NO_SYNC,
        LOOP + "    model(batch).backward()\n    if (index + 1) % accumulation == 0:\n        step()\n",
        "5",
    ),
    (script_rules.NO_SYNC, LOOP + "    loss = model(batch)\n    with model.no_sync():\n        loss.backward()\n", "5"),
    (
        script_rules.NO_SYNC,
        LOOP + "    loss = model(batch)\n    with accelerator.accumulate(model):\n        accelerator.backward(loss)\n",
        "5",
    ),
]
GOOD_SCRIPTS = [
    "from ctj_trainer import safe_compile_with_accelerate\n"
    + PREPARED
    + "model = safe_compile_with_accelerate(accelerator, model, policy)\n"
    + SCALED
    + GOOD_STEP
    + LOOP
    + "    with model.no_sync():\n        loss = model(batch)\n        scaler.scale(loss).backward()\n",
    PREPARED
    + "for batch in loader:\n    with accelerator.accumulate(model):\n        loss = model(batch)\n"
    + "        accelerator.backward(loss)\n        optimizer.step()\n",
]


def judged(tmp_path: Path, code: str) -> list[Finding]:
    script = tmp_path / "train.py"
    script.write_text(code, encoding="utf-8")
    return script_rules.check_script(script_source(script))


@pytest.mark.parametrize(("rule", "code", "line"), SCRIPTS)
def test_a_script_that_breaks_a_rule_is_told_the_line(tmp_path: Path, rule: Rule, code: str, line: str) -> None:
    found = [f for f in violations(judged(tmp_path, code)) if f.rule == rule.name]
    assert [f.location.rsplit(":", 1)[-1] for f in found] == [line]
    assert found[0].remedy


@pytest.mark.parametrize("code", GOOD_SCRIPTS)
def test_a_good_script_passes(tmp_path: Path, code: str) -> None:
    assert violations(judged(tmp_path, code)) == []
