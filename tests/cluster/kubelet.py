"""Who runs the pods in the tests? A tiny stand-in for scheduler, kubelet and pod network: one node, real processes.

Binds each pod to its node, runs its first container as a process in a `sandbox`, and reports back what a kubelet does:
Running, Ready, exit code, reason, termination message. Deletion is SIGTERM, the grace period, SIGKILL, then the object.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.cluster import sandbox as box
from tests.cluster.control_plane import free_ports
from tests.cluster.process import tied
from tests.cluster.rest import Api, Manifest
from tests.cluster.sandbox import Sandbox

NODE = "stand-in"
MARK = "STAND_IN_POD"
"""In the environment of every process of a pod: a container's end takes all its processes with it, and so do we."""
MAX_TERMINATION_MESSAGE = 4096


@dataclass
class Run:
    """One pod that this node has taken on."""

    pod: Manifest
    task: "asyncio.Task[None]"
    sandbox: Sandbox | None = None
    process: asyncio.subprocess.Process | None = None
    stopping: "asyncio.Task[None] | None" = None
    started_at: str = ""
    forwarder: asyncio.Server | None = None


class Kubelet:
    """Keeps this node's processes and the API server's pods the same."""

    def __init__(self, api: Api, directory: Path) -> None:
        self.api = api
        self.directory = directory
        self.runs: dict[str, Run] = {}
        self.rendezvous: dict[tuple[str, str], int] = {}
        self.addresses = itertools.count()

    async def serve(self) -> None:
        """Register the node and follow all pods until cancelled; then end every process."""
        await self.register()
        try:
            async with asyncio.TaskGroup() as self.tasks:  # a bug in one pod's task ends the node, loudly
                async for event, pod in self.api.watch("/api/v1/pods"):
                    await self.see(event, pod)
        finally:
            for run in self.runs.values():
                _kill_processes(run)

    async def register(self) -> None:
        """Create the Node, Ready."""
        await self.api.send("POST", "/api/v1/nodes", {"metadata": {"name": NODE}}, absent_ok=True)
        capacity = {"cpu": "64", "memory": "256Gi", "pods": "250"}
        status = {"capacity": capacity, "allocatable": capacity, "conditions": [_condition("Ready", True)]}
        await self._patch_status(f"/api/v1/nodes/{NODE}", status)

    async def see(self, event: str, pod: Manifest) -> None:
        """React to one pod's newest state."""
        uid, run = pod["metadata"]["uid"], self.runs.get(pod["metadata"]["uid"])
        finished = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
        if event == "DELETED":
            if run:
                _kill_processes(run)
        elif run:
            self.refresh(run, pod)
        elif "deletionTimestamp" in pod["metadata"]:
            await self.remove(pod)
        elif not pod["spec"].get("nodeName") and not pod["spec"].get("schedulingGates"):
            await self.bind(pod)
        elif pod["spec"].get("nodeName") == NODE and not finished:
            self.runs[uid] = Run(pod, self.tasks.create_task(self.run(uid)))

    def refresh(self, run: Run, pod: Manifest) -> None:
        """Bring changed metadata to the downward-API files and start a deletion that was asked for."""
        run.pod = pod
        if run.sandbox:
            box.refresh(pod, run.sandbox)
        if "deletionTimestamp" in pod["metadata"] and run.stopping is None:
            run.stopping = self.tasks.create_task(self.stop(run))

    async def bind(self, pod: Manifest) -> None:
        """Do the scheduler's part."""
        target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
        body = {"metadata": {"name": pod["metadata"]["name"]}, "target": target}
        await self.api.send("POST", f"{_path(pod)}/binding", body, absent_ok=True)

    async def run(self, uid: str) -> None:
        """Run a pod from its first process to its terminal status."""
        run = self.runs[uid]
        try:
            await self.begin(run)
        except box.CannotStart as problem:
            waiting = {"waiting": {"reason": problem.reason, "message": str(problem)}}
            await self.report(run, "Pending", waiting, ready=False)
            return
        assert run.process is not None
        await self.report(run, "Running", {"running": {"startedAt": run.started_at}}, ready=True)
        code = await run.process.wait()
        _kill_processes(run)
        self.note("ended", run)
        await self.report(run, "Failed" if code else "Succeeded", {"terminated": _terminated(run, code)}, ready=False)

    async def begin(self, run: Run) -> None:
        """Lay out the sandbox and start the container's process in it."""
        number = next(self.addresses)  # two pods may begin at once: each has an address of its own
        pod, ip = run.pod, f"127.1.{number // 250}.{number % 250 + 1}"
        ports = self.ports(pod)
        config_maps = {name: await self.config_map(pod, name) for name in _config_map_names(pod)}
        run.sandbox = box.lay_out(pod, directory=self.directory, ip=ip, config_maps=config_maps, ports=ports)
        environment = box.environment(pod, run.sandbox) | {MARK: pod["metadata"]["uid"]}
        run.forwarder = await _forward(run)
        with run.sandbox.log.open("ab") as log:
            run.process = await asyncio.create_subprocess_exec(
                *tied(box.command(pod, run.sandbox)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=run.sandbox.folder,
                start_new_session=True,
            )
        (run.sandbox.folder / "pid").write_text(str(run.process.pid))
        run.started_at = _now()
        self.note("started", run)
        box.refresh(run.pod, run.sandbox)  # what changed while the process was being started

    def note(self, what: str, run: Run) -> None:
        """Append to the node's journal, from which tests read which pods were alive together."""
        meta = run.pod["metadata"]
        line = {"what": what, "pod": meta["name"], "namespace": meta["namespace"], "labels": meta.get("labels", {})}
        with (self.directory / "journal.jsonl").open("a") as journal:
            journal.write(json.dumps(line) + "\n")

    def ports(self, pod: Manifest) -> dict[str, str]:
        """Give each attempt a rendezvous port and each pod a metrics port of this machine."""
        rendezvous, metrics = box.port_names()
        given = {variable["name"] for variable in pod["spec"]["containers"][0].get("env", [])}
        attempt = (pod["metadata"]["namespace"], pod["spec"].get("subdomain") or pod["metadata"]["name"])
        own, shared = free_ports(2)
        chosen = {rendezvous: str(self.rendezvous.setdefault(attempt, shared)), metrics: str(own)}
        return {name: port for name, port in chosen.items() if name in given}

    async def config_map(self, pod: Manifest, name: str) -> dict[str, str]:
        """Read a ConfigMap that the pod mounts."""
        path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/configmaps/{name}"
        found = await self.api.send("GET", path, absent_ok=True)
        if not found:
            raise box.CannotStart("CreateContainerConfigError", f"configmap {name} not found")
        return dict(found.get("data", {}))

    async def stop(self, run: Run) -> None:
        """End a pod as asked: SIGTERM to its first process, SIGKILL to all of them when the grace period is over."""
        if run.process is None:  # not started yet, or it never can
            run.task.cancel()
            await self.remove(run.pod)
            return
        if run.process.returncode is None:
            run.process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(run.process.wait(), run.pod["metadata"].get("deletionGracePeriodSeconds", 30))
            _kill_processes(run)
        await run.task  # the exit code reaches the status before the object goes
        await self.remove(run.pod)

    async def remove(self, pod: Manifest) -> None:
        """Let the object go, now that nothing of it runs."""
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod["metadata"]["uid"]}}
        await self.api.send("DELETE", _path(pod), options, absent_ok=True)

    async def report(self, run: Run, phase: str, state: Manifest, *, ready: bool) -> None:
        """Write the pod's status as a kubelet would."""
        container = run.pod["spec"]["containers"][0]
        entry = {"name": container["name"], "image": container.get("image", ""), "imageID": "", "restartCount": 0}
        kinds = ("PodReadyToStartContainers", "Initialized", "PodScheduled")
        ip = run.sandbox.ip if run.sandbox else ""
        status = {
            "phase": phase,
            "conditions": [_condition(kind, True) for kind in kinds]
            + [_condition(kind, ready) for kind in ("Ready", "ContainersReady")],
            "containerStatuses": [entry | {"ready": ready, "started": ready, "state": state}],
            "hostIP": "127.0.0.1",
            "startTime": run.started_at or None,
        }
        await self._patch_status(_path(run.pod), status | ({"podIP": ip, "podIPs": [{"ip": ip}]} if ip else {}))

    async def _patch_status(self, path: str, status: Manifest) -> None:
        kind = "application/strategic-merge-patch+json"
        await self.api.send("PATCH", f"{path}/status", {"status": status}, kind=kind, absent_ok=True)


async def _forward(run: Run) -> asyncio.Server | None:
    """Let the pod's own address answer on the metrics port it declares, wherever the process really listens."""
    assert run.sandbox is not None
    _, metrics = box.port_names()
    declared = [v["value"] for v in run.pod["spec"]["containers"][0].get("env", []) if v["name"] == metrics]
    if not declared:
        return None
    port = int(run.sandbox.ports[metrics])

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError), contextlib.closing(writer):
            answer, request = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.closing(request):
                await asyncio.gather(_pump(reader, request), _pump(answer, writer))

    return await asyncio.start_server(connect, run.sandbox.ip, int(declared[0]))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(2**16):
        writer.write(chunk)
        await writer.drain()
    writer.write_eof()


def _kill_processes(run: Run) -> None:
    """Kill whatever still carries the pod's mark, as the end of a container does."""
    if run.forwarder:
        run.forwarder.close()
    mark = f"{MARK}={run.pod['metadata']['uid']}".encode()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in entry.read_bytes().split(b"\0"):
                os.kill(int(entry.parent.name), signal.SIGKILL)


def _terminated(run: Run, code: int) -> Manifest:
    """Return the container's last state: a death by signal n reads as exit code 128 + n."""
    assert run.sandbox is not None
    file = run.sandbox.termination_message
    message = file.read_bytes()[-MAX_TERMINATION_MESSAGE:].decode(errors="replace") if file.exists() else ""
    return {
        "exitCode": 128 - code if code < 0 else code,
        "reason": "Error" if code else "Completed",
        "message": message,
        "startedAt": run.started_at,
        "finishedAt": _now(),
    }


def _config_map_names(pod: Manifest) -> list[str]:
    return [volume["configMap"]["name"] for volume in pod["spec"].get("volumes", []) if "configMap" in volume]


def _path(pod: Manifest) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


def _condition(kind: str, true: bool) -> Manifest:
    return {"type": kind, "status": "True" if true else "False", "lastTransitionTime": _now(), "reason": "StandIn"}


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


async def _main(kubeconfig: Path, directory: Path) -> Any:
    directory.mkdir(parents=True, exist_ok=True)
    loop = asyncio.get_running_loop()
    async with Api(kubeconfig) as api:
        serving = asyncio.create_task(Kubelet(api, directory).serve())
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, serving.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await serving


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    options = parser.parse_args()
    asyncio.run(_main(options.kubeconfig, options.directory.resolve()))
