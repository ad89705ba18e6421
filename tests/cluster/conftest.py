"""The node and what tests do to it."""

import sys
from collections.abc import Iterator

import pytest
from tests.cluster import process
from tests.cluster.cluster import Cluster
from tests.cluster.control_plane import ControlPlane
from tests.cluster.operators import Operator


@pytest.fixture(scope="session")
def cluster(crd_installed: ControlPlane) -> Iterator[Cluster]:
    """Return the API server together with one node that runs pods."""
    directory = crd_installed.directory / "node"
    command = [sys.executable, "-m", "tests.cluster.kubelet", "--kubeconfig", str(crd_installed.kubeconfig)]
    node = process.start("kubelet", [*command, "--directory", str(directory)], directory=crd_installed.directory)
    try:
        yield Cluster(plane=crd_installed, node=node, node_directory=directory)
    finally:
        process.stop(node)


@pytest.fixture
def operator(cluster: Cluster, namespace: str) -> Iterator[Operator]:
    """Return a running operator for this test's namespace alone."""
    one = Operator(cluster, namespace, cluster.plane.kubeconfig)
    one.start()
    try:
        yield one
    finally:
        if one.running is not None:
            one.stop()
