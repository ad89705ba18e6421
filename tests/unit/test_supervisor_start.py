"""What the supervisor hands to torchrun's agent."""

from pathlib import Path

import pytest
from tests.unit.supervised import an_attempt, environment_of

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
