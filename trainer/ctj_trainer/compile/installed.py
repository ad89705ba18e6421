"""Can the installed torch do what a policy asks for? Every problem at once, before anything is built or moved.

torch itself checks late and one by one: a backend at the first call, options only for inductor, and with a list of
six hundred names.
"""

import difflib
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any, get_origin

import torch

from ctj_trainer.compile.policy import DEFAULT_BACKEND, CompileConfigError, CompilePolicy

# Listed by torch in any case, but of use only with these packages.
_NEEDS_PACKAGE = {"openxla": "torch_xla", "tvm": "tvm"}
_ALSO_OPTIONS = ("guard_filter_fn",)  # taken out by torch.compile before inductor sees the rest
_GONE = {
    "aot_ts_nvfuser": "removed with nvFuser",
    "nvprims_nvfuser": "removed with nvFuser",
    "ofi": "removed; it was for inference only",
    "fx2trt": "replaced by the torch_tensorrt package; for inference only",
    "onnxrt": "removed; it was for inference only",
    "aot_torchxla_trace_once": "called openxla now",
    "torchxla_trace_once": "called openxla now; for inference only",
}
"""Names that Accelerate still offers, and what became of them (torch 2.15)."""


def check_installed(policy: CompilePolicy) -> None:
    """Refuse what this torch does not know.

    Raises:
        CompileConfigError: with everything that is wrong.
    """
    problems = problems_here(policy)
    if problems:
        raise CompileConfigError(problems)


def problems_here(policy: CompilePolicy) -> list[str]:
    """Return what of the policy does not exist in this torch on this machine; empty if it can be carried out."""
    if not policy.compiles:
        return []
    found = _backend_problems(policy)
    if policy.backend != DEFAULT_BACKEND:
        ignored = [name for name in ("mode", "options") if getattr(policy, name) is not None]
        return found + [
            f"{policy.where(name)} sets {name}, which backend {policy.backend_name} would ignore; remove it, "
            f"or use backend {DEFAULT_BACKEND}"
            for name in ignored
        ]
    return found + _mode_problems(policy) + _option_problems(policy)


def installed_backends() -> list[str]:
    """Return the backends that work here; those for debugging come last."""
    from torch._dynamo import list_backends

    everyday = [name for name in list_backends() if not _missing(name)]
    return [*everyday, *(name for name in list_backends(None) if name not in everyday and not _missing(name))]


def _backend_problems(policy: CompilePolicy) -> list[str]:
    if not isinstance(policy.backend, str) or policy.backend == DEFAULT_BACKEND:
        return []  # without the import of every other backend, seconds
    name, known = policy.backend, installed_backends()
    if name in known:
        return []
    why = _missing(name) or _GONE.get(name, "no backend of this torch")
    return [
        f"{policy.where('backend')} is {name!r}: {why}; torch {torch.__version__} has here: {', '.join(known)}"
        + _did_you_mean(name, known)
    ]


def _missing(name: str) -> str:
    """Why a backend that torch lists cannot be used here."""
    package = _NEEDS_PACKAGE.get(name)
    if package and find_spec(package) is None:
        return f"needs the package {package}, which is not installed"
    if name == "cudagraphs" and not torch.cuda.is_available():
        return "needs a CUDA device"
    return ""


def _mode_problems(policy: CompilePolicy) -> list[str]:
    from torch._inductor import list_mode_options

    known = list(list_mode_options())
    if policy.mode is None or policy.mode in known:
        return []
    return [
        f"{policy.where('mode')} is {policy.mode!r}; torch {torch.__version__} has: {', '.join(known)}"
        + _did_you_mean(policy.mode, known)
    ]


def _option_problems(policy: CompilePolicy) -> list[str]:
    from torch._inductor import list_options

    options: Mapping[str, Any] = policy.options or {}
    known = set(list_options())
    found = []
    for name, value in options.items():
        key = name.replace("-", "_")
        if key in _ALSO_OPTIONS:
            continue
        where = f"{policy.where('options')}.{name}"
        if key not in known:
            found.append(f"{where}: no option of torch {torch.__version__}{_did_you_mean(key, known)}")
        elif wrong := _wrong_type(key, value):
            found.append(f"{where} is {value!r}; must be {wrong}")
    return found


def _wrong_type(name: str, value: Any) -> str:
    """Return the type an option must have, if `value` has another; torch checks only types without parameters."""
    from torch._inductor import config

    expected = config.get_type(name)  # type: ignore[attr-defined]  # installed by torch's config machinery
    if get_origin(expected) is not None or isinstance(value, expected):
        return ""
    return str(getattr(expected, "__name__", expected))


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=2, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""
