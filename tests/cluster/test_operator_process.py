"""What an operator process costs, shows, and hands over: writes per job, metrics and probes, leadership."""

import re
import time
import urllib.error
import urllib.request
from collections import Counter

from tests.cluster.cluster import Cluster, wait_until
from tests.cluster.jobs import TrainingJob, scripted_job, submit
from tests.cluster.operators import Operator

from ctj_api import names


def own_writes(job: TrainingJob) -> Counter[str]:
    """Count what the operator wrote in the job's namespace, leases apart."""
    counted: Counter[str] = Counter()
    for entry in job.cluster.plane.audit():
        target = entry.get("objectRef", {})
        if entry.get("userAgent") == "ctj-operator" and target.get("namespace") == job.namespace:
            resource = "/".join(part for part in (target["resource"], target.get("subresource")) if part)
            counted[f"{entry['verb']} {resource} {entry['responseStatus']['code']}"] += 1
    return Counter({write: count for write, count in counted.items() if "leases" not in write})


def answer(operator: Operator, path: str) -> str:
    """Ask the operator's own port; an answer other than 200 is returned as its code."""
    ports = re.findall(r"on port (\d+)", operator.log)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{ports[-1]}{path}", timeout=5) as response:
            return str(response.read().decode())
    except urllib.error.HTTPError as error:
        return str(error.code)


def test_a_one_stage_job_costs_four_writes_and_no_conflict(
    cluster: Cluster, namespace: str, operator: Operator
) -> None:
    job = submit(cluster, namespace, scripted_job("cheap", script={"stepSeconds": 0.3}))
    job.wait_for("Succeeded")
    time.sleep(2)  # whatever follows the end must not write either
    writes = own_writes(job)
    events = writes.pop("create events 201")
    assert writes == {"create jobs 201": 1, f"update {names.PLURAL}/status 200": 3}
    assert events <= 4


def test_series_of_a_job_come_and_go_with_it(cluster: Cluster, namespace: str, operator: Operator) -> None:
    job = submit(cluster, namespace, scripted_job("shown"))
    job.wait_for("Succeeded")
    metrics = answer(operator, "/metrics")
    (info,) = [line for line in metrics.splitlines() if line.startswith("ctj_job_info{")]
    for label in (f'namespace="{namespace}"', 'job="shown"', 'attempt="1"', 'stage="only"', 'phase="Succeeded"'):
        assert label in info
    assert 'type="Succeeded"' in metrics
    assert re.search(r"ctj_jobs_finished_total\{.*Succeeded.*\} 1.0", metrics)
    assert re.search(r'ctj_reconcile_total\{result="success"\} [1-9]', metrics)
    assert "ctj_leader 1.0" in metrics
    assert re.search(r'ctj_api_request_duration_seconds_count\{code="201",resource="jobs",verb="create"\} 1.0', metrics)
    cluster.plane.kubectl("-n", namespace, "delete", names.PLURAL, "shown")
    wait_until("its series to go", lambda: "ctj_job_info{" not in answer(operator, "/metrics"))


def test_a_follower_is_ready_and_takes_over_at_once(cluster: Cluster, namespace: str, operator: Operator) -> None:
    job = submit(cluster, namespace, scripted_job("handed-over", steps=60, script={"stepSeconds": 0.1}))
    job.wait_for_pod()
    follower = Operator(cluster, namespace, cluster.plane.kubeconfig)
    follower.start("--lease-seconds", "60")
    try:
        wait_until("the follower to wait", lambda: follower.log.count("waiting for lease") == 2)
        wait_until("its port", lambda: follower.log.count("on port") == 2)
        assert (answer(follower, "/readyz"), answer(follower, "/healthz")) == ("ok", "ok")
        assert "ctj_leader 0.0" in answer(follower, "/metrics")
        stopped = time.monotonic()
        assert operator.stop() == 0
        wait_until("the follower to lead", lambda: follower.log.count("leading") == 2, seconds=15)
        assert time.monotonic() - stopped < 15  # not the 60 s of a lease that was left behind
        job.wait_for("Succeeded")
        assert job.status()["attempt"] == 1
    finally:
        follower.stop()


def test_a_follower_ends_at_once_when_it_is_told_to(cluster: Cluster, namespace: str, operator: Operator) -> None:
    follower = Operator(cluster, namespace, cluster.plane.kubeconfig)
    wait_until("a leader", lambda: "leading" in operator.log)
    follower.start()
    wait_until("the follower to wait", lambda: follower.log.count("waiting for lease") == 2)
    assert follower.stop() == 0
    assert "lease released" not in follower.log
