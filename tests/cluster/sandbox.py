"""What would a pod's container see, on a machine without containers?

A folder per pod. Paths below a volume's mount point, the pod's DNS names and its ports are rewritten in the command,
the arguments and the environment to what they stand for on this machine; the image chooses what `python` imports.
Only the first container runs; there are no init containers.
"""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.rest import Manifest

from ctj_api import names

IMAGES = Path(__file__).parent / "images"
TEST_IMAGE = "test/"
"""An image of this prefix is a folder beside this file that goes before everything else on the module path."""
# What an image of ours would hold; nothing else is inherited.
_OF_THE_IMAGE = ("HOME", "LANG", "LD_LIBRARY_PATH", "XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR", "CC", "CXX")
_FIELD = re.compile(r"^metadata\.(labels|annotations)\['(.+)'\]$")
_VARIABLE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")


class CannotStart(Exception):
    """The container waits, with a kubelet's word for why."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """Where one pod's things are on this machine."""

    folder: Path
    ip: str
    mounts: Mapping[str, Path]
    """Container path -> where it is here."""
    ports: Mapping[str, str] = field(default_factory=dict)
    """Environment variable -> the port it really means here, where all pods share one machine's ports."""

    @property
    def log(self) -> Path:
        """Everything the container printed."""
        return self.folder / "log"

    @property
    def termination_message(self) -> Path:
        """What stands for the container's terminationMessagePath."""
        return self.folder / "termination-message"


def lay_out(
    pod: Manifest,
    *,
    directory: Path,
    ip: str,
    config_maps: Mapping[str, Mapping[str, str]],
    ports: Mapping[str, str],
) -> Sandbox:
    """Make the pod's folder with its volumes, and return what is where."""
    meta = pod["metadata"]
    folder = directory / "pods" / f"{meta['namespace']}_{meta['name']}"
    volumes = {
        volume["name"]: _volume(volume, pod, directory=directory, folder=folder)
        for volume in pod["spec"].get("volumes", [])
    }
    for volume in pod["spec"].get("volumes", []):
        if "configMap" in volume:
            for key, text in config_maps[volume["configMap"]["name"]].items():
                (volumes[volume["name"]] / key).write_text(text)
    container = pod["spec"]["containers"][0]
    mounts = {"/tmp": folder / "tmp"}
    for mount in container.get("volumeMounts", []):
        mounts[mount["mountPath"].rstrip("/")] = volumes[mount["name"]] / mount.get("subPath", "")
    for path in mounts.values():
        path.mkdir(parents=True, exist_ok=True)
    mounts[container.get("terminationMessagePath", "/dev/termination-log")] = folder / "termination-message"
    return Sandbox(folder=folder, ip=ip, mounts=mounts, ports=ports)


def _volume(volume: Manifest, pod: Manifest, *, directory: Path, folder: Path) -> Path:
    """Where a volume lies: a claim is shared by all pods of its namespace, a host path is itself."""
    if "persistentVolumeClaim" in volume:
        path: Path = directory / "claims" / pod["metadata"]["namespace"] / volume["persistentVolumeClaim"]["claimName"]
    elif "hostPath" in volume:
        path = Path(volume["hostPath"]["path"])
    else:
        path = folder / "volumes" / volume["name"]
    path.mkdir(parents=True, exist_ok=True)
    if "downwardAPI" in volume:
        _write_downward(volume, pod, path)
    return path


def refresh(pod: Manifest, sandbox: Sandbox) -> None:
    """Rewrite the downward-API files after the pod's metadata changed."""
    for volume in pod["spec"].get("volumes", []):
        if "downwardAPI" in volume:
            _write_downward(volume, pod, sandbox.folder / "volumes" / volume["name"])


def _write_downward(volume: Manifest, pod: Manifest, path: Path) -> None:
    """Swap each changed file whole, so that nobody reads half of one."""
    for item in volume["downwardAPI"]["items"]:
        file, text = path / item["path"], _field_value(pod, item["fieldRef"]["fieldPath"])
        if not file.exists() or file.read_text() != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_name(f".{file.name}.partial")
            partial.write_text(text)
            partial.rename(file)


def command(pod: Manifest, sandbox: Sandbox) -> list[str]:
    """Return the container's command with its arguments, as this machine runs it."""
    container = pod["spec"]["containers"][0]
    given = dict(_container_environment(pod, sandbox))
    words = [_expand(word, given) for word in [*container.get("command", []), *container.get("args", [])]]
    if not words:
        raise CannotStart(
            "CreateContainerError", "the stand-in has no image to take a command from; give the container a `command`"
        )
    here = [_rewrite(word, pod, sandbox) for word in words]
    return [sys.executable if here[0] in ("python", "python3") else here[0], *here[1:]]


def _prebuilt_ops() -> Path:
    """Return where the set-up has put DeepSpeed's op; pods have another HOME."""
    return Path.home() / ".cache" / "torch_extensions"


def environment(pod: Manifest, sandbox: Sandbox) -> dict[str, str]:
    """Return the whole environment of the container's process."""
    inherited = {name: os.environ[name] for name in _OF_THE_IMAGE if name in os.environ}
    base = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TMPDIR": str(sandbox.mounts["/tmp"]),
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": str(_prebuilt_ops()),
        "HOSTNAME": pod["spec"].get("hostname", pod["metadata"]["name"]),
    }
    given = {name: _rewrite(value, pod, sandbox) for name, value in _container_environment(pod, sandbox).items()}
    image = pod["spec"]["containers"][0].get("image", "")
    if image.startswith(TEST_IMAGE):
        folder = IMAGES / image.removeprefix(TEST_IMAGE).partition(":")[0]
        if not folder.is_dir():
            raise CannotStart("ErrImagePull", f"image {image}: {folder} does not exist")
        given["PYTHONPATH"] = ":".join(filter(None, [str(folder), given.get("PYTHONPATH")]))
    return base | inherited | given | dict(sandbox.ports)


def _container_environment(pod: Manifest, sandbox: Sandbox) -> dict[str, str]:
    """Resolve the container's `env` in order, as the kubelet does."""
    resolved: dict[str, str] = {}
    for variable in pod["spec"]["containers"][0].get("env", []):
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            path = source["fieldRef"]["fieldPath"]
            resolved[variable["name"]] = sandbox.ip if path == "status.podIP" else _field_value(pod, path)
        else:
            resolved[variable["name"]] = _expand(variable.get("value", ""), resolved)
    return resolved


def _expand(text: str, known: Mapping[str, str]) -> str:
    """Replace $(NAME) by an earlier variable; unknown ones stay as they are."""
    return _VARIABLE.sub(lambda found: known.get(found[1], found[0]), text)


def _field_value(pod: Manifest, path: str) -> str:
    keyed = _FIELD.match(path)
    if keyed:
        return str(pod["metadata"].get(keyed[1], {}).get(keyed[2], ""))
    value: Any = pod
    for part in path.split("."):
        value = value.get(part, "")
    return str(value)


def _rewrite(text: str, pod: Manifest, sandbox: Sandbox) -> str:
    """Replace container paths and the DNS names of the pod's headless Service."""
    paths = "|".join(re.escape(path) for path in sorted(sandbox.mounts, key=len, reverse=True))
    text = re.sub(rf"(?<![\w./~-])({paths})(?![\w.-])", lambda found: str(sandbox.mounts[found[1]]), text)
    if service := pod["spec"].get("subdomain"):
        namespace = pod["metadata"]["namespace"]
        suffix = rf"(\.{re.escape(namespace)}(\.svc(\.cluster\.local)?)?)?"
        text = re.sub(rf"(?<![\w.-])[a-z0-9-]+\.{re.escape(service)}{suffix}(?![\w.-])", "127.0.0.1", text)
    return text


def port_names() -> tuple[str, str]:
    """Return the variables that carry a port: the rendezvous (one per attempt) and the metrics (one per pod)."""
    return names.ENV_MASTER_PORT, names.ENV_METRICS_PORT
