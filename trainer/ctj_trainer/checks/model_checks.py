"""Everything that is checked of one model or script, in the order of a report."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from ctj_api.spec import Dynamic, Precision, Strategy
from ctj_trainer.batches import SampleOrder, micro_batches
from ctj_trainer.checks import amp_source, boundary, consistency, control_flow, parity, script_rules, topology
from ctj_trainer.checks.ddp import Dealing, Signature, judge_shapes, judge_split, signature
from ctj_trainer.checks.ddp_trial import check_ddp
from ctj_trainer.checks.finding import Finding, Rule
from ctj_trainer.checks.fsdp import check_fsdp, shard
from ctj_trainer.checks.hook_audit import check_hooks
from ctj_trainer.checks.source import forward_sources, functions_in, script_source
from ctj_trainer.checks.trial import Trial
from ctj_trainer.hooks import OffloadHooks
from ctj_trainer.hooks.graphs import GraphLog
from ctj_trainer.hooks.pure import compile_around_hooks
from ctj_trainer.recipe import Recipe, collate

PURE = Rule(check="offload", name="graphs hold only computation")
FAILED = Rule(check="check", name="the check itself could run")
_STEPS = 4  # batches looked at per rank
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How the model will be trained, as far as checks depend on it."""

    precision: Precision = Precision.FP32
    dynamic: Dynamic = Dynamic.AUTO
    world_size: int = 2
    micro_batch_size: int = 2
    global_batch_size: int = 8
    seed: int = 0
    strategies: frozenset[Strategy] = frozenset(Strategy)


def check_recipe(recipe: Recipe, setting: Setting) -> list[Finding]:
    """Run every check on a recipe's model. A check that fails to run says so and does not end the others."""
    trial = Trial.of_recipe(recipe, batch_size=setting.micro_batch_size)
    return list(_collected([*_model_checks(trial, setting), lambda: check_shapes(recipe, setting)]))


def check_script(path: Path) -> list[Finding]:
    """Read a script and the forward methods in it; it is never run."""
    script = script_source(path)
    forwards = list(functions_in(script))
    return [
        *script_rules.check_script(script),
        *control_flow.check_control_flow(forwards),
        *topology.check_topology(forwards),
        *amp_source.check_autocast([script]),
    ]


def check_graphs(trial: Trial) -> list[Finding]:
    """Capture the blocks around their hooks and look into the graphs."""
    log = GraphLog()
    model = trial.build()
    OffloadHooks.of(model).exclude_all()
    torch._dynamo.reset()
    forms = [compile_around_hooks(block, lambda: {"backend": log}) for block in (trial.blocks(model) or [model])]
    with torch.no_grad():
        trial.call(model)
    torch._dynamo.reset()
    lost = [name for form in forms for name in form.uncompiled]
    failures = [
        PURE.fails(evidence=problem, remedy="move it out of forward, or exclude what does it with no_compile")
        for problem in log.problems()[:4]
    ]
    if lost:
        failures.append(
            PURE.fails(
                lost[0],
                evidence="0 graphs: its forward was replaced by a hook that hides the original",
                remedy="attach the hook so that it keeps the original forward (accelerate's _old_forward does)",
            )
        )
    return PURE.judge(failures, looked_at=f"{len(log.graphs)} graphs of {len(forms)} regions")


def check_shapes(recipe: Recipe, setting: Setting) -> list[Finding]:
    """Look at the first batches that each rank would get."""
    size = len(recipe.samples)
    dealing = Dealing(
        num_samples=size, batch_size=setting.global_batch_size, world_size=setting.world_size, split_batches=True
    )
    ranks = [list(islice(_batches(recipe, setting, rank), _STEPS)) for rank in range(setting.world_size)]
    dynamic = {Dynamic.AUTO: None, Dynamic.STATIC: False, Dynamic.DYNAMIC: True}[setting.dynamic]
    return [*judge_shapes(ranks, dynamic=dynamic), *judge_split(dealing)]


def _model_checks(trial: Trial, setting: Setting) -> list[Callable[[], list[Finding]]]:
    model = trial.build()
    sources = forward_sources(model)
    dtype = _DTYPES.get(setting.precision, torch.float32)
    checks: list[Callable[[], list[Finding]]] = [
        lambda: control_flow.check_control_flow(sources),
        lambda: topology.check_topology(sources),
        lambda: topology.check_names(trial.build, trial.call),
        lambda: boundary.check_boundary(trial),
        lambda: amp_source.check_autocast(sources, compute_dtype=dtype),
        lambda: amp_source.check_stored_dtypes(model),
        lambda: consistency.check_consistency(trial),
        lambda: parity.check_memory_budget(trial),
        lambda: check_hooks(model),
        lambda: check_graphs(trial),
    ]
    if setting.precision is not Precision.FP32:
        checks.append(lambda: parity.check_gradients(trial, autocast=dtype))
    if Strategy.DDP in setting.strategies:
        checks.append(lambda: check_ddp([trial]))
    if Strategy.FSDP in setting.strategies:
        checks.append(lambda: check_fsdp(trial, shard(trial.blocks)))
    return checks


def _collected(checks: list[Callable[[], list[Finding]]]) -> Iterator[Finding]:
    for check in checks:
        try:
            yield from check()
        except Exception as error:
            place = boundary.own_line(error)
            yield FAILED.fails(
                location=place,
                evidence=f"{type(error).__name__}: {boundary.first_line(error)}",
                remedy="the model does not run on this batch; see the line",
            )


def _batches(recipe: Recipe, setting: Setting, rank: int) -> Iterator[Signature]:
    order = SampleOrder(num_samples=len(recipe.samples), global_batch_size=setting.global_batch_size, seed=setting.seed)
    for step in range(1, _STEPS + 1):
        shares = micro_batches(
            order.of_step(step), rank=rank, world_size=setting.world_size, micro_batch_size=setting.micro_batch_size
        )
        for share in shares:
            yield signature(collate(recipe.samples, share))
