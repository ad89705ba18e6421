"""The node and what tests do to it."""

from collections.abc import Iterator

import pytest
from tests.cluster import control_plane
from tests.cluster.cluster import Cluster
from tests.cluster.control_plane import ControlPlane
from tests.cluster.operators import Operator


@pytest.fixture(scope="session")
def cluster(crd_installed: ControlPlane) -> Cluster:
    """Return the API server together with one node that runs pods; both end with the session."""
    return Cluster(plane=crd_installed, node_directory=control_plane.start_node(crd_installed))


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
