"""How do tests run the operator?"""

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster import process
from tests.cluster.cluster import Cluster

CLAIM = "checkpoints"
"""PersistentVolumeClaim of jobs that name none."""


@dataclass
class Operator:
    """One operator process that looks after one namespace; may be killed and started again at will."""

    cluster: Cluster
    namespace: str
    kubeconfig: Path
    running: "subprocess.Popen[bytes] | None" = field(default=None, init=False)

    def start(self, *flags: str) -> None:
        """Start it; returns at once."""
        assert self.running is None
        arguments = [
            *("--kubeconfig", str(self.kubeconfig)),
            *("--namespace", self.namespace),
            *("--default-image", "local/trainer"),
            *("--checkpoint-claim", CLAIM),
            *("--lease-namespace", self.namespace),
            *("--lease-seconds", "2"),
            *("--metrics-port", "0"),
            *("--scrape-seconds", "1"),
        ]
        self.running = process.start(
            f"operator-{self.namespace}",
            [sys.executable, "-m", "ctj_operator.cluster", *arguments, *flags],
            directory=self.cluster.plane.directory,
        )

    def stop(self) -> int:
        """End it politely and return its exit status."""
        assert self.running is not None
        running, self.running = self.running, None
        return process.stop(running, grace_seconds=30)

    def kill(self) -> None:
        """End it in the middle of whatever it is doing."""
        assert self.running is not None
        self.running.kill()
        self.running.wait()
        self.running = None

    @property
    def log(self) -> str:
        """Everything it has said, over all its lives."""
        return (self.cluster.plane.directory / "log" / f"operator-{self.namespace}.log").read_text()
