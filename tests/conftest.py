"""The real API server that the contract and the cluster tests share: started once, on first use."""

import secrets
from collections.abc import Iterator

import pytest
from tests.cluster import binaries, control_plane
from tests.cluster.control_plane import ControlPlane


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build etcd and Kubernetes before the first test, where no test's time limit runs yet."""
    if session.config.option.collectonly:
        return
    if any("api_server" in getattr(item, "fixturenames", ()) for item in session.items):
        try:
            binaries.ensure()
        except binaries.MissingTool as problem:
            pytest.exit(str(problem), returncode=4)


@pytest.fixture(scope="session")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """Return a running API server and controller manager, with the CRD installed if it is in the tree."""
    with control_plane.running(tmp_path_factory.mktemp("control-plane")) as plane:
        yield plane


@pytest.fixture(scope="session")
def crd_installed(api_server: ControlPlane) -> ControlPlane:
    """Return the API server once it serves CompiledTrainingJobs."""
    api_server.kubectl("apply", "-f", str(control_plane.CRD))
    api_server.kubectl("wait", "--for=condition=Established", "--timeout=30s", "-f", str(control_plane.CRD))
    return api_server


@pytest.fixture
def namespace(api_server: ControlPlane) -> Iterator[str]:
    """Return a fresh namespace; whatever is in it goes at the end of the test, processes of pods included."""
    name = f"test-{secrets.token_hex(4)}"
    api_server.kubectl("create", "namespace", name)
    yield name
    api_server.kubectl("delete", "namespace", name, "--wait=false")
    api_server.kubectl("-n", name, "delete", "pods", "--all", "--force", "--grace-period=0", "--wait=false")
