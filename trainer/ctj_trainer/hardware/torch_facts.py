"""What does the installed torch know? Its inductor options, modes, backends: facts for `resolve.py`, which is pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TorchFacts:
    """Names that torch.compile accepts."""

    version: str
    options: Mapping[str, str]
    """Every inductor option and the type it wants (bool, int, ...); empty where any will do."""
    modes: Mapping[str, Mapping[str, Any]]
    backends: tuple[str, ...]


def read_torch_facts() -> TorchFacts:
    """Ask torch. Imports inductor's configuration, no compiler."""
    import torch
    import torch._inductor as inductor
    from torch._dynamo import list_backends

    modes: Any = inductor.list_mode_options()
    return TorchFacts(
        version=torch.__version__,
        options={name: _wanted_type(name) for name in inductor.list_options()},
        modes=modes,
        backends=tuple(list_backends(None)),
    )


def _wanted_type(name: str) -> str:
    """torch compares with the type of the default and accepts what is an instance of it; generics it does not check."""
    from torch._inductor import config

    try:
        wanted: Any = config.get_type(name)  # type: ignore[attr-defined]  # added by install_config_module
    except (AttributeError, KeyError):
        return ""
    return wanted.__name__ if wanted in {bool, int, float, str} else ""
