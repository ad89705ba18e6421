"""What do the vendors' other tools, and the kernel, say about devices? Pure readers of their text."""

import re
from dataclasses import dataclass

# Best first: what torch's CPU kernels and inductor's vector code may use.
_INSTRUCTION_SETS = (
    ("amx_bf16", "AMX"),
    ("avx512_bf16", "AVX-512 with bf16"),
    ("avx512f", "AVX-512"),
    ("avx2", "AVX2"),
    ("sve", "SVE"),
    ("asimd", "NEON"),
)


@dataclass(frozen=True, kw_only=True)
class Npu:
    """One Ascend chip."""

    name: str
    memory_bytes: int | None


def read_mig_slices(text: str) -> dict[int, tuple[str, ...]]:
    """Read `nvidia-smi -L`: the MIG slices (3g.20gb) of each GPU that has any."""
    slices: dict[int, tuple[str, ...]] = {}
    gpu = -1
    for line in text.splitlines():
        if found := re.match(r"GPU (\d+):", line):
            gpu = int(found[1])
        elif found := re.match(r"\s+MIG (\S+)\s+Device", line):
            slices[gpu] = (*slices.get(gpu, ()), found[1])
    return slices


def read_npus(text: str) -> list[Npu]:
    """Read `npu-smi info`: two lines for each chip, memory in MB in the second."""
    npus: list[Npu] = []
    name = ""
    for line in text.splitlines():
        if found := re.match(r"\|\s*\d+\s+(\S*910\S*|\S*310\S*)\s*\|", line):
            name = found[1]
        elif name and (found := re.search(r"(\d+)\s*/\s*(\d+)\s*\|\s*$", line)):
            npus.append(Npu(name=name, memory_bytes=int(found[2]) * 2**20 or None))
            name = ""
    return npus


def read_processor(text: str) -> tuple[str, str]:
    """Read /proc/cpuinfo: model and the best instruction set of torch's interest; empty where not said."""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    known = set(flags[1].split()) if flags else set()
    best = next((name for flag, name in _INSTRUCTION_SETS if flag in known), "")
    return (model[1].strip() if model else ""), best
