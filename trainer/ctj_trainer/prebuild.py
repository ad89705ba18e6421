"""Build DeepSpeed's CPU communication op once, at set-up: `python -m ctj_trainer.prebuild` (1-2 minutes, needs g++).

Without it the first ZeRO-3 stage on a CPU builds it, while every process of the stage waits. One build serves every
environment of the same versions: torch itself would build again for each, since ninja sees include paths below another
site-packages, and two checkouts that share a home folder would rebuild it in turn.
"""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType

OP = "deepspeed_shm_comm"


def shared_library() -> Path:
    """Return where the op of these versions lies, for whoever needs it. Of the compiler only its C++ library matters,
    and an op that cannot be loaded here is built again.
    """
    versions = "-".join(f"{name}{importlib.metadata.version(name)}" for name in ("torch", "deepspeed"))
    python = f"py{sys.version_info.major}.{sys.version_info.minor}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cache / "torch_extensions")
    return root / f"ctj-{versions}-{python}-{platform.machine()}" / f"{OP}.so"


def hand_over() -> None:
    """Give DeepSpeed the op before it asks: the shared one, or else one that is built now, and shared from then on.

    Raises:
        RuntimeError: it can neither be loaded nor built here.
    """
    from deepspeed.ops.op_builder.builder import OpBuilder
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    loaded, builder = OpBuilder._loaded_ops, ShareMemCommBuilder()
    if OP in loaded or not builder.is_compatible():
        return
    library = shared_library()
    module = _load(library)
    if module is not None:
        loaded[OP] = module
        return
    built = builder.load(verbose=False).__file__
    if built is not None:
        _share(Path(built), library)


def _load(library: Path) -> ModuleType | None:
    import torch  # noqa: F401 - the library's symbols are in torch's

    spec = importlib.util.spec_from_file_location(OP, library)
    if not library.exists() or spec is None or spec.loader is None:
        return None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError:
        return None
    return module


def _share(built: Path, library: Path) -> None:
    """Put the whole file in place at once: others may be looking. A folder that is not ours to write is no harm."""
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=library.parent, delete=False) as draft:
            draft.write(built.read_bytes())
        os.chmod(draft.name, 0o755)
        os.replace(draft.name, library)
    except OSError as error:
        print(f"{library} cannot be written ({error.strerror}): every environment builds its own op", file=sys.stderr)


def main() -> int:
    """Build, or say what is missing."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        print(
            f"no C++ compiler ({compiler}): strategy zero3 on a CPU, and torch.compile, need one; "
            "install it (Debian: apt-get install g++ python3-dev)",
            file=sys.stderr,
        )
        return 1
    if _load(shared_library()) is not None:
        return 0
    os.environ["DS_ACCELERATOR"] = "cpu"
    hand_over()
    return 0


if __name__ == "__main__":
    sys.exit(main())
