"""The troubleshooting lists people know, item by item, and which rule answers each.

An item without a rule is answered by words: it asks for a choice, not for a fact. Figures that the lists claim are
told as claims, beside what was measured here.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ctj_trainer.checks import (
    amp_source,
    boundary,
    consistency,
    control_flow,
    ddp,
    fsdp,
    machine,
    script_rules,
    topology,
)
from ctj_trainer.checks.ci import GUARD_IN_CI
from ctj_trainer.checks.finding import Finding, Rule, Verdict
from ctj_trainer.checks.hook_audit import HOOKS
from ctj_trainer.checks.isolate import ISOLATION
from ctj_trainer.checks.model_checks import PURE
from ctj_trainer.checks.order_test import ORDER_TEST


class Topic(StrEnum):
    """One list."""

    COMPILE = "Compile with Accelerate"
    OFFLOAD = "Offload with compile"
    REGIONAL = "Regional compilation"
    ENABLEMENT = "Progressive enablement"


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question of a list."""

    topic: Topic
    question: str
    rules: tuple[Rule, ...] = ()
    answer: str

    def judged(self, findings: Iterable[Finding]) -> dict[str, Any]:
        """Return the item with the worst verdict of its rules, and what was found."""
        keys = {(rule.check, rule.name) for rule in self.rules}
        mine = [finding for finding in findings if (finding.check, finding.rule) in keys]
        verdicts = {finding.verdict for finding in mine}
        order = (Verdict.VIOLATING, Verdict.COMPLIANT, Verdict.NOT_APPLICABLE)
        verdict = next((v for v in order if v in verdicts), None)
        found = [
            f"{finding.subject}: {finding.evidence}".removeprefix(": ")
            for finding in mine
            if finding.verdict is verdict
        ]
        fallback = "not-applicable" if self.rules else "advice"
        return {
            "list": str(self.topic),
            "question": self.question,
            "verdict": str(verdict or fallback),
            "found": found[:3],
            "answer": self.answer,
            "rules": [f"{rule.check}: {rule.name}" for rule in self.rules],
        }


ITEMS: tuple[Item, ...] = (
    Item(
        topic=Topic.COMPILE,
        question="Are compile and prepare used together, with recompile storms or graph breaks?",
        rules=(boundary.CAPTURE, topology.ATTRIBUTES, control_flow.BRANCHES, script_rules.ORDER),
        answer="Breaks and attributes that change per step are named with their line; a storm in a job turns eager.",
    ),
    Item(
        topic=Topic.COMPILE,
        question="Was compile called before prepare?",
        rules=(script_rules.ORDER,),
        answer="Wrapping compiles come after prepare. Jobs compile in place, in the right order per strategy.",
    ),
    Item(
        topic=Topic.COMPILE,
        question="Quick fix: prepare, then compile with dynamic shapes",
        rules=(script_rules.ORDER, script_rules.DYNAMIC),
        answer="model = accelerator.prepare(model); model = torch.compile(model, dynamic=None). None is better than "
        "True: it makes dynamic only what was seen to change.",
    ),
    Item(
        topic=Topic.COMPILE,
        question="Does the input length vary without dynamic?",
        rules=(ddp.SHAPES, script_rules.DYNAMIC, machine.COMPILE_ENV),
        answer="spec.compile.dynamic: Auto; `accelerate launch` sets ACCELERATE_DYNAMO_USE_DYNAMIC=False.",
    ),
    Item(
        topic=Topic.COMPILE,
        question="Is fullgraph on?",
        rules=(script_rules.FULLGRAPH,),
        answer="Jobs train with fullgraph off; `ctj check` verifies that there are no breaks.",
    ),
    Item(
        topic=Topic.COMPILE,
        question="Is the safe helper used?",
        rules=(script_rules.SAFE,),
        answer="safe_compile_with_accelerate(accelerator, model, policy) in your own script; jobs have it built in.",
    ),
    Item(
        topic=Topic.COMPILE,
        question="Are torch and accelerate versions known to work together?",
        rules=(machine.VERSIONS,),
        answer="requirements/run.lock holds the tested combination.",
    ),
    Item(
        topic=Topic.COMPILE,
        question="Does the order test pass?",
        rules=(ORDER_TEST,),
        answer="Both orders are run on this machine and compared with eager.",
    ),
    Item(
        topic=Topic.OFFLOAD,
        question='Is the error "unsupported", a device mismatch, or a cached graph that references a freed CPU tensor?',
        rules=(PURE, consistency.DEVICE, boundary.CAPTURE),
        answer="Unsupported: a hook is traced, exclude it. Device mismatch: a tensor is made or left elsewhere. Freed: "
        "the graph was made while the module was onloaded; compile below the hooks.",
    ),
    Item(
        topic=Topic.OFFLOAD,
        question="Are pre- and post-forward hooks excluded from compile?",
        rules=(HOOKS,),
        answer="Accelerate excludes its own; a ModelHook subclass of yours is traced until it is excluded.",
    ),
    Item(
        topic=Topic.OFFLOAD,
        question="Offload alone fine, compile alone fine, together broken?",
        rules=(ISOLATION,),
        answer="Then a hook is traced. `ctj doctor --isolate` runs each form in a process of its own and says which.",
    ),
    Item(
        topic=Topic.OFFLOAD,
        question="Is every hook wrapped in no_compile?",
        rules=(HOOKS,),
        answer="ctj_trainer.hooks.OffloadHooks.of(model).exclude_all() wraps all that are found.",
    ),
    Item(
        topic=Topic.OFFLOAD,
        question="Does the audit pass that all are disabled?",
        rules=(HOOKS,),
        answer="ctj_trainer.hooks.assert_all_disabled(model), before the first compiled call; jobs run it at start.",
    ),
    Item(
        topic=Topic.OFFLOAD,
        question="Does the graph hold only computation, with moves eager?",
        rules=(PURE,),
        answer="ctj_trainer.hooks.pure.compile_around_hooks compiles the forward below the hooks.",
    ),
    Item(
        topic=Topic.OFFLOAD,
        question="Is the guard in CI?",
        rules=(GUARD_IN_CI,),
        answer="Run `ctj check RECIPE` (exit code 1 on a violation) or assert_all_disabled in a test.",
    ),
    Item(
        topic=Topic.REGIONAL,
        question="High throughput wanted?",
        answer="mode reduce-overhead or max-autotune, on GPU with fixed shapes only: CUDA graphs and autotuning cost "
        "memory and start-up. Not measured here. `keep: IfFaster` drops what does not pay.",
    ),
    Item(
        topic=Topic.REGIONAL,
        question="Fast start wanted?",
        answer="spec.compile.scope: regional, the default: one graph for all equal blocks.",
    ),
    Item(
        topic=Topic.REGIONAL,
        question="Do FSDP2 and DeepSpeed use their own variants?",
        rules=(fsdp.MANAGED, fsdp.RESHARDED),
        answer="FSDP2: blocks are compiled in place, then sharded. ZeRO-3: blocks become leaves, their forward is "
        "compiled. No wrapper in either, so names stay.",
    ),
    Item(
        topic=Topic.REGIONAL,
        question="Can it be switched without changing code?",
        rules=(machine.COMPILE_ENV,),
        answer="ctj run job.yaml --set spec.compile.scope=regional|full|disabled; in scripts the ACCELERATE_DYNAMO_* "
        "variables, ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION among them.",
    ),
    Item(
        topic=Topic.REGIONAL,
        question="Is it as fast as compiling everything?",
        answer="Claimed: close to it. Measured on CPU: 1.20 against 1.32 times eager (12 blocks).",
    ),
    Item(
        topic=Topic.REGIONAL,
        question="Is its compile time much shorter?",
        answer="Claimed: much. Measured on CPU: 0.34 to 0.39 of it (make bench-compile).",
    ),
    Item(
        topic=Topic.REGIONAL,
        question="Does the gap in speed shrink with the batch size?",
        answer="Claimed; not measured here.",
    ),
    Item(
        topic=Topic.REGIONAL,
        question="Does the saving grow with the model's size?",
        answer="Claimed. Equal blocks share one graph, so regional compile time does not grow with depth.",
    ),
    Item(
        topic=Topic.REGIONAL,
        question="Is it best for large models with larger batches?",
        answer="Claimed; not measured here. The timed blocks of each stage decide for your job.",
    ),
    Item(
        topic=Topic.ENABLEMENT,
        question="Are loss per step and gradient norm steady?",
        answer="Gates finite and parity: each stage repeats the last steps of the one before on the same samples.",
    ),
    Item(
        topic=Topic.ENABLEMENT,
        question="Is peak memory within bounds?",
        answer="Gate memory; the first attempt predicts every stage before it allocates. Every dtype counts.",
        rules=(amp_source.STORED,),
    ),
    Item(
        topic=Topic.ENABLEMENT,
        question="Are samples per second comparable across stages?",
        answer="Gate throughput; the global batch is the same in every stage.",
    ),
    Item(
        topic=Topic.ENABLEMENT,
        question="Does all-reduce happen only in backward?",
        rules=(ddp.PHASES, ddp.APART),
        answer="A communication hook notes the phase of each bucket.",
    ),
    Item(
        topic=Topic.ENABLEMENT,
        question="Does a dynamic branch make backward recompile?",
        rules=(control_flow.BRANCHES, control_flow.LOOPS, control_flow.SHAPES),
        answer="A branch on data ends the graph, and the backward of each part is compiled apart.",
    ),
    Item(
        topic=Topic.ENABLEMENT,
        question="Are parameters bound to FSDP and resharded?",
        rules=(fsdp.MANAGED, fsdp.GATHERED, fsdp.RESHARDED, fsdp.SYNCHRONISED),
        answer="Every parameter that is not managed is named.",
    ),
)
