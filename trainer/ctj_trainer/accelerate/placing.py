"""Compile what `Accelerator.prepare` returns, in the order that is right for it, and only once.

Accelerate's own compiling stays off: its plugin can carry no recompile limit and no options per region, its wrappers
put `_orig_mod.` into saved names, and what it compiles in place it does not recognise and compiles again.
"""

import inspect
import logging
import os
from pathlib import Path
from typing import Any

from torch import nn

from ctj_api.spec import Strategy
from ctj_trainer.accelerate.layout import Layout, layout_of
from ctj_trainer.compile.blocks import repeated_blocks
from ctj_trainer.compile.entry import original, unwrapped
from ctj_trainer.compile.installed import check_installed
from ctj_trainer.compile.lengths import Lengths
from ctj_trainer.compile.policy import CompilePolicy
from ctj_trainer.compile.regions import place
from ctj_trainer.compile.sources import Layer, environment_layer, plugin_layer, resolve, switched, yaml_layer
from ctj_trainer.hooks import no_compile

log = logging.getLogger("ctj")


def resolve_policy(*, plugin: Any = None, config_file: Path | str | None = None, **values: Any) -> CompilePolicy:
    """Put a policy together: `values` of the script > TorchDynamoPlugin > ACCELERATE_DYNAMO_* > YAML > default.

    Raises:
        CompileConfigError: every value that does not exist or go together, and where it was said.
    """
    policy = resolve(
        Layer.of(values, where="the script"),
        plugin_layer(plugin, os.environ) if plugin is not None else None,
        environment_layer(os.environ),
        yaml_layer(Path(config_file)) if config_file is not None else None,
        switches=os.environ,
    )
    check_installed(policy)
    return policy


def safe_compile_with_accelerate(
    accelerator: Any, model: nn.Module, policy: CompilePolicy | None = None, *others: Any
) -> Any:
    """Prepare `model`, with the optimizer and whatever else must be prepared beside it, and compile it.

    A model that is prepared already is only compiled. Without a policy the accelerator's plugin and the environment
    decide. Returns what `accelerator.prepare(model, *others)` would: the model, or a list.
    """
    policy = switched(_taken_over(accelerator, policy), os.environ)
    if not others and _is_prepared(accelerator, model):
        return apply(policy, model)
    if policy.compiles:
        model = _undone(model)
        if _is_zero3(accelerator):
            from ctj_trainer.strategies.zero3 import make_leaves

            make_leaves(model, repeated_blocks(model), device=accelerator.device)
    prepared = accelerator.prepare(model, *others)
    if not others:
        return apply(policy, prepared)
    return [apply(policy, prepared[0]), *prepared[1:]]


def apply(policy: CompilePolicy, model: nn.Module) -> nn.Module:
    """Compile a model in place, prepared or plain, and return it. Before its first forward: hooks must be final.

    What was compiled before, by prepare or by hand, is undone first; where that was the whole model, the one inside is
    returned.
    """
    policy = switched(policy, os.environ)
    _tell(*policy.lines())
    if not policy.compiles:
        return model
    check_installed(policy)
    model = _undone(model)
    layout = layout_of(model)
    _warn_of_fsdp_that_is_none(layout)
    if layout.stays_eager:
        log.warning("stays eager: %s", layout.stays_eager)
        return model
    lengths = Lengths(policy.dynamic_dims) if policy.dynamic_dims else None
    blocks = repeated_blocks(layout.inner)
    placement = place(layout.inner, blocks, policy=policy, strategy=layout.strategy, lengths=lengths)
    if lengths is not None:
        layout.inner.register_forward_pre_hook(_seeing(lengths, layout.inner), with_kwargs=True)
    _tell(str(placement), *(f"notice: {text}" for text in placement.notices))
    return model


def _taken_over(accelerator: Any, policy: CompilePolicy | None) -> CompilePolicy:
    """Switch Accelerate's own compiling off; without a policy, what its plugin asks for is done here."""
    from accelerate.utils import DynamoBackend

    plugin = accelerator.state.dynamo_plugin
    policy = policy or resolve_policy(plugin=plugin)
    if plugin.backend != DynamoBackend.NO:
        _tell(f"notice: Accelerate's own compiling (backend {plugin.backend.value.lower()}) is off: it is done here")
        plugin.backend = DynamoBackend.NO
    return policy


def _undone(model: nn.Module) -> nn.Module:
    """Take off what prepare or the script compiled, also below DDP."""
    model, undone = unwrapped(model)
    if undone:
        _tell(f"notice: came compiled ({', '.join(undone[:3])}): undone, and compiled by the policy")
    return model


def _seeing(lengths: Lengths, inner: nn.Module) -> Any:
    """Look at the tensors of each call under the names of forward's parameters."""
    signature = inspect.signature(type(inner).forward)

    @no_compile  # where the whole model is compiled, the compiler takes frames of its hooks for code to compile
    def see(_: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        lengths.see({**signature.bind_partial(inner, *inputs).arguments, **keywords})

    return see


def _is_prepared(accelerator: Any, model: nn.Module) -> bool:
    layout = layout_of(original(model))
    known = [layout_of(kept).inner for kept in accelerator._models]
    return any(layout.inner is one for one in known) or layout.strategy is not Strategy.SINGLE


def _is_zero3(accelerator: Any) -> bool:
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return plugin is not None and int(plugin.zero_stage) == 3


def _warn_of_fsdp_that_is_none(layout: Layout) -> None:
    """Accelerate makes FSDP to DDP on a CPU without a word."""
    asked = os.environ.get("ACCELERATE_USE_FSDP", "").lower() in {"true", "1"}
    if asked and layout.strategy is not Strategy.FSDP:
        log.warning("FSDP was asked for (ACCELERATE_USE_FSDP) but the model is not sharded: it is %s", layout.strategy)


def _tell(*lines: str) -> None:
    """Once per job, not per rank."""
    if os.environ.get("RANK", "0") == "0":
        log.info("%s", "\n".join(lines))
