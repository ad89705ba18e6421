"""Where does compiled code lie on this node, and is what lies there whole? No torch: asked before anything starts."""

import hashlib
import importlib.metadata
import os
import platform
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from ctj_api import names

ENV_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
LEAST_FREE_BYTES = 64 * 2**20
"""A compilation that runs out of space fails, and costs the speed-up of a whole attempt."""
_SETTLED_SECONDS = 10.0  # a younger library may still be written by the linker of another job
_GPU_FOLDER = Path("/proc/driver/nvidia/gpus")


def prepare_compile_cache(cache_dir: Path) -> tuple[Path, str | None]:
    """Return the folder of compiled code for this torch, Python and hardware, and a notice if it is a throw-away one.

    The content is hashed by Inductor, so stages and jobs share it; what cannot run here must not be found here.
    """
    folder = cache_dir / cache_key()
    problem = _problem(folder)
    if not problem:
        remove_damaged(folder)
        return folder, None
    spare = throw_away_folder()
    return spare, (
        f"{names.ENV_CACHE_DIR} {cache_dir} cannot be used ({problem}): compiled code is kept in {spare} for this "
        "attempt only; every attempt compiles again until the folder can be written"
    )


def throw_away_folder() -> Path:
    """Make a folder for this attempt only."""
    return Path(tempfile.mkdtemp(prefix="ctj-compile-"))


def rank_folder(folder: Path, rank: int) -> Path:
    """Where a rank's compiled code lies if it may hold collectives, and with them constants of that rank."""
    return folder / f"rank-{rank}"


def holds_collectives(options: Mapping[str, object] | None) -> bool:
    """Whether inductor's options let it move or merge collectives in graphs: then its cache key does not tell ranks
    apart, though the code does (pytorch/pytorch#188332). Strategies here keep collectives out of graphs otherwise."""
    words = ("bucket_all", "bucket_reduce", "fuse_ddp", "overlap", "micro_pipeline_tp", "aten_distributed")
    asked = {name: value for name, value in (options or {}).items() if any(word in name for word in words)}
    return any(value not in (False, None, "none", [], ()) for value in asked.values())


def wipe(folder: Path) -> None:
    """Empty the folder. Moved away first, so that nobody finds half of it; who reads at that moment compiles again."""
    old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    try:
        folder.rename(old)
        folder.mkdir(exist_ok=True)
    except OSError:
        old = folder  # a mount cannot be renamed
    shutil.rmtree(old, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)


def remove_damaged(folder: Path) -> int:
    """Delete shared libraries that are shorter than their own header says; returns how many.

    Loading one kills the process by SIGBUS, measured on torch 2.15 (other broken entries cost only a miss), and would
    do so in each attempt. They are what a full disk or a pod that was killed while it linked leaves behind.
    """
    settled = time.time() - _SETTLED_SECONDS
    damaged = [path for path in folder.rglob("*.so") if _is_cut(path, written_before=settled)]
    for path in damaged:
        path.unlink(missing_ok=True)
    return len(damaged)


def cache_key() -> str:
    """Name torch, Python and the hardware without importing torch."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    versions = f"torch-{_version('torch')}-triton-{_version('triton')}-py{python}"
    return f"{versions}-{platform.machine()}-{_device_name()}"[:255]


def _problem(folder: Path) -> str:
    """Why nothing can be written there; empty if it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return error.strerror or str(error)
    return "" if free >= LEAST_FREE_BYTES else f"{free / 2**20:.0f} MiB free, {LEAST_FREE_BYTES / 2**20:.0f} needed"


def _is_cut(path: Path, *, written_before: float) -> bool:
    try:
        status = path.stat()
        with path.open("rb") as file:
            header = file.read(64)
    except OSError:
        return False
    if status.st_mtime > written_before or sys.byteorder != "little":
        return False
    if len(header) < 64 or header[:5] != b"\x7fELF\x02":  # 64 bit
        return True
    sections_at = int(struct.unpack_from("<Q", header, 0x28)[0])
    size, count = struct.unpack_from("<HH", header, 0x3A)
    return bool(status.st_size < sections_at + size * count)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _device_name() -> str:
    models = set()
    for information in _GPU_FOLDER.glob("*/information"):
        lines = information.read_text().splitlines()
        models |= {line.partition(":")[2].strip() for line in lines if line.startswith("Model")}
    if models:
        return "-".join(sorted(models)).replace(" ", "_")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "cpu"
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return "cpu-" + hashlib.sha256(" ".join(sorted(flags.split())).encode()).hexdigest()[:8]
