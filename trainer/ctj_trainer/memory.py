"""How much memory does this process use, what was its peak, and how much may it use?

On an accelerator: of the device, by torch's allocator. On CPU: resident pages of the process against its share of the
tightest control group limit (v2 or v1) or of the machine. `memory_prediction.py` says what to expect beforehand.
"""

import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LIMIT_SECONDS = 10.0
_UNLIMITED = 1 << 60  # v1 writes "no limit" as a number near 2**63
_CGROUP_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes of one process; `limit` is None where the system does not tell."""

    used: int
    peak: int
    limit: int | None
    recent_peak: int | None = None
    """Peak since `start_peak`; None where the system cannot start one anew."""

    @property
    def peak_ratio(self) -> float | None:
        """Peak over limit, what the memory gate looks at."""
        return self.peak / self.limit if self.limit else None


def memory_use(device: "torch.device | None" = None, *, local_processes: int = 1) -> MemoryUse:
    """Measure this process. `device` None or a CPU: resident memory; `local_processes` share the pod's limit.

    Pages of shared libraries count in every process, so the CPU figure errs on the high side.
    """
    limit = process_limit(device, local_processes=local_processes)
    if device is not None and device.type == "cuda":
        import torch

        # Reserved, not allocated: what the allocator holds is what nobody else on this device can have.
        used, peak = torch.cuda.memory_reserved(device), torch.cuda.max_memory_reserved(device)
        recent: int | None = torch.cuda.max_memory_allocated(device)
    else:
        used, peak = _resident_bytes(), _peak_resident_bytes()
        recent = peak if _started.is_possible else None
    return MemoryUse(used=used, peak=max(peak, _started.peak_before), limit=limit, recent_peak=recent)


class _StartedPeak:
    """What the system forgets when a peak is measured anew."""

    peak_before = 0
    is_possible = False


_started = _StartedPeak()


def start_peak(device: "torch.device | None" = None) -> None:
    """Measure `recent_peak` from here on; `peak` stays that of the whole process."""
    _started.peak_before = memory_use(device).peak
    if device is not None and device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: resets the peak and nothing else
    except OSError:
        return
    _started.is_possible = True


def process_limit(device: "torch.device | None", *, local_processes: int) -> int | None:
    """Bytes one process may use: a whole accelerator, or its share of the pod's or machine's memory."""
    if device is not None and device.type == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(device).total_memory)
    limit = _recent_pod_limit(int(time.monotonic() // LIMIT_SECONDS))
    return limit // local_processes if limit else None


@lru_cache(maxsize=1)
def _recent_pod_limit(_: int) -> int | None:
    """Read the limit once in `LIMIT_SECONDS`: eight files, and a pod is resized in place once in its life if at all."""
    return pod_memory_limit()


def pod_memory_limit(*, cgroup: Path = Path("/proc/self/cgroup"), root: Path = _CGROUP_ROOT) -> int | None:
    """Return the tightest limit above this process: control group, else the machine's memory."""
    limits = [*_cgroup_limits(cgroup, root), *_machine_bytes()]
    return min(limits, default=None)


def oom_kills(*, cgroup: Path = Path("/proc/self/cgroup"), root: Path = _CGROUP_ROOT) -> int:
    """Return how often the kernel has killed for memory in this process's control group; compare two readings."""
    for base, path, name in _memory_groups(cgroup, root, v1="memory.oom_control", v2="memory.events"):
        for folder in (base / path.strip("/"), base):  # a container sees its own group at the root
            try:
                fields = dict(line.split() for line in (folder / name).read_text().splitlines())
            except (OSError, ValueError):
                continue
            return int(fields.get("oom_kill", 0))
    return 0


def _cgroup_limits(cgroup: Path, root: Path) -> list[int]:
    """Limits of this process's group and all its parents; inside a container the root folder is the pod's own group."""
    limits: list[int] = []
    for base, path, name in _memory_groups(cgroup, root, v1="memory.limit_in_bytes", v2="memory.max"):
        limits += _limits_up(base, path, name)
    return limits


def _memory_groups(cgroup: Path, root: Path, *, v1: str, v2: str) -> Iterator[tuple[Path, str, str]]:
    """Yield (mount, path of this process's group, file) of each hierarchy that knows about memory."""
    try:
        lines = cgroup.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield root / "memory", path, v1
        elif not controllers:
            yield root, path, v2


def _limits_up(base: Path, path: str, name: str) -> list[int]:
    folder = base / path.strip("/")
    limits = []
    for group in (folder, *folder.parents):
        try:
            text = (group / name).read_text().strip()
        except OSError:
            text = "max"  # a container sees only part of the path that /proc names
        if text.isdigit() and int(text) < _UNLIMITED:
            limits.append(int(text))
        if group == base:
            break
    return limits


def _machine_bytes() -> list[int]:
    try:
        return [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    except (ValueError, OSError):
        return []


def _resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return _peak_resident_bytes()
    return pages * os.sysconf("SC_PAGE_SIZE")


def _peak_resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
