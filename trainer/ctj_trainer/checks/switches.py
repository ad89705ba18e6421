"""Switches of the whole process that make compiled training wrong, or fail where nobody would look for them."""

from torch import nn

from ctj_api.spec import Strategy
from ctj_trainer.checks.parity import random_operations
from ctj_trainer.compile.policy import CompileConfigError

_SHARDED = {Strategy.FSDP, Strategy.ZERO3}


def refuse_compiled_autograd(strategy: Strategy) -> None:
    """Tracing the backward of a sharded model sees parameters that are not gathered: size 0, and a shape error.

    Raises:
        CompileConfigError: it is on.
    """
    import torch._dynamo.config as dynamo

    if dynamo.compiled_autograd and strategy in _SHARDED:
        raise CompileConfigError(
            [
                f"torch._dynamo.config.compiled_autograd is on: under {strategy} the traced backward sees parameters "
                "that are not gathered; turn it off (it is off by default), or use strategy single or ddp"
            ]
        )


def whole_activation_budget(model: nn.Module) -> tuple[str, ...]:
    """Reset the activation memory budget to 1.0 where random numbers are drawn; returns one line if it was lower.

    A lower one recomputes in backward, and may draw dropout's mask anew: wrong gradients, without an error.
    """
    import torch._functorch.config as functorch

    budget = functorch.activation_memory_budget
    random = random_operations(model) if budget < 1.0 else []
    if not random:
        return ()
    functorch.activation_memory_budget = 1.0
    return (
        f"activation memory budget {budget:g} set to 1.0: {random[0]} would draw again in backward; use "
        "activationCheckpointing to save memory",
    )
