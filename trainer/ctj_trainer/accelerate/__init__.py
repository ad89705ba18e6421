"""torch.compile that can be left on, for people who keep their own script, with Accelerate or without.

    policy = resolve_policy(recompile_limit=4)      # what is left open: plugin, environment, YAML, default
    model, optimizer = safe_compile_with_accelerate(accelerator, model, policy, optimizer)
    with compile_guard(policy, model, optimizer=optimizer):
        ...                                         # the training loop, as it is

`ACCELERATE_DYNAMO_BACKEND=no` switches it off without a change of code; under `accelerate launch`, which sets that
variable itself, `TORCH_COMPILE_DISABLE=1` does.
"""

from ctj_trainer.accelerate.guard import ScriptGuard, compile_guard
from ctj_trainer.accelerate.placing import apply, resolve_policy, safe_compile_with_accelerate
from ctj_trainer.compile.entry import compiled_regions, is_compiled, uncaptured
from ctj_trainer.compile.policy import CompileConfigError, CompilePolicy

__all__ = [
    "CompileConfigError",
    "CompilePolicy",
    "ScriptGuard",
    "apply",
    "compile_guard",
    "compiled_regions",
    "is_compiled",
    "resolve_policy",
    "safe_compile_with_accelerate",
    "uncaptured",
]
