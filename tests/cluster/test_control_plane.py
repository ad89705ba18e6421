"""The control plane leaves nothing behind, however its user ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.cluster.cluster import wait_until

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def living(directory: Path) -> list[str]:
    """Name the processes with a pid file that are still there."""
    names = []
    for file in sorted((directory / "pid").glob("*")):
        pid = int(file.read_text().split()[0])
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            names.append(file.name)
    return names


def test_it_dies_with_a_killed_test_run(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from tests.cluster import control_plane\n"
        "control_plane.start(Path(sys.argv[1])); print('up', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=ENVIRONMENT, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"up\n"
        assert living(tmp_path) == ["etcd", "kube-apiserver", "kube-controller-manager"]
        os.kill(run.pid, signal.SIGKILL)
    wait_until("the end of all", lambda: not living(tmp_path), seconds=5)


def test_it_can_be_started_and_stopped_by_hand(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.cluster.control_plane"]
    subprocess.run([*command, "up", str(tmp_path)], env=ENVIRONMENT, check=True, capture_output=True)
    try:
        assert living(tmp_path) == ["etcd", "kube-apiserver", "kube-controller-manager", "kubelet"]
    finally:
        subprocess.run([*command, "down", str(tmp_path)], env=ENVIRONMENT, check=True)
    assert living(tmp_path) == []
