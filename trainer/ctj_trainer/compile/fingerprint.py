"""Are the ranks equal in everything that compiled code depends on? Asked before anything is compiled or trained.

A pod of another image compiles other code, at another speed and with other rounding; it is found here in one line, and
not as a hang or as a loss that drifts.
"""

import platform
from collections.abc import Mapping, Sequence

from ctj_trainer.compile.errors import RanksDifferError
from ctj_trainer.compile.policy import CompilePolicy

_REMEDIES = {
    "torch": "use one image for all pods",
    "triton": "use one image for all pods",
    "python": "use one image for all pods",
    "device": "ask for one kind of device in spec.template.nodeSelector",
    "policy": "set spec.compile, and no ACCELERATE_DYNAMO_* variable that differs between pods",
    "threads": "set OMP_NUM_THREADS in spec.template.env",
}
_SETTING = "set it in the recipe the same on every rank"


def fingerprint(policy: CompilePolicy, device_type: str) -> dict[str, str]:
    """Return this process's values by name, as text."""
    import torch

    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return {
        "torch": torch.__version__,
        "triton": _triton(),
        "python": platform.python_version(),
        "device": _device(device_type),
        "policy": policy.fingerprint(),
        "threads": str(torch.get_num_threads()),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "tf32": f"matmul {matmul.allow_tf32}, cudnn {cudnn.allow_tf32}",
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "cudnn benchmark": str(cudnn.benchmark),
    }


def refuse_differences(fingerprints: Sequence[Mapping[str, str]]) -> None:
    """Compare the ranks' fingerprints, given by rank, with rank 0's.

    Raises:
        RanksDifferError: some rank differs; every field with its values and a remedy.
    """
    lines = [line for field in fingerprints[0] if (line := _difference(field, fingerprints))]
    if lines:
        raise RanksDifferError("the ranks must be equal where code is compiled: " + "; ".join(lines))


def _difference(field: str, fingerprints: Sequence[Mapping[str, str]]) -> str:
    ours = fingerprints[0][field]
    others = [(rank, values[field]) for rank, values in enumerate(fingerprints) if values[field] != ours]
    if not others:
        return ""
    rank, theirs = others[0]
    more = f" (and {len(others) - 1} more ranks differ)" if len(others) > 1 else ""
    return f"{field} is {theirs} on rank {rank}{more} and {ours} on rank 0; {_REMEDIES.get(field, _SETTING)}"


def _triton() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


def _device(device_type: str) -> str:
    import torch

    if device_type != "cuda":
        return f"{device_type} {platform.machine()}"
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} (sm_{major}{minor})"
