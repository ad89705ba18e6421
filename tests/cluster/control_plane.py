"""What is the Kubernetes that the tests talk to? etcd, kube-apiserver and kube-controller-manager, on loopback.

Real processes with all their state in one folder. No node, scheduler or network: `kubelet.py` stands in for those.
By hand: `python -m tests.cluster.control_plane up DIR` and `... down DIR`.
"""

import contextlib
import json
import os
import secrets
import shutil
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tests.cluster import binaries, process

ROOT = Path(__file__).parents[2]
CRD = ROOT / "crds" / "compiledtrainingjobs.yaml"
# Only what a job's life needs. No node-lifecycle: the stand-in's node never renews a lease and must not be evicted.
CONTROLLERS = (
    "job-controller",
    "garbage-collector-controller",
    "ttl-after-finished-controller",
    "serviceaccount-controller",
    "namespace-controller",
)
AUDIT_POLICY = {  # every write, by whom and with which answer: tests count conflicts and duplicates in it
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "None", "verbs": ["get", "list", "watch"]}, {"level": "Metadata"}],
}


@dataclass
class ControlPlane:
    """A running API server and how to reach it."""

    directory: Path
    bin: Path
    url: str
    kubeconfig: Path
    processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        """Run kubectl as the administrator and return what it printed.

        Raises:
            RuntimeError: it failed and `check` is set; the message is what kubectl said.
        """
        done = self.try_kubectl(*arguments, stdin=stdin)
        if check and done.returncode != 0:
            raise RuntimeError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def try_kubectl(self, *arguments: str, stdin: str | None = None) -> "subprocess.CompletedProcess[str]":
        """Run kubectl where a refusal is an answer too."""
        command = [str(self.bin / "kubectl"), "--kubeconfig", str(self.kubeconfig), *arguments]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, check=False)

    def read(self, path: str, **query: str) -> Any:
        """Return an object or a list by its path in the API; 5 ms, where kubectl takes 100 of the trainers' time.

        Raises:
            urllib.error.HTTPError: the API server refuses or has nothing there.
        """
        login = json.loads(self.kubeconfig.read_text())
        trust = ssl.create_default_context(cafile=login["clusters"][0]["cluster"]["certificate-authority"])
        headers = {"Authorization": f"Bearer {login['users'][0]['user']['token']}"}
        request = urllib.request.Request(f"{self.url}{path}?{urlencode(query)}", headers=headers)
        with urllib.request.urlopen(request, context=trust, timeout=30) as answer:
            return json.load(answer)

    def apply(self, *documents: dict[str, Any]) -> None:
        """Apply objects given as values."""
        self.kubectl("apply", "-f", "-", stdin="\n---\n".join(json.dumps(document) for document in documents))

    def audit(self) -> Iterator[dict[str, Any]]:
        """Every write so far, oldest first."""
        with (self.directory / "audit.log").open() as log:
            yield from (json.loads(line) for line in log)


def start(directory: Path, *, lasting: bool = False) -> ControlPlane:
    """Start everything, install the CRD, and return once a namespace can be used."""
    directory.mkdir(parents=True, exist_ok=True)
    found = binaries.ensure()
    client, peer, api = free_ports(3)
    tokens = {"admin": secrets.token_hex(16), "controller-manager": secrets.token_hex(16)}
    _write_credentials(directory, tokens)
    url = f"https://127.0.0.1:{api}"
    for user, token in tokens.items():
        write_kubeconfig(directory / f"{user}.kubeconfig", url=url, authority=directory / "api.crt", token=token)
    plane = ControlPlane(directory, found, url, directory / "admin.kubeconfig")

    def run(name: str, *flags: str) -> None:
        plane.processes.append(process.start(name, [str(found / name), *flags], directory=directory, lasting=lasting))

    try:
        run("etcd", *_etcd_flags(directory, client=client, peer=peer))
        run("kube-apiserver", *_api_flags(directory, etcd=client, port=api))
        _wait(plane, "the API server", lambda: plane.try_kubectl("get", "--raw", "/readyz").returncode == 0)
        if CRD.exists():  # before the garbage collector starts, which looks for new kinds only every 30 s
            plane.kubectl("apply", "-f", str(CRD))
        run("kube-controller-manager", *_controller_flags(directory))
        _wait(plane, "service accounts", lambda: plane.try_kubectl("get", "sa", "default").returncode == 0)
    except BaseException:
        stop(plane)
        raise
    return plane


def start_node(plane: ControlPlane, *, lasting: bool = False) -> Path:
    """Start the kubelet stand-in and return its folder."""
    folder = plane.directory / "node"
    flags = ["--kubeconfig", str(plane.kubeconfig), "--directory", str(folder)]
    command = [sys.executable, "-m", "tests.cluster.kubelet", *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # the current folder may be kept out by PYTHONSAFEPATH
    plane.processes.append(
        process.start("kubelet", command, directory=plane.directory, env=environment, lasting=lasting)
    )
    return folder


def stop(plane: ControlPlane) -> None:
    """End the processes in reverse order of their start."""
    for running in reversed(plane.processes):
        process.stop(running)


@contextlib.contextmanager
def running(directory: Path) -> Iterator[ControlPlane]:
    """Run a control plane for the length of a block."""
    plane = start(directory)
    try:
        yield plane
    finally:
        stop(plane)


def free_ports(count: int) -> list[int]:
    """Return loopback ports that nobody listens on now; all held until all are known, so they differ."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _write_credentials(directory: Path, tokens: dict[str, str]) -> None:
    """Write one self-signed server certificate, one service-account key, one token per user."""
    if shutil.which("openssl") is None:
        raise binaries.MissingTool("the API server needs a certificate and `openssl` is not on PATH: install openssl")
    names = "subjectAltName=IP:127.0.0.1,IP:10.96.0.1,DNS:localhost,DNS:kubernetes.default.svc"
    usage = "keyUsage=critical,digitalSignature,keyCertSign"
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", "api.key"]
    request = ["req", "-x509", *key, "-subj", "/CN=ctj-tests", "-days", "30", "-addext", names, "-addext", usage]
    for arguments in ([*request, "-out", "api.crt"], ["genrsa", "-out", "sa.key", "2048"]):
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)
    lines = [f"{token},{user},{user},system:masters" for user, token in tokens.items()]
    (directory / "tokens.csv").write_text("\n".join(lines) + "\n")
    (directory / "audit-policy.json").write_text(json.dumps(AUDIT_POLICY))


def write_kubeconfig(file: Path, *, url: str, authority: Path, token: str) -> None:
    """Write what a client needs to log in as one user."""
    cluster = {"server": url, "certificate-authority": str(authority)}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "tests",
        "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "tests", "namespace": "default"}}],
        "clusters": [{"name": "tests", "cluster": cluster}],
        "users": [{"name": "tests", "user": {"token": token}}],
    }
    file.write_text(json.dumps(config))
    file.chmod(0o600)


def _etcd_flags(directory: Path, *, client: int, peer: int) -> list[str]:
    here, to_peer = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
    return [
        f"--data-dir={directory / 'etcd'}",
        f"--listen-client-urls={here}",
        f"--advertise-client-urls={here}",
        f"--listen-peer-urls={to_peer}",
        f"--initial-advertise-peer-urls={to_peer}",
        f"--initial-cluster=default={to_peer}",
        "--unsafe-no-fsync",  # the data dies with the test
        "--log-level=warn",
    ]


def _api_flags(directory: Path, *, etcd: int, port: int) -> list[str]:
    return [
        f"--etcd-servers=http://127.0.0.1:{etcd}",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        f"--tls-cert-file={directory / 'api.crt'}",
        f"--tls-private-key-file={directory / 'api.key'}",
        f"--token-auth-file={directory / 'tokens.csv'}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={directory / 'sa.key'}",
        f"--service-account-signing-key-file={directory / 'sa.key'}",
        "--service-cluster-ip-range=10.96.0.0/16",
        "--authorization-mode=RBAC",
        "--endpoint-reconciler-type=none",  # a loopback address is no valid endpoint of the `kubernetes` Service
        "--profiling=false",
        f"--audit-policy-file={directory / 'audit-policy.json'}",
        f"--audit-log-path={directory / 'audit.log'}",
    ]


def _controller_flags(directory: Path) -> list[str]:
    return [
        f"--kubeconfig={directory / 'controller-manager.kubeconfig'}",
        f"--controllers={','.join(CONTROLLERS)}",
        "--secure-port=0",
        "--leader-elect=false",
        "--kube-api-qps=200",
        "--kube-api-burst=400",
    ]


def _wait(plane: ControlPlane, what: str, ready: Callable[[], bool], *, seconds: float = 90.0) -> None:
    """Poll until ready; a process that died or the time running out ends it, with the logs' last lines."""
    deadline = time.monotonic() + seconds
    while not ready():
        dead = [running for running in plane.processes if running.poll() is not None]
        if dead or time.monotonic() > deadline:
            raise RuntimeError(f"{what} not ready in {plane.directory}:\n{_last_lines(plane.directory / 'log')}")
        time.sleep(0.1)


def _last_lines(logs: Path, count: int = 8) -> str:
    tails = (
        f"== {log.name}\n" + "\n".join(log.read_text().splitlines()[-count:]) for log in sorted(logs.glob("*.log"))
    )
    return "\n".join(tails)


def _up(directory: Path) -> None:
    plane = start(directory, lasting=True)
    start_node(plane, lasting=True)
    print(f"up. export KUBECONFIG={plane.kubeconfig}; kubectl is {plane.bin / 'kubectl'}")


def _down(directory: Path) -> None:
    """Stop what `up` started, newest first."""
    for file in sorted((directory / "pid").iterdir(), key=lambda pid: pid.stat().st_mtime, reverse=True):
        process.stop_by_pid_file(file)


def main(arguments: Sequence[str]) -> None:
    """Start or stop a control plane and its node by hand."""
    verbs = {"up": _up, "down": _down}
    if len(arguments) != 2 or arguments[0] not in verbs:
        sys.exit(f"usage: python -m tests.cluster.control_plane {'|'.join(verbs)} DIR")
    verbs[arguments[0]](Path(arguments[1]).resolve())


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except binaries.MissingTool as problem:
        sys.exit(f"{problem}")
