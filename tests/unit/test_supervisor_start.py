"""What the supervisor hands to torchrun's agent, and where compiled code goes."""

import stat
import sys
from pathlib import Path

import pytest
from tests.unit.supervised import an_attempt, environment_of

from ctj_api import names
from ctj_api.spec import Strategy, Tracker
from ctj_trainer.supervisor import launch
from ctj_trainer.supervisor.settings import Settings, read_settings

DDP = (Strategy.DDP,)


def settings(tmp_path: Path, *, nodes: int = 1, port: int = 29501, ladder: tuple[Strategy, ...] = DDP) -> Settings:
    return read_settings(environment_of(an_attempt(nodes=nodes, ladder=ladder), tmp_path, node=nodes - 1, port=port))


def test_the_agent_gets_a_static_rendezvous_and_no_restarts(tmp_path: Path) -> None:
    command = launch.agent_command(settings(tmp_path, nodes=2))
    assert {"--nnodes=2", "--node-rank=1", "--nproc-per-node=2", "--master-port=29501"} <= set(command)
    assert {"--rdzv-backend=static", "--max-restarts=0"} <= set(command)
    assert command[-2:] == ["-m", "ctj_trainer.supervisor.child"]


def test_a_pod_without_a_port_finds_a_free_one(tmp_path: Path) -> None:
    [port] = [arg for arg in launch.agent_command(settings(tmp_path, port=0)) if arg.startswith("--master-port=")]
    assert int(port.partition("=")[2]) > 1024


def test_every_stage_runs_with_the_same_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_processors", lambda: 8)
    stage = settings(tmp_path)
    assert launch.agent_environment(stage, {}, compile_cache=tmp_path)["OMP_NUM_THREADS"] == "4"


def test_what_the_owner_of_the_pod_set_stays(tmp_path: Path) -> None:
    outer = {"OMP_NUM_THREADS": "3", "HF_HOME": "/models", "TORCHINDUCTOR_CACHE_DIR": "/elsewhere"}
    environment = launch.agent_environment(settings(tmp_path), outer, compile_cache=tmp_path / "c")
    assert (environment["OMP_NUM_THREADS"], environment["HF_HOME"]) == ("3", "/models")
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "c")


def test_compiled_code_is_kept_per_torch_python_and_hardware(tmp_path: Path) -> None:
    folder, notice = launch.prepare_compile_cache(tmp_path / "cache")
    assert notice is None
    assert folder.is_dir()
    assert folder.parent == tmp_path / "cache"
    assert folder.name.startswith("torch-2.")
    assert f"py{sys.version_info.major}.{sys.version_info.minor}" in folder.name
    assert launch.prepare_compile_cache(tmp_path / "cache") == (folder, None)


def test_an_unwritable_cache_costs_time_not_the_job(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.touch()
    folder, notice = launch.prepare_compile_cache(blocker)
    assert folder.is_dir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert notice is not None
    assert names.ENV_CACHE_DIR in notice
    folder.rmdir()


@pytest.mark.parametrize(
    ("absent", "ladder", "says"),
    [
        ("torch", DDP, "training needs it"),
        ("deepspeed", (Strategy.DDP, Strategy.ZERO3), "stage zero3 (strategy zero3) needs it"),
        ("deepspeed", DDP, None),
    ],
)
def test_a_missing_package_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: str, ladder: tuple[Strategy, ...], says: str | None
) -> None:
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None if name == absent else object())
    line = launch.missing_package(settings(tmp_path, ladder=ladder))
    assert (line is None) == (says is None)
    if line is not None and says is not None:
        assert says in line
        assert "pip install 'ctj[trainer]'" in line


@pytest.mark.parametrize(("absent", "install"), [("tensorboard", "tensorboard"), ("accelerate", "'ctj[trainer]'")])
def test_a_trackers_missing_package_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: str, install: str
) -> None:
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None if name == absent else object())
    message = an_attempt()
    training = message.training.model_copy(update={"trackers": [Tracker.TENSORBOARD]})
    asked = message.model_copy(update={"training": training})
    line = launch.missing_package(read_settings(environment_of(asked, tmp_path)))
    assert line is not None
    assert "spec.training.trackers (tensorboard) needs it" in line
    assert line.endswith(f"pip install {install}")


@pytest.mark.parametrize(("url", "says"), [("nowhere://bucket/c", "Protocol not known: nowhere"), ("file:///c", None)])
def test_a_store_that_cannot_be_reached_from_this_python_is_named_before_anything_starts(
    tmp_path: Path, url: str, says: str | None
) -> None:
    message = an_attempt()
    checkpoint = message.training.checkpoint.model_copy(update={"url": url})
    asked = message.model_copy(update={"training": message.training.model_copy(update={"checkpoint": checkpoint})})
    line = launch.missing_package(read_settings(environment_of(asked, tmp_path)))
    assert line == (None if says is None else f"spec.training.checkpoint.url is {url!r}: {says}")
