"""What hardware is really here? The thin edge: asks torch, the kernel and the vendors' tools; readers are elsewhere."""

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ctj_trainer.hardware.book import Kind
from ctj_trainer.hardware.device import Device
from ctj_trainer.hardware.tools import read_mig_slices, read_npus, read_processor
from ctj_trainer.hardware.topology import (
    Pair,
    Topology,
    read_nvidia_peers,
    read_nvidia_topology,
    read_rocm_peers,
    read_rocm_topology,
)

if TYPE_CHECKING:
    import torch

_TOOL_SECONDS = 20


@dataclass(frozen=True, kw_only=True)
class Processor:
    """The CPUs that this process may use."""

    model: str
    instructions: str
    cores: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """All devices that a job could train on here; the first decides which profile applies."""

    devices: tuple[Device, ...]
    processor: Processor
    topology: Topology
    slices: Mapping[int, tuple[str, ...]]
    notes: tuple[str, ...] = ()


def this_device(device: "torch.device") -> Device:
    """Describe the device of this rank, without starting a process."""
    import torch

    if device.type != "cuda":
        processor = _processor()
        return Device(kind=Kind.CPU, name=processor.model or platform.machine())
    facts = torch.cuda.get_device_properties(device)
    return Device(
        kind=Kind.ROCM if torch.version.hip else Kind.CUDA,
        name=facts.name,
        multiprocessors=facts.multi_processor_count,
        memory_bytes=facts.total_memory,
        capability=(facts.major, facts.minor),
    )


def detect() -> Machine:
    """Look at the whole machine."""
    import torch

    processor = _processor()
    cpu = this_device(torch.device("cpu"))
    if torch.cuda.is_available():
        devices = [this_device(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
        topology, notes = _topology(devices[0].kind, len(devices))
        slices = read_mig_slices(_said("nvidia-smi", "-L")) if devices[0].kind is Kind.CUDA else {}
    elif npus := read_npus(_said("npu-smi", "info")):
        devices = [Device(kind=Kind.NPU, name=npu.name, memory_bytes=npu.memory_bytes) for npu in npus]
        topology, slices, notes = Topology(), {}, ("this trainer runs on CUDA, ROCm and CPU; not on NPUs yet",)
    else:
        devices, topology, slices, notes = [cpu], Topology(), {}, _unused_gpus()
    return Machine(devices=tuple(devices), processor=processor, topology=topology, slices=slices, notes=notes)


def _topology(kind: Kind, count: int) -> tuple[Topology, tuple[str, ...]]:
    notes = []
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        notes.append("NCCL_P2P_DISABLE=1: peer-to-peer is switched off (published cost 41 %, not measured)")
    if kind is Kind.ROCM:
        topology = read_rocm_topology(_said("rocm-smi", "--showtopo"))
        peers = read_rocm_peers(_said("rocm-smi", "--showtopoaccess"))
    else:
        topology = read_nvidia_topology(_said("nvidia-smi", "topo", "-m"))
        peers = read_nvidia_peers(_said("nvidia-smi", "topo", "-p2p", "r"))
    return replace(topology, peers=peers or _peers(count)), tuple(notes)


def _peers(count: int) -> dict[Pair, bool]:
    """Ask torch, where the tool is not in the image."""
    import torch

    pairs = [(low, high) for low in range(count) for high in range(low + 1, count)]
    return {(low, high): torch.cuda.can_device_access_peer(low, high) for low, high in pairs}


def _unused_gpus() -> tuple[str, ...]:
    """A GPU that torch does not see is the likeliest surprise on a machine that trains on its CPU."""
    import torch

    listed = [line for line in _said("nvidia-smi", "-L").splitlines() if line.startswith("GPU ")]
    if not listed:
        return ()
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return (f"nvidia-smi lists {len(listed)} GPUs, but torch {torch.__version__} ({built}) sees none",)


def _processor() -> Processor:
    try:
        model, instructions = read_processor(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        model, instructions = platform.processor(), ""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Processor(model=model or platform.machine(), instructions=instructions, cores=cores)


def _said(*command: str) -> str:
    """Return what a tool prints; nothing where it is not there, fails or hangs."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_SECONDS, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
