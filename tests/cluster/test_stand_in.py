"""The kubelet stand-in does to a Job's pods what a kubelet would: the other cluster tests rest on it."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.cluster import Cluster, wait_until

SLEEP = "import time; time.sleep(60)"


def job(name: str, code: str, **pod: Any) -> dict[str, Any]:
    """Build a one-pod Job that runs `code` in Python."""
    container = {"name": "main", "image": "none", "command": ["python", "-c", code], **pod.pop("container", {})}
    template = {
        "metadata": pod.pop("metadata", {}),
        "spec": {"restartPolicy": "Never", "containers": [container], **pod},
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {"backoffLimit": 0, "completionMode": "Indexed", "completions": 1, "template": template},
    }


def run(cluster: Cluster, namespace: str, document: dict[str, Any]) -> str:
    """Create the Job and return its pod's name once its process exists."""
    document["metadata"]["namespace"] = namespace
    cluster.plane.apply(document)
    selector = f"job-name={document['metadata']['name']}"
    (pod,) = wait_until("pod of the Job", lambda: cluster.pods(namespace, selector))
    name = pod["metadata"]["name"]
    wait_until("its process", (cluster.pod_folder(namespace, name) / "pid").exists)
    return str(name)


def wait_for_end(cluster: Cluster, namespace: str, job_name: str, condition: str) -> dict[str, Any]:
    """Wait for the Job's condition and return its pod's terminated state."""
    cluster.plane.kubectl("wait", "-n", namespace, f"--for=condition={condition}", "--timeout=30s", f"job/{job_name}")
    (pod,) = cluster.pods(namespace, f"job-name={job_name}")
    return dict(pod["status"]["containerStatuses"][0]["state"]["terminated"])


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_exit_code_and_termination_message_reach_the_pod_status(cluster: Cluster, namespace: str) -> None:
    code = "import sys; open('/dev/termination-log', 'w').write('x' * 4000); print('said'); sys.exit(14)"
    name = run(cluster, namespace, job("fails", code))
    ended = wait_for_end(cluster, namespace, "fails", "Failed")
    assert (ended["exitCode"], ended["reason"], ended["message"]) == (14, "Error", "x" * 4000)
    assert (cluster.pod_folder(namespace, name) / "log").read_text() == "said\n"


def test_a_claim_outlives_the_pod_and_an_empty_dir_does_not_leave_it(cluster: Cluster, namespace: str) -> None:
    mounts = [{"name": "claim", "mountPath": "/ckpt"}, {"name": "own", "mountPath": "/ckpt-own"}]
    volumes = [
        {"name": "claim", "persistentVolumeClaim": {"claimName": "shared"}},
        {"name": "own", "emptyDir": {}},
    ]
    code = "import os, pathlib as p; [p.Path(os.environ[k]).write_text(k) for k in ('A', 'B')]"
    env = [{"name": "A", "value": "/ckpt/a"}, {"name": "B", "value": "/ckpt-own/b"}]
    container = {"volumeMounts": mounts, "env": env}
    name = run(cluster, namespace, job("writes", code, container=container, volumes=volumes))
    wait_for_end(cluster, namespace, "writes", "Complete")
    assert (cluster.claim_folder(namespace, "shared") / "a").read_text() == "A"
    assert (cluster.pod_folder(namespace, name) / "volumes" / "own" / "b").read_text() == "B"


def test_environment_is_the_pods_own(cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    label = "metadata.labels['batch.kubernetes.io/job-completion-index']"
    env = [
        {"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": label}}},
        {"name": "TEXT", "value": "rank $(RANK) of $(NOBODY)"},
        {"name": "MASTER", "value": "net-0.ring.NS.svc:29500".replace("NS", namespace)},
    ]
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    name = run(cluster, namespace, job("net", code, container={"env": env}, subdomain="ring"))
    wait_for_end(cluster, namespace, "net", "Complete")
    seen = json.loads((cluster.pod_folder(namespace, name) / "log").read_text())
    assert seen["RANK"] == "0"
    assert seen["TEXT"] == "rank 0 of $(NOBODY)"
    assert seen["MASTER"] == "127.0.0.1:29500"
    assert "KUBECONFIG" not in seen
    assert "PYTEST_CURRENT_TEST" not in seen


def test_annotation_reaches_the_file_promptly(cluster: Cluster, namespace: str) -> None:
    items = [{"path": "control.json", "fieldRef": {"fieldPath": "metadata.annotations['x/control']"}}]
    name = run(cluster, namespace, job("waits", SLEEP, volumes=[{"name": "c", "downwardAPI": {"items": items}}]))
    file = cluster.pod_folder(namespace, name) / "volumes" / "c" / "control.json"
    assert file.read_text() == ""
    cluster.plane.kubectl("annotate", "-n", namespace, "pod", name, "x/control=stop")
    asked = time.monotonic()
    wait_until("the new value", lambda: file.read_text() == "stop", seconds=2, every=0.005)
    assert time.monotonic() - asked < 1.1  # a real kubelet's worst


def test_deletion_asks_first_and_the_object_goes_last(cluster: Cluster, namespace: str) -> None:
    code = (
        "import signal, sys, time\n"
        "def end(*_): time.sleep(0.5); open('/dev/termination-log', 'w').write('saved'); sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, end); print('ready', flush=True); time.sleep(60)"
    )
    name = run(cluster, namespace, job("polite", code))
    folder = cluster.pod_folder(namespace, name)
    wait_until("its handler", lambda: "ready" in (folder / "log").read_text())
    cluster.plane.kubectl("delete", "-n", namespace, "pod", name)
    assert (folder / "termination-message").read_text() == "saved"
    assert not alive(int((folder / "pid").read_text()))


def test_a_deaf_process_is_killed_with_its_children_after_the_grace_period(cluster: Cluster, namespace: str) -> None:
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    name = run(cluster, namespace, job("deaf", code, terminationGracePeriodSeconds=1))
    log = cluster.pod_folder(namespace, name) / "log"
    child = int(wait_until("its child", log.read_text))
    cluster.plane.kubectl("delete", "-n", namespace, "pod", name)
    wait_until("the child's end", lambda: not alive(child))


def test_a_killed_process_reads_as_137(cluster: Cluster, namespace: str) -> None:
    name = run(cluster, namespace, job("killed", SLEEP))
    cluster.kill_pod_process(namespace, name)
    assert wait_for_end(cluster, namespace, "killed", "Failed")["exitCode"] == 137


def test_an_evicted_pod_carries_the_disruption_condition(cluster: Cluster, namespace: str) -> None:
    name = run(cluster, namespace, job("evicted", SLEEP, terminationGracePeriodSeconds=1))
    cluster.evict(namespace, name)
    cluster.plane.kubectl("wait", "-n", namespace, "--for=condition=Failed", "--timeout=30s", "job/evicted")
    for pod in cluster.pods(namespace, "job-name=evicted"):  # gone already, or kept until the Job has counted it
        kinds = {condition["type"]: condition["status"] for condition in pod["status"]["conditions"]}
        assert kinds["DisruptionTarget"] == "True"


def test_a_missing_image_leaves_the_pod_pending(cluster: Cluster, namespace: str) -> None:
    document = job("no-image", SLEEP, container={"image": "test/nothing"})
    document["metadata"]["namespace"] = namespace
    cluster.plane.apply(document)

    def reason() -> str:
        for pod in cluster.pods(namespace, "job-name=no-image"):
            for status in pod["status"].get("containerStatuses", []):
                return f"{pod['status']['phase']} {status['state']['waiting']['reason']}"
        return ""

    assert wait_until("a reason", reason) == "Pending ErrImagePull"
    cluster.plane.kubectl("delete", "-n", namespace, "job", "no-image", "--timeout=10s")
    wait_until("its pod to go", lambda: not cluster.pods(namespace))
