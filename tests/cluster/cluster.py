"""What can a test see of the cluster and do to it?"""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tests.cluster.control_plane import ControlPlane

Answer = TypeVar("Answer")


def wait_until(what: str, ask: Callable[[], Answer], *, seconds: float = 30.0, every: float = 0.1) -> Answer:
    """Ask until the answer is truthy, and return it.

    Raises:
        AssertionError: the time is over; names what was waited for and the last answer.
    """
    deadline = time.monotonic() + seconds
    while not (answer := ask()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s; last answer {answer!r}"
        time.sleep(every)
    return answer


def oldest_first(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort by creation; names tell those of one second apart."""
    return sorted(documents, key=lambda one: (one["metadata"]["creationTimestamp"], one["metadata"]["name"]))


@dataclass(frozen=True)
class Cluster:
    """An API server with one node."""

    plane: ControlPlane
    node_directory: Path

    def pod_folder(self, namespace: str, pod: str) -> Path:
        """Where the pod's log, pid and volumes lie."""
        return self.node_directory / "pods" / f"{namespace}_{pod}"

    def claim_folder(self, namespace: str, claim: str) -> Path:
        """Where the files of a PersistentVolumeClaim lie."""
        return self.node_directory / "claims" / namespace / claim

    def pods(self, namespace: str, selector: str = "") -> list[dict[str, Any]]:
        """Return the namespace's pods, oldest first."""
        found = self.plane.read(f"/api/v1/namespaces/{namespace}/pods", labelSelector=selector)
        return oldest_first(found["items"])

    def kill_pod_process(self, namespace: str, pod: str) -> None:
        """Kill the first process of a pod, as the kernel's out-of-memory killer might."""
        os.kill(int((self.pod_folder(namespace, pod) / "pid").read_text()), signal.SIGKILL)

    def evict(self, namespace: str, pod: str) -> None:
        """Evict as a node drain does; the API server itself marks the pod with DisruptionTarget."""
        eviction = f'{{"apiVersion":"policy/v1","kind":"Eviction","metadata":{{"name":"{pod}"}}}}'
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
        self.plane.kubectl("create", "--raw", path, "-f", "-", stdin=eviction)
