"""Which real Kubernetes parts do the tests run, and where do they lie?

`python tests/cluster/binaries.py` builds what is missing from the Go modules pinned beside this file and prints the
folder. Everything lands in a cache outside the tree, keyed by what determines the bytes, so a second run costs nothing.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

PINS = Path(__file__).parent / "binaries"
GO_NEEDED = (1, 26)
DISK_NEEDED_GIB = 6  # cold: modules 1.1, build cache 3.1, binaries 0.3; the rest is head-room
KUBERNETES = "1.36.3"
ETCD = "3.6.16"


class MissingTool(RuntimeError):
    """Something the machine lacks; the message says how to get it."""


@dataclass(frozen=True)
class Binary:
    """One command built from one pinned module."""

    name: str
    module: str
    package: str
    ldflags: str
    version: str


def _kubernetes(name: str) -> Binary:
    """Stamp the version: without it the server calls itself v0.0.0-master+$Format:%H$."""
    stamp = {"gitVersion": f"v{KUBERNETES}", "gitMajor": "1", "gitMinor": "36", "gitTreeState": "clean"}
    flags = " ".join(f"-X k8s.io/component-base/version.{key}={value}" for key, value in stamp.items())
    return Binary(name, "kubernetes", f"k8s.io/kubernetes/cmd/{name}", f"-s -w {flags}", KUBERNETES)


BINARIES = (
    Binary("etcd", "etcd", "go.etcd.io/etcd/server/v3", "-s -w", ETCD),
    _kubernetes("kube-apiserver"),
    _kubernetes("kube-controller-manager"),
    _kubernetes("kubectl"),
)
# The Go build cache is keyed by these: another value of either recompiles everything (10 minutes on two cores).
FLAGS = ("-trimpath", "-p", "2")
ENVIRONMENT = {"CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly"}


def folder() -> Path:
    """Where the binaries of these pins and flags lie, built or not."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "ctj" / "bin" / _key()


def _key() -> str:
    digest = hashlib.sha256()
    for part in (*FLAGS, *sorted(ENVIRONMENT.items()), *BINARIES):
        digest.update(repr(part).encode())
    for file in sorted(PINS.glob("*/go.*")):
        digest.update(file.read_bytes())
    return f"kubernetes-{KUBERNETES}-{digest.hexdigest()[:12]}"


def ensure() -> Path:
    """Build what is missing, one builder at a time, and return the folder.

    Raises:
        MissingTool: Go is missing or too old, the disk is short, or the build failed.
    """
    target = folder()
    target.mkdir(parents=True, exist_ok=True)
    with (target.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = [binary for binary in BINARIES if not (target / binary.name).exists()]
        if missing:
            _check_go()
            _check_disk(target)
        for binary in missing:
            _build(binary, target)
    return target


def _check_go() -> None:
    remedy = f"install Go >= {'.'.join(map(str, GO_NEEDED))} (https://go.dev/dl/) and put it on PATH"
    if shutil.which("go") is None:
        raise MissingTool(f"the cluster tests build etcd and Kubernetes with Go, and `go` is not on PATH: {remedy}")
    said = subprocess.run(["go", "env", "GOVERSION"], capture_output=True, text=True, check=True, cwd=PINS / "etcd")
    found = re.match(r"go(\d+)\.(\d+)", said.stdout)
    if found is None or (int(found[1]), int(found[2])) < GO_NEEDED:
        raise MissingTool(f"Go {said.stdout.strip()} is too old for Kubernetes {KUBERNETES}: {remedy}")


def _check_disk(target: Path) -> None:
    free = shutil.disk_usage(target).free / 2**30
    if free < DISK_NEEDED_GIB:
        raise MissingTool(
            f"{target} has {free:.1f} GiB free and building etcd and Kubernetes from cold takes {DISK_NEEDED_GIB}: "
            "free some, or set XDG_CACHE_HOME, GOCACHE and GOMODCACHE to a larger disk"
        )


def _build(binary: Binary, target: Path) -> None:
    """Compile to a temporary name and rename: an interrupted build leaves no half binary."""
    partial = target / f".{binary.name}.partial"
    command = ["go", "build", "-v", *FLAGS, "-ldflags", binary.ldflags, "-o", str(partial), binary.package]
    started = time.monotonic()
    process = subprocess.Popen(
        command, cwd=PINS / binary.module, env=os.environ | ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    problems = _follow(process, f"building {binary.name} {binary.version}", started)
    if process.wait() != 0:
        raise MissingTool(f"`{' '.join(command)}` in {PINS / binary.module} failed:\n" + "\n".join(problems[-15:]))
    partial.rename(target / binary.name)
    _say(f"built {binary.name} {binary.version} in {time.monotonic() - started:.0f} s")


def _follow(process: "subprocess.Popen[str]", what: str, started: float) -> list[str]:
    """Count finished packages aloud (each second on a terminal, else each half minute); return everything else."""
    assert process.stderr is not None
    pause = 1.0 if sys.stderr.isatty() else 30.0
    packages, problems, spoken = 0, [], started
    _say(f"{what} (once per machine; some minutes if nothing is cached)")
    for line in process.stderr:
        if re.fullmatch(r"[\w./~-]+(\s+\(cached\))?", line.strip()):
            packages += 1
        elif not line.startswith("go: downloading"):
            problems.append(line.rstrip())
        if time.monotonic() - spoken > pause:
            spoken = time.monotonic()
            _say(f"{what}: {packages} packages, {spoken - started:.0f} s")
    return problems


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="" if text.startswith("building") else "\n", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        print(ensure())
    except MissingTool as problem:
        sys.exit(f"tests/cluster/binaries.py: {problem}")
