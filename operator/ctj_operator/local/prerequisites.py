"""What must be there before a local job starts: modules, a compiler, devices, disk. Each miss says how to get it."""

import json
import os
import shutil
import subprocess
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ctj_api import names
from ctj_api.spec import CompileScope, Spec, Strategy

_MINIMUM_FREE_BYTES = 512 * 1024**2  # a run of examples/quickstart.yaml leaves about 300 MB, most of it compiled code
_PROBE = (
    "import importlib.util, json, sys; print(json.dumps([m for m in sys.argv[1:] if not importlib.util.find_spec(m)]))"
)

_OURS = "'ctj[trainer]'"


@dataclass(frozen=True, kw_only=True)
class Missing:
    """One thing that is not there."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"


def check(spec: Spec, *, folder: Path, cache: Path, python: str) -> list[Missing]:
    """Return everything that stage after stage of `spec` will need and this machine lacks."""
    missing = [*(_modules(spec, python) or _paths(spec, python)), *_devices(spec)]
    compiles = spec.compile.scope is not CompileScope.DISABLED
    if compiles and (spec.compile.backend or "inductor").lower() == "inductor":
        missing += _compiler()
    places = {"work folder": folder, "compile cache": cache} if compiles else {"work folder": folder}
    for name, place in places.items():
        missing += _storage(name, place)
    return missing


def _modules(spec: Spec, python: str) -> list[Missing]:
    wanted = {"ctj_trainer": "every stage", "torch": "every stage"}
    zero3 = [stage.name for stage in spec.ladder if stage.strategy is Strategy.ZERO3]
    if zero3:
        wanted["deepspeed"] = f"stage {', '.join(zero3)} (strategy zero3)"
    for tracker in spec.training.trackers:
        wanted |= {"accelerate": "spec.training.trackers", tracker.value: "spec.training.trackers"}
    try:
        probe = subprocess.run([python, "-c", _PROBE, *wanted], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        return [
            Missing(
                what=f"the trainer's Python {python} does not run ({error})",
                remedy=f"set {names.ENV_TRAINER_PYTHON} to one",
            )
        ]
    absent: list[str] = json.loads(probe.stdout)
    return [
        Missing(
            what=f"Python module {module}, needed by {wanted[module]}, is not installed for {python}",
            remedy=f"{python} -m pip install {module if module in spec.training.trackers else _OURS}"
            + (", or drop that stage" if module == "deepspeed" else ""),
        )
        for module in absent
    ]


def _paths(spec: Spec, python: str) -> list[Missing]:
    """Ask the recipe which of its files are not here: an attempt would find out, and be repeated in vain."""
    question = json.dumps({"name": spec.recipe.name, "config": spec.recipe.config})
    command = [python, "-m", "ctj_trainer.recipes.paths"]
    try:
        answer = subprocess.run(command, input=question, capture_output=True, text=True, check=True, timeout=60)
        return [Missing(**miss) for miss in json.loads(answer.stdout)]
    except (OSError, subprocess.SubprocessError, ValueError, TypeError):
        return []  # a trainer that cannot be asked: its first attempt will say what is missing


def _compiler() -> list[Missing]:
    """Inductor compiles C++ for CPU code, and for the launchers of GPU kernels."""
    chosen = os.environ.get("CXX")
    if chosen and shutil.which(chosen):
        return []
    if not chosen and any(shutil.which(name) for name in ("g++", "clang++")):
        return []
    seen = f"CXX is {chosen!r}, which is not there" if chosen else "neither g++ nor clang++ is on PATH"
    return [
        Missing(
            what=f"no C++ compiler for torch.compile ({seen})",
            remedy="apt install g++ (dnf install gcc-c++, xcode-select --install), "
            "or train eager: --set spec.compile.scope=disabled",
        )
    ]


def _devices(spec: Spec) -> list[Missing]:
    wanted = max((stage.nodes * (stage.gpus_per_node or 0) for stage in spec.ladder), default=0)
    present = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if wanted <= present:
        return []
    return [
        Missing(
            what=f"spec.ladder asks for {wanted} GPUs at once, this machine has {present}",
            remedy="replace gpusPerNode by processesPerNode to run on CPU, or submit the job to a cluster",
        )
    ]


def _storage(name: str, place: Path) -> list[Missing]:
    probe = place / f".probe-{uuid.uuid4().hex}"
    try:
        place.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(place).free
        probe.write_bytes(b"\0" * 4096)
        probe.unlink()
    except OSError as error:
        with suppress(OSError):
            probe.unlink()
        return [Missing(what=f"{name} {place} cannot be written ({error.strerror})", remedy=_other_place(name))]
    if free < _MINIMUM_FREE_BYTES:
        mebibytes = (free // 1024**2, _MINIMUM_FREE_BYTES // 1024**2)
        return [
            Missing(
                what=f"{name} {place} has {mebibytes[0]} MiB free of the {mebibytes[1]} MiB a run needs at least",
                remedy=f"free some disk, or {_other_place(name)}",
            )
        ]
    return []


def _other_place(name: str) -> str:
    return "choose another place with " + ("--work-dir DIR" if name == "work folder" else "--cache-dir DIR")
