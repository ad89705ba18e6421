"""What the vendors' tools print is read as it is printed; no GPU is needed to know that."""

import pytest
from tests.unit import recorded_hardware as recorded

from ctj_trainer.hardware.book import Kind, read_book
from ctj_trainer.hardware.device import Device
from ctj_trainer.hardware.tools import Npu, read_mig_slices, read_npus, read_processor
from ctj_trainer.hardware.topology import (
    Topology,
    read_nvidia_peers,
    read_nvidia_topology,
    read_rocm_peers,
    read_rocm_topology,
)


def test_nvlink_and_numa_nodes_are_read_and_network_cards_are_not_devices() -> None:
    read = read_nvidia_topology(recorded.H100_TOPOLOGY)
    assert read.links == dict.fromkeys([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)], "NV18")
    assert read.numa == {0: 0, 1: 0, 2: 1, 3: 1}
    assert read.describe() == "every pair over NVLink (NV18); 2 NUMA nodes; peer-to-peer not asked"


def test_an_older_tool_without_a_numa_column_is_read_too() -> None:
    read = read_nvidia_topology(recorded.OLD_TOPOLOGY)
    assert read.links == {(0, 1): "PIX", (0, 2): "SYS", (1, 2): "SYS"}
    assert read.numa == {}
    assert "the farthest pair over the link between NUMA nodes" in read.describe()


def test_two_sockets_are_seen_from_their_nodes() -> None:
    assert read_nvidia_topology(recorded.TWO_NODES).numa == {0: 0, 1: 2}


def test_refused_peer_access_is_told_with_its_published_cost() -> None:
    links = read_nvidia_topology(recorded.CONSUMER_TOPOLOGY).links
    peers = read_nvidia_peers(recorded.CONSUMER_PEERS)
    assert peers == {(0, 1): False}
    assert Topology(links=links, peers=peers).describe() == (
        "the farthest pair over a PCIe host bridge; peer-to-peer off everywhere (published cost 41 %, not measured)"
    )


def test_granted_peer_access_is_read() -> None:
    peers = read_nvidia_peers(recorded.OPENED_PEERS)
    assert peers == {(0, 1): True, (0, 2): True, (1, 2): True}
    assert "peer-to-peer on" in Topology(links={(0, 1): "PHB"}, peers=peers).describe()


def test_rocm_link_types_are_not_mixed_up_with_weights_and_hops() -> None:
    read = read_rocm_topology(recorded.XGMI_TOPOLOGY)
    assert read.links == {(0, 1): "XGMI", (0, 2): "XGMI", (1, 2): "XGMI"}
    assert read.numa == {0: 0, 1: 0, 2: 1}


def test_islands_are_told_by_their_farthest_pair() -> None:
    read = read_rocm_topology(recorded.ISLANDS)
    assert read.describe().startswith("some pairs over Infinity Fabric (XGMI), the farthest pair over PCIe")
    assert read_rocm_peers(recorded.NO_ACCESS) == {(0, 1): False, (0, 2): False, (1, 2): False}


def test_a_tool_that_says_nothing_or_something_else_is_no_topology() -> None:
    for text in ("", "command not found", "NVIDIA-SMI has failed because it couldn't communicate with the driver"):
        assert read_nvidia_topology(text) == Topology()
        assert read_rocm_topology(text) == Topology()
        assert read_nvidia_peers(text) == {}
        assert read_npus(text) == []
        assert read_mig_slices(text) == {}
    assert Topology().describe() == "one device"


def test_mig_slices_belong_to_their_gpu() -> None:
    assert read_mig_slices(recorded.MIG_LIST) == {0: ("3g.20gb", "1g.5gb")}


@pytest.mark.parametrize(
    ("name", "part"),
    [("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "3g.20gb"), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me", "1g.10gb+me")],
)
def test_a_slice_is_told_by_the_name_torch_gives_it(name: str, part: str) -> None:
    device = Device(kind=Kind.CUDA, name=name, multiprocessors=42)
    assert device.slice == part
    assert part in device.untuned_products()


def test_chips_of_an_npu_are_read_with_their_memory() -> None:
    assert read_npus(recorded.NPUS) == [Npu(name="910B4-1", memory_bytes=64 * 2**30)] * 2
    assert read_npus(recorded.NEWER_NPUS) == [Npu(name="Ascend910", memory_bytes=64 * 2**30)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (recorded.EPYC, ("AMD EPYC 7763", "AVX2")),
        (recorded.XEON, ("Intel(R) Xeon(R) Platinum 8462Y+", "AMX")),
        (recorded.GRACE, ("", "SVE")),
        ("", ("", "")),
    ],
)
def test_a_processor_is_known_by_its_best_instructions(text: str, expected: tuple[str, str]) -> None:
    assert read_processor(text) == expected


@pytest.mark.parametrize(
    ("kind", "name", "key"),
    [
        (Kind.CUDA, "NVIDIA A10", "a10"),
        (Kind.CUDA, "NVIDIA A10G", ""),
        (Kind.CUDA, "NVIDIA A100-SXM4-80GB", "a100"),
        (Kind.CUDA, "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "a100"),
        (Kind.CUDA, "NVIDIA H100 80GB HBM3", "h100"),
        (Kind.CUDA, "NVIDIA H200", "h200"),
        (Kind.CUDA, "NVIDIA GH200 480GB", "h200"),
        (Kind.CUDA, "NVIDIA B200", "b200"),
        (Kind.CUDA, "NVIDIA GB200", "b200"),
        (Kind.CUDA, "NVIDIA L40S", "l40s"),
        (Kind.CUDA, "NVIDIA L40", ""),
        (Kind.CUDA, "NVIDIA GeForce RTX 4090", "rtx4090"),
        (Kind.CUDA, "NVIDIA GeForce RTX 4090 D", "rtx4090"),
        (Kind.ROCM, "AMD Instinct MI300X", "mi300x"),
        (Kind.NPU, "910B4-1", "ascend910b"),
        (Kind.NPU, "Ascend910B3", "ascend910b"),
        (Kind.CPU, "AMD EPYC 7763", "cpu"),
    ],
)
def test_a_driver_s_name_finds_its_profile_and_no_neighbour_s(kind: Kind, name: str, key: str) -> None:
    assert read_book({}).entry(kind, name) == key
