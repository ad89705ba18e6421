"""Is this machine ready to compile and to communicate? Tools, cache folder, environment variables, versions.

Every judge takes what it looks at as an argument; `look` gathers it here. What needs a GPU is not applicable without.
"""

import importlib.metadata
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ctj_trainer.checks.finding import Finding, Rule

COMPILER = Rule(check="toolchain", name="a C++ compiler works")
TRITON = Rule(check="toolchain", name="Triton and its assembler (ptxas) fit the GPU")
CACHE = Rule(check="cache", name="the compile cache is writable, local, roomy and whole")
COMPILE_ENV = Rule(check="environment", name="no variable switches compilation off or makes it static")
NETWORK_ENV = Rule(check="environment", name="NCCL and gloo variables do not conflict")
VERSIONS = Rule(check="versions", name="torch, accelerate and deepspeed are known to work together")

_MIN_FREE_BYTES = 512 * 1024**2  # the quickstart leaves about 300 MB of compiled code
_NETWORK_FILESYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "lustre", "gpfs", "ceph", "beegfs"}
_BLACKWELL = (10, 0)
_PTXAS_OF_BLACKWELL = (12, 8)
_TESTED = {"torch": "2.15", "accelerate": "1.15", "deepspeed": "0.19.8"}
_TRY = "int main() { return 0; }\n"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What is asked of an assembler."""

    capability: tuple[int, int]
    triton: bool
    ptxas: tuple[int, int] | None


@dataclass(frozen=True, kw_only=True)
class Folder:
    """Facts about the folder that holds compiled code."""

    path: Path
    writable: bool
    free_bytes: int
    filesystem: str = ""
    torn: tuple[str, ...] = ()
    """Shared objects that are empty or cut: loading one raises instead of compiling anew."""


def check_machine(environment: Mapping[str, str], *, cache: Path) -> list[Finding]:
    """Look at this machine and judge it."""
    interfaces = {name for _, name in socket.if_nameindex()}
    return [
        *judge_compiler(environment),
        *judge_gpu(_gpu(), environment),
        *judge_cache(look_at_folder(cache), environment),
        *judge_compile_environment(environment),
        *judge_network_environment(environment, interfaces=interfaces),
        *judge_versions(installed_versions(), python=sys.version_info[:2]),
    ]


def judge_compiler(environment: Mapping[str, str]) -> list[Finding]:
    """Compile two lines with the compiler that Inductor would take."""
    chosen = environment.get("CXX") or next((n for n in ("g++", "clang++") if shutil.which(n)), "")
    remedy = "apt install g++ (dnf install gcc-c++, xcode-select --install), or train eager"
    if not chosen or not shutil.which(chosen):
        seen = f"CXX is {chosen!r}, which is not there" if chosen else "neither g++ nor clang++ is on PATH"
        return [COMPILER.fails(evidence=seen, remedy=remedy)]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "try.cpp"
        source.write_text(_TRY, encoding="utf-8")
        command = [chosen, str(source), "-shared", "-fPIC", "-o", f"{folder}/try.so"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return [COMPILER.fails(chosen, evidence=str(error), remedy=remedy)]
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        evidence = f"exit code {done.returncode}: {said[0][:200] if said else 'nothing was said'}"
        return [COMPILER.fails(chosen, evidence=evidence, remedy=remedy)]
    return [COMPILER.holds(chosen, evidence="it built a shared object")]


def judge_gpu(gpu: Gpu | None, environment: Mapping[str, str]) -> list[Finding]:
    """Judge Triton and ptxas; a Blackwell GPU needs an assembler of CUDA 12.8."""
    if gpu is None:
        return [TRITON.does_not_apply(evidence="no CUDA device: generated code is C++")]
    if not gpu.triton:
        return [TRITON.fails(evidence="Triton is not installed", remedy="pip install triton, of torch's version")]
    if gpu.ptxas is None:
        return [TRITON.fails(evidence="no ptxas was found", remedy="reinstall triton, or set TRITON_PTXAS_PATH")]
    version = ".".join(map(str, gpu.ptxas))
    if gpu.capability >= _BLACKWELL and gpu.ptxas < _PTXAS_OF_BLACKWELL:
        return [
            TRITON.fails(
                evidence=f"ptxas {version} does not know sm_{gpu.capability[0]}{gpu.capability[1]} (needs 12.8)",
                remedy="point Triton to a newer one",
                rewrite="export TRITON_PTXAS_PATH=/usr/local/cuda/bin/ptxas",
            )
        ]
    where = environment.get("TRITON_PTXAS_PATH", "Triton's own")
    return [TRITON.holds(evidence=f"ptxas {version} ({where}) for sm_{gpu.capability[0]}{gpu.capability[1]}")]


def judge_cache(folder: Folder, environment: Mapping[str, str]) -> list[Finding]:
    """Judge the folder that compiled code is kept in."""
    where, failures = str(folder.path), []
    if (
        environment.get("TORCH_COMPILE_FORCE_DISABLE_CACHES") == "1"
        or environment.get("TORCHINDUCTOR_FX_GRAPH_CACHE") == "0"
    ):
        failures.append(
            CACHE.fails(
                where, evidence="a variable switches the cache off", remedy="unset it: every start is a cold one"
            )
        )
    if not folder.writable:
        failures.append(CACHE.fails(where, evidence="it cannot be written", remedy="name another with --cache-dir"))
    elif folder.free_bytes < _MIN_FREE_BYTES:
        free = f"{folder.free_bytes / 1024**2:.0f} MiB free, {_MIN_FREE_BYTES / 1024**2:.0f} wanted"
        failures.append(CACHE.fails(where, evidence=free, remedy="free some space, or name another with --cache-dir"))
    if folder.filesystem in _NETWORK_FILESYSTEMS:
        failures.append(
            CACHE.fails(
                where,
                evidence=f"it is on {folder.filesystem}: ranks of several nodes write the same entries",
                remedy="use a folder on the node's own disk; archives of it can be shared",
            )
        )
    if folder.torn:
        failures.append(
            CACHE.fails(
                where,
                evidence=f"{len(folder.torn)} cut files ({folder.torn[0]}): loading one raises CppCompileError",
                remedy="delete the folder; it is filled again",
                rewrite=f"rm -r {where}",
            )
        )
    return CACHE.judge(failures, looked_at=f"{where}: {folder.free_bytes / 1024**3:.1f} GiB free")


def judge_compile_environment(environment: Mapping[str, str]) -> list[Finding]:
    """Judge variables that change what torch.compile does, without a word in the log."""
    wrong = {
        ("TORCH_COMPILE_DISABLE", "1"): "nothing is compiled",
        ("TORCHDYNAMO_DISABLE", "1"): "nothing is compiled",
        ("ACCELERATE_DYNAMO_USE_DYNAMIC", "False"): "one compilation for every length (accelerate launch sets it)",
        ("TORCHDYNAMO_SUPPRESS_ERRORS", "1"): "failed compilations of your own code go unnoticed",
        ("CUDA_LAUNCH_BLOCKING", "1"): "every kernel waits: compiled code cannot be faster, CUDA graphs fail",
    }
    failures = [
        COMPILE_ENV.fails(name, evidence=f"{name}={value}: {what}", remedy="unset it", rewrite=f"unset {name}")
        for (name, value), what in wrong.items()
        if environment.get(name, "").lower() == value.lower()
    ]
    return COMPILE_ENV.judge(failures, looked_at=f"{len(wrong)} variables")


def judge_network_environment(environment: Mapping[str, str], *, interfaces: Iterable[str]) -> list[Finding]:
    """Judge variables of NCCL and gloo: what conflicts, what is gone, what costs."""
    there = set(interfaces)
    failures = []

    def fails(name: str, what: str, remedy: str) -> None:
        failures.append(NETWORK_ENV.fails(name, evidence=f"{name}={environment[name]}: {what}", remedy=remedy))

    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        chosen = [
            part.lstrip("=") for part in environment.get(name, "").split(",") if part and not part.startswith("^")
        ]
        unknown = [part for part in chosen if not any(i == part or i.startswith(part) for i in there)]
        if unknown:
            fails(name, f"no interface {unknown[0]} here (there: {', '.join(sorted(there))})", "name one, or unset it")
    for old in ("NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT"):
        if old in environment:
            fails(old, "torch reads TORCH_" + old, f"rename it to TORCH_{old}")
    if environment.get("TORCH_NCCL_BLOCKING_WAIT") == "1" and environment.get(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING", ""
    ) not in ("", "0"):
        fails("TORCH_NCCL_BLOCKING_WAIT", "it excludes TORCH_NCCL_ASYNC_ERROR_HANDLING", "unset one of the two")
    if environment.get("NCCL_P2P_DISABLE") == "1":
        fails("NCCL_P2P_DISABLE", "GPUs talk through host memory (41 % slower in the published figures)", "unset it")
    if environment.get("NCCL_GRAPH_REGISTER") == "1":
        fails("NCCL_GRAPH_REGISTER", "fails inside CUDA graphs (pytorch#158029)", "set it to 0")
    return NETWORK_ENV.judge(failures, looked_at=f"interfaces {', '.join(sorted(there))}")


def judge_versions(installed: Mapping[str, str], *, python: tuple[int, int]) -> list[Finding]:
    """Judge versions: what is tested, and what is known not to work."""
    failures = [
        VERSIONS.fails(name, evidence=f"{name} {installed[name]}: {what}", remedy=f"pip install '{name}>={first}'")
        for name, first, what in (
            ("torch", "2.13", "no recompile limit per region, and a backward that fails to compile cannot be survived"),
            ("accelerate", "1.10", "offload hooks are traced (accelerate#3885)"),
            ("accelerate", "1.15", "regional compilation runs the uncompiled model under mixed precision (#4188)"),
            ("deepspeed", "0.14.4", "the engine does not compile"),
        )
        if name in installed and _number(installed[name]) < _number(first)
    ]
    if python >= (3, 15):
        failures.append(
            VERSIONS.fails("Python", evidence="torch.compile refuses 3.15", remedy="use Python 3.11 to 3.14")
        )
    untested = [f"{n} {v}" for n, v in installed.items() if n in _TESTED and not v.startswith(_TESTED[n])]
    known = "the combination that is tested" if not untested else f"not tested together: {', '.join(untested)}"
    return VERSIONS.judge(failures, looked_at=f"{', '.join(f'{n} {v}' for n, v in installed.items())}: {known}")


def look_at_folder(path: Path) -> Folder:
    """Gather the facts of a cache folder; it is not created."""
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    torn = [p.name for p in list(path.rglob("*.so"))[:1000] if not _is_whole(p)] if path.exists() else []
    return Folder(
        path=path,
        writable=os.access(existing, os.W_OK | os.X_OK),
        free_bytes=shutil.disk_usage(existing).free,
        filesystem=_filesystem(existing),
        torn=tuple(sorted(torn)),
    )


def installed_versions() -> dict[str, str]:
    """Return versions of what trains, read without importing it."""
    found = {}
    for name in ("torch", "accelerate", "deepspeed", "transformers", "triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _gpu() -> Gpu | None:
    import torch

    if not torch.cuda.is_available() or torch.version.hip:
        return None
    has_triton = importlib.util.find_spec("triton") is not None
    return Gpu(capability=torch.cuda.get_device_capability(), triton=has_triton, ptxas=_ptxas())


def _ptxas() -> tuple[int, int] | None:
    """Ask the assembler that Triton would call for its version."""
    import re

    spec = importlib.util.find_spec("triton")
    bundled = Path(spec.origin).parent / "backends/nvidia/bin/ptxas" if spec and spec.origin else None
    chosen = os.environ.get("TRITON_PTXAS_PATH") or (str(bundled) if bundled and bundled.exists() else "ptxas")
    try:
        said = subprocess.run([chosen, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    except OSError:
        return None
    found = re.search(r"release (\d+)\.(\d+)", said)
    return (int(found[1]), int(found[2])) if found else None


def _filesystem(path: Path) -> str:
    """Return the kind of the mount that holds a path, from /proc/mounts; empty where there is none."""
    try:
        lines = Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    mounts = [(fields[1], fields[2]) for line in lines if len(fields := line.split()) > 2]
    holding = [mount for mount in mounts if path.absolute().is_relative_to(mount[0])]
    return max(holding, key=lambda mount: len(mount[0]), default=("", ""))[1]


def _is_whole(path: Path) -> bool:
    """Tell whether an ELF file reaches its section headers, which lie at its end."""
    with path.open("rb") as file:
        head = file.read(64)
    if len(head) < 64 or head[:4] != b"\x7fELF":
        return not head.startswith(b"\x7fELF") and len(head) == 64
    ends_at = int.from_bytes(head[40:48], "little")
    return path.stat().st_size >= ends_at


def _number(version: str) -> tuple[int, ...]:
    import re

    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
