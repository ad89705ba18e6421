"""The FSDP contract: every parameter is managed, gathered when it is used, and sharded again afterwards.

Judged at the first forward and at the gradient sync, on a world of one if there is no other.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from ctj_trainer.checks.boundary import first_line, own_line
from ctj_trainer.checks.finding import Finding, Rule
from ctj_trainer.checks.group import alone
from ctj_trainer.checks.trial import Trial

MANAGED = Rule(check="fsdp", name="every parameter is managed by FSDP")
GATHERED = Rule(check="fsdp", name="every parameter is whole when its module runs")
RESHARDED = Rule(check="fsdp", name="parameters are sharded again after use")
SYNCHRONISED = Rule(check="fsdp", name="gradients are sharded after the backward")

Layout = Callable[[nn.Module], object]


def shard(blocks: Callable[[nn.Module], list[nn.Module]]) -> Layout:
    """Return the trainer's own layout: one unit per block, and the root."""

    def layout(model: nn.Module) -> None:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for unit in [*blocks(model), model]:
            fully_shard(unit, mesh=mesh)

    return layout


def check_fsdp(trial: Trial, layout: Layout) -> list[Finding]:
    """Lay a model out and run one step."""
    with alone():
        model = trial.build()
        name = type(model).__name__  # fully_shard gives the class another one
        layout(model)
        if not any(isinstance(module, FSDPModule) for module in model.modules()):
            return [
                MANAGED.fails(evidence="nothing is sharded: no FSDP unit", remedy="call fully_shard on blocks and root")
            ]
        return [*check_managed(model), *_one_step(trial, model, name)]


def check_managed(model: nn.Module) -> list[Finding]:
    """Name every parameter that FSDP does not manage; cheap, for a laid-out model in any state."""
    failures = [
        MANAGED.fails(
            name,
            evidence=f"parameter not managed by FSDP: {name} ({parameter.numel()} elements, whole on every rank, "
            "its gradient is reduced by nobody)",
            remedy="register it before sharding, shard the root too, and list it in no ignored_params",
        )
        for name, parameter in model.named_parameters()
        if not isinstance(parameter, DTensor) and name not in _gathered_now(model)
    ]
    return MANAGED.judge(
        failures, looked_at=f"{sum(1 for _ in model.parameters())} parameters in {_num_units(model)} units"
    )


def _one_step(trial: Trial, model: nn.Module, name: str) -> list[Finding]:
    gathered: list[Finding] = []
    try:
        with _watching(model, gathered):
            loss = trial.loss(model)
    except Exception as error:
        return [
            *gathered,
            GATHERED.fails(
                name,
                location=own_line(error),
                evidence=f"{type(error).__name__}: {first_line(error)}",
                remedy="call modules, never their forward() or their weights: FSDP gathers when a unit is called",
            ),
        ]
    findings = [*GATHERED.judge(gathered, looked_at="first forward"), *_resharded(model)]
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
        findings += _synchronised(model)
    return findings


@contextmanager
def _watching(model: nn.Module, failures: list[Finding]) -> Iterator[None]:
    """Look at each module's own parameters right before it computes."""
    handles = []
    for name, module in model.named_modules():

        def look(module: nn.Module, _: object, name: str = name) -> None:
            for own, parameter in module.named_parameters(recurse=False):
                if isinstance(parameter, DTensor):
                    full = f"{name}.{own}" if name else own
                    failures.append(
                        GATHERED.fails(
                            full,
                            evidence=f"{full} is still a shard when {name or 'the model'} runs",
                            remedy="call the unit that holds it (not its forward, not a part of it from outside)",
                        )
                    )

        handles.append(module.register_forward_pre_hook(look))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _resharded(model: nn.Module) -> list[Finding]:
    """The root stays gathered between forward and backward by design; a block does not."""
    kept = [
        RESHARDED.fails(
            name,
            evidence=f"unit {name} stays whole from forward to backward",
            remedy="leave reshard_after_forward at its default for blocks",
            rewrite="fully_shard(block, mesh=mesh, reshard_after_forward=True)",
        )
        for name, unit in _units(model)
        if name and any(not isinstance(p, DTensor) for p in _own_parameters(unit))
    ]
    units = [name for name, _ in _units(model) if name]
    if not units:
        return [RESHARDED.does_not_apply(evidence="the root is the only unit: it stays gathered until its backward")]
    return RESHARDED.judge(kept, looked_at=f"{len(units)} units after forward")


def _synchronised(model: nn.Module) -> list[Finding]:
    failures = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if not isinstance(parameter, DTensor) and name in _gathered_now(model):
            failures.append(_not_synchronised(name, "is still whole after the backward"))
        elif isinstance(parameter, DTensor) and parameter.grad is None:
            failures.append(_not_synchronised(name, "has no sharded gradient: it is unused, or gradient sync is off"))
        elif isinstance(parameter, DTensor) and not isinstance(parameter.grad, DTensor):
            failures.append(_not_synchronised(name, "has a local gradient that was not reduced"))
    return SYNCHRONISED.judge(failures, looked_at="after backward")


def _not_synchronised(name: str, evidence: str) -> Finding:
    return SYNCHRONISED.fails(
        name,
        evidence=f"{name} {evidence}",
        remedy="reduce in the last micro batch (set_requires_gradient_sync(True)), and use or freeze every parameter",
    )


def _units(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            unit: nn.Module = module  # type: ignore[assignment]
            yield name, unit


def _num_units(model: nn.Module) -> int:
    return sum(1 for _ in _units(model))


def _own_parameters(unit: nn.Module) -> Iterator[nn.Parameter]:
    """Return parameters of a unit that no unit inside it holds."""
    inner = {id(p) for name, module in _units(unit) if name for p in module.parameters()}
    return (p for p in unit.parameters() if id(p) not in inner)


def _gathered_now(model: nn.Module) -> frozenset[str]:
    """Names of parameters that FSDP manages and has gathered at this moment."""
    managed: set[int] = set()
    for _, unit in _units(model):
        group = unit._get_fsdp_state()._fsdp_param_group  # type: ignore[operator]
        for held in group.fsdp_params if group else ():
            whole = getattr(held, "_unsharded_param", None)
            managed.add(id(whole))
    return frozenset(name for name, p in model.named_parameters() if id(p) in managed)
