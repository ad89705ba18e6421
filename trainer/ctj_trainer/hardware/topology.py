"""How are the accelerators of this machine joined? Reads what the vendors' tools print; pure, so recorded outputs do.

Published, not measured by us: sharding that ignores NUMA, PCIe and NVLink costs 22 to 58 %, peer-to-peer copies
switched off 41 %.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

Pair = tuple[int, int]
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")  # nvidia-smi underlines its header, also into a pipe
_DEVICE = re.compile(r"GPU(\d+)$")
_WORDS = {
    "PIX": "one PCIe switch",
    "PXB": "PCIe switches",
    "PHB": "a PCIe host bridge",
    "NODE": "PCIe host bridges of one NUMA node",
    "SYS": "the link between NUMA nodes",
    "PCIE": "PCIe",
    "XGMI": "Infinity Fabric (XGMI)",
}
_FAR_TO_NEAR = ("SYS", "NODE", "PHB", "PCIE", "PXB", "PIX")


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Links between devices by pair (i < j), as the tool names them, and each device's NUMA node."""

    links: Mapping[Pair, str] = field(default_factory=dict)
    numa: Mapping[int, int] = field(default_factory=dict)
    peers: Mapping[Pair, bool] = field(default_factory=dict)
    """Whether one device may read the other's memory directly; empty where nobody was asked."""

    def describe(self) -> str:
        """One line for a person."""
        if not self.links:
            return "one device"
        parts = [self._links(), *self._numa(), *self._peers()]
        return "; ".join(parts)

    def _links(self) -> str:
        kinds = set(self.links.values())
        fast = {kind for kind in kinds if is_fast(kind)}
        if fast == kinds:
            return f"every pair over {' or '.join(sorted(map(words, fast)))}"
        worst = next((kind for kind in _FAR_TO_NEAR if kind in kinds), "")
        some = f"some pairs over {' or '.join(sorted(map(words, fast)))}, " if fast else ""
        return f"{some}the farthest pair over {words(worst) or ', '.join(sorted(kinds - fast))}"

    def _numa(self) -> list[str]:
        nodes = set(self.numa.values())
        return [f"{len(nodes)} NUMA nodes"] if len(nodes) > 1 else []

    def _peers(self) -> list[str]:
        if not self.peers:
            return ["peer-to-peer not asked"]
        missing = [pair for pair, allowed in sorted(self.peers.items()) if not allowed]
        if not missing:
            return ["peer-to-peer on"]
        where = "everywhere" if len(missing) == len(self.peers) else f"for {len(missing)} of {len(self.peers)} pairs"
        return [f"peer-to-peer off {where} (published cost 41 %, not measured)"]


def is_fast(link: str) -> bool:
    """Whether a link is of its own, beside PCIe."""
    return link.startswith("NV") or link == "XGMI"


def words(link: str) -> str:
    """Return what a link's code means."""
    return f"NVLink ({link})" if link.startswith("NV") else _WORDS.get(link, link)


def read_nvidia_topology(text: str) -> Topology:
    """Read `nvidia-smi topo -m`."""
    header: list[str] = []
    links: dict[Pair, str] = {}
    numa: dict[int, int] = {}
    for cells in _cells(text):
        if not header:
            if "CPU" in cells:
                first = next((i for i, cell in enumerate(cells) if _DEVICE.match(cell)), len(cells))
                header = cells[first : cells.index("CPU")]
            continue
        row = _DEVICE.match(cells[0])
        if row is None:
            continue
        links |= dict(_row(int(row[1]), header, cells[1:]))
        rest = cells[1 + len(header) :]  # CPU affinity, NUMA affinity, the GPU's own NUMA node
        if len(rest) > 1 and rest[1].isdigit():
            numa[int(row[1])] = int(rest[1])
    return Topology(links=links, numa=numa)


def read_nvidia_peers(text: str) -> dict[Pair, bool]:
    """Read `nvidia-smi topo -p2p r`: OK, or why not."""
    return {pair: state == "OK" for pair, state in _matrix(_cells(text)).items()}


def read_rocm_topology(text: str) -> Topology:
    """Read `rocm-smi --showtopo`: the table of link types, and NUMA nodes."""
    numa = {int(m[1]): int(m[2]) for m in re.finditer(r"GPU\s?\[?(\d+)\]?\s*:.*Numa Node:\s*(\d+)", text)}
    return Topology(links=_matrix(_cells(_section(text, "Link Type between two GPUs"))), numa=numa)


def read_rocm_peers(text: str) -> dict[Pair, bool]:
    """Read `rocm-smi --showtopoaccess`: True or False."""
    return {pair: state == "True" for pair, state in _matrix(_cells(text)).items()}


def _section(text: str, title: str) -> str:
    """Return the lines of rocm-smi's output below a title, up to the next one."""
    _, _, below = text.partition(title)
    return below.partition("\n")[2].partition("===")[0]


def _matrix(lines: Iterator[list[str]]) -> dict[Pair, str]:
    header: list[str] = []
    found: dict[Pair, str] = {}
    for cells in lines:
        names = [cell for cell in cells if _DEVICE.match(cell)]
        if not header:
            if len(names) == len(cells):
                header = cells
        elif row := _DEVICE.match(cells[0]):
            found |= dict(_row(int(row[1]), header, cells[1:]))
    return found


def _row(device: int, header: list[str], cells: list[str]) -> Iterator[tuple[Pair, str]]:
    """Yield the upper half of the matrix: links go both ways."""
    for name, cell in zip(header, cells, strict=False):  # a row may be cut, or have columns of its own behind
        column = _DEVICE.match(name)
        if column is not None and int(column[1]) > device:
            yield (device, int(column[1])), cell


def _cells(text: str) -> Iterator[list[str]]:
    for line in _ESCAPES.sub("", text).splitlines():
        if cells := line.split():
            yield cells
