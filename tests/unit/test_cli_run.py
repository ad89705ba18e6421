"""`ctj run` from the outside: outcomes and exit codes, Ctrl-C, kill -9, two runs, resume. Trainers are stand-ins."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.unit.workplace import Workplace, end

from ctj_operator.cli import summary
from ctj_operator.local import prerequisites


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Workplace:
    monkeypatch.setattr(summary, "write_report", lambda store: store.folder / "report.html")  # 3 s of charts each time
    return Workplace(tmp_path, monkeypatch, capsys)


@contextmanager
def small_disk(place: Workplace) -> Iterator[Path]:
    """Mount 2 MiB."""
    small = place.folder / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small)], check=True)
    try:
        yield small
    finally:
        subprocess.run(["umount", str(small)], check=True)


def slow_job(place: Workplace, **config: object) -> Path:
    return place.write_job(recipe={"name": "stand_in:build", "config": {"stepSeconds": 0.15, **config}})


def test_a_job_goes_through_every_stage_to_succeeded_and_says_where_things_are(place: Workplace) -> None:
    ended = place.ctj("run", str(place.write_job()))
    assert ended.code == 0, ended.err + ended.out
    assert [stage["phase"] for stage in place.status()["ladder"]] == ["Passed", "Passed"]
    assert "tiny succeeded: 12 steps through 2 stages" in ended.out
    assert "Report: ctj-runs/tiny/report.html" in ended.out
    assert "Model:  ctj-runs/tiny/checkpoints/export" in ended.out
    assert "\x1b" not in ended.out
    assert place.processes() == []


def test_running_a_finished_job_again_trains_nothing_and_succeeds(place: Workplace) -> None:
    job = str(place.write_job())
    assert place.ctj("run", job).code == 0
    before = place.status()
    assert place.ctj("run", job).code == 0
    assert place.status() == before


def test_a_finished_job_with_another_spec_is_refused_instead_of_called_trained(place: Workplace) -> None:
    job = str(place.write_job())
    place.ctj("run", job)
    before = place.status()
    ended = place.ctj("run", job, "--set", "spec.training.steps=20")
    assert ended.code == 2, ended.out
    assert "tiny has succeeded and trains no more: the changed spec.training would do nothing" in ended.err
    assert "--fresh" in ended.err
    assert place.status() == before


def test_fresh_starts_over_and_keeps_the_earlier_folder(place: Workplace) -> None:
    job = str(place.write_job())
    place.ctj("run", job)
    ended = place.ctj("run", job, "--fresh")
    assert ended.code == 0
    assert "kept in" in ended.err
    assert len(list(place.folder.glob("ctj-runs/tiny.*/status.json"))) == 1
    assert place.status()["attempt"] == 2


def test_ctrl_c_saves_a_checkpoint_and_the_same_command_goes_on_from_it(place: Workplace) -> None:
    job = str(slow_job(place))
    process = place.start("run", job)
    place.until(lambda: place.steps_trained() >= 3)
    stopped = end(process, signal.SIGINT)
    assert stopped.code == 130, stopped.err + stopped.out
    reached = place.steps_trained()
    assert f"The checkpoint of step {reached} is kept." in stopped.out
    assert "Go on with: ctj run" in stopped.out
    assert place.processes() == []
    assert place.ctj("run", job).code == 0
    records = (place.job_folder / "checkpoints/attempt-00002/steps.jsonl").read_text().splitlines()
    assert json.loads(records[0])["step"] == reached + 1
    assert place.status()["restarts"]["total"] == 0


def test_a_second_ctrl_c_ends_everything_at_once(place: Workplace) -> None:
    process = place.start("run", str(slow_job(place, stepSeconds=30)))
    place.until(lambda: bool(place.processes()))
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    while "Ctrl-C again" not in process.stdout.readline():
        pass
    ended = end(process, signal.SIGINT)
    assert ended.code == 130
    assert place.processes() == []


def test_after_kill_9_of_the_runner_no_supervisor_lives_and_the_next_run_resumes(place: Workplace) -> None:
    job = str(slow_job(place, worker=True))
    process = place.start("run", job)
    place.until(lambda: place.steps_trained() >= 3)
    supervisors = [json.loads(path.read_text())["pid"] for path in place.job_folder.glob("children/*/*/process.json")]
    end(process, signal.SIGKILL)
    place.until(lambda: not set(supervisors) & set(place.processes()), seconds=2)
    ended = place.ctj("run", job)
    assert ended.code == 0, ended.err + ended.out
    assert place.processes() == []  # the stand-in's worker has no leash of its own: the second run ended it
    assert place.status()["restarts"]["total"] == 1


def test_a_cut_pipe_does_not_end_the_training(place: Workplace) -> None:
    process = place.start("run", str(slow_job(place)))
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    process.stderr.read()
    process.wait(timeout=60)
    process.stderr.close()
    assert place.status()["phase"] == "Succeeded"


def test_a_second_run_of_a_running_job_is_refused_and_harms_nothing(place: Workplace) -> None:
    job = str(slow_job(place))
    first = place.start("run", job)
    place.until(lambda: place.steps_trained() >= 1)
    second = place.ctj("run", job)
    assert second.code == 2
    assert f"in use by pid {first.pid}" in second.err
    assert "Traceback" not in second.err
    first.communicate(timeout=60)
    assert first.returncode == 0


def test_a_permanent_failure_ends_with_1_and_shows_rank_reason_lines_and_remedy(place: Workplace) -> None:
    fail = {"stage": "ddp", "step": 8, "code": 11}
    ended = place.ctj(
        "run", str(place.write_job(recipe={"name": "stand_in:build", "config": {"stepSeconds": 0.01, "fail": fail}}))
    )
    assert ended.code == 1
    for part in ("tiny failed in stage ddp", "rank 1", "UserCode", "| line 1", "ctj logs tiny", "ctj retry tiny"):
        assert part in ended.out


def test_a_failed_job_stays_failed_until_retry_and_then_goes_on(place: Workplace) -> None:
    fail = {"stage": "ddp", "step": 8, "code": 11, "attempts": 2}
    job = str(place.write_job(recipe={"name": "stand_in:build", "config": {"stepSeconds": 0.01, "fail": fail}}))
    assert place.ctj("run", job).code == 1
    assert place.ctj("run", job).code == 1
    asked = place.ctj("retry", "tiny")
    assert asked.code == 0
    assert "ctj run" in asked.out
    assert place.ctj("run", job).code == 0


def test_a_failed_gate_that_holds_ends_with_3_and_approval_goes_on(place: Workplace) -> None:
    gate = {"name": "speed", "source": {"report": "samplesPerSecondPerProcess"}, "thresholdRange": {"min": "100"}}
    job = str(place.write_job(gates=[{**gate, "stages": ["single"], "onFailure": "Hold"}]))
    held = place.ctj("run", job)
    assert held.code == 3, held.err + held.out
    assert "ctj approve tiny" in held.out
    explained = place.ctj("explain", "tiny").out
    assert "at least 100" in explained
    assert "samplesPerSecondPerProcess" in explained
    assert place.ctj("run", job).code == 3
    assert place.ctj("approve", "tiny").code == 0
    assert place.ctj("run", job).code == 0


@pytest.mark.parametrize(("stage", "may_go_back"), [("single", False), ("ddp", True)])
def test_a_held_job_offers_a_rollback_only_where_one_is_taken(
    place: Workplace, stage: str, *, may_go_back: bool
) -> None:
    gate = {"name": "speed", "source": {"report": "samplesPerSecondPerProcess"}, "thresholdRange": {"min": "100"}}
    ladder = [
        {"name": "single", "strategy": "single", "steps": 4},
        {"name": "ddp", "strategy": "ddp", "steps": 4},
        {"name": "fsdp", "strategy": "fsdp"},
    ]
    disabled = {"scope": "disabled"}
    job = place.write_job(gates=[{**gate, "stages": [stage], "onFailure": "Hold"}], ladder=ladder, compile=disabled)
    held = place.ctj("run", str(job))
    explained = place.ctj("explain", "tiny").out
    assert held.code == 3, held.err + held.out
    assert ("ctj rollback tiny" in held.out, "ctj rollback tiny" in explained) == (may_go_back, may_go_back)
    assert "ctj retry-compile" not in explained, "refused where spec.compile.scope is disabled"
    assert (place.ctj("rollback", "tiny").code == 0) == may_go_back


def test_pause_from_another_terminal_stops_with_a_checkpoint_and_run_goes_on(place: Workplace) -> None:
    job = str(slow_job(place))
    process = place.start("run", job)
    place.until(lambda: place.steps_trained() >= 2)
    assert "acts on it" in place.ctj("pause", "tiny").out
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert place.ctj("run", job).code == 0


def test_a_damaged_status_stops_before_anything_starts(place: Workplace) -> None:
    job = str(place.write_job())
    place.ctj("run", job)
    (place.job_folder / "status.json").write_text("{")
    ended = place.ctj("run", job)
    assert ended.code == 4
    assert "status.json.previous" in ended.err
    assert "Traceback" not in ended.err


def test_a_changed_identity_is_refused_with_fresh_as_the_remedy(place: Workplace) -> None:
    job = str(place.write_job())
    place.ctj("run", job)
    ended = place.ctj("run", job, "--set", "spec.training.seed=7")
    assert ended.code == 2
    assert "spec.training.seed" in ended.err
    assert "--fresh" in ended.err


def test_every_problem_of_a_bad_file_is_printed_at_once(place: Workplace) -> None:
    ended = place.ctj("run", str(place.write_job(surprise=1)), "--set", "spec.training.steps=0")
    assert ended.code == 2
    assert "surprise" in ended.err
    assert "spec.training.steps" in ended.err
    assert not place.job_folder.exists()


def test_json_lines_are_objects_and_end_with_the_outcome(place: Workplace) -> None:
    ended = place.ctj("run", str(slow_job(place)), "--json")
    lines = [json.loads(line) for line in ended.out.splitlines()]
    assert {"event", "progress", "end"} <= {line["kind"] for line in lines}
    assert (lines[-1]["kind"], lines[-1]["outcome"], lines[-1]["exitCode"]) == ("end", "SUCCEEDED", 0)


def test_two_nodes_are_two_processes_that_meet_on_one_free_port(place: Workplace) -> None:
    ladder = [{"name": "wide", "strategy": "ddp", "nodes": 2, "processesPerNode": 1}]
    assert place.ctj("run", str(place.write_job(ladder=ladder))).code == 0
    ports = {path.read_text().splitlines()[0].split()[-1] for path in place.job_folder.glob("children/*/node-*/log")}
    assert len(list(place.job_folder.glob("children/*/node-*/log"))) == 2
    assert len(ports) == 1


@pytest.mark.parametrize("absent", ["torch", "deepspeed"])
def test_a_missing_module_ends_with_4_before_training_and_says_how_to_get_it(place: Workplace, absent: str) -> None:
    place.python.write_text(f"#!/bin/sh\necho '[\"{absent}\"]'\n")
    ladder = [
        {"name": "single", "strategy": "single", "steps": 6},
        {"name": "zero", "strategy": "zero3", "processesPerNode": 2},
    ]
    ended = place.ctj("run", str(place.write_job(ladder=ladder)))
    assert ended.code == 4
    assert f"Python module {absent}" in ended.err
    assert "pip install 'ctj[trainer]'" in ended.err
    assert not (place.job_folder / "job.json").exists()


def test_a_trackers_missing_package_ends_with_4_and_names_the_package(place: Workplace) -> None:
    place.python.write_text("#!/bin/sh\necho '[\"wandb\"]'\n")
    job = place.write_job()
    ended = place.ctj("run", str(job), "--set", "spec.training.trackers=[wandb]")
    assert ended.code == 4
    assert "Python module wandb, needed by spec.training.trackers" in ended.err
    assert "pip install wandb" in ended.err


def causal_lm(**config: object) -> dict[str, object]:
    model = {"hiddenSize": 64, "layers": 1, "heads": 2}
    data = {"builtin": "python-stdlib", "sequenceLength": 32}
    return {"name": "causal_lm", "config": {"model": model, "data": data, **config}}


@pytest.mark.parametrize(
    ("recipe", "field", "value"),
    [
        (causal_lm(data={"files": ["*.yaml", "texts/*.txt"], "sequenceLength": 32}), "data.files[1]", "texts/*.txt"),
        (
            causal_lm(data={"files": ["*.yaml"], "tokenizer": "nowhere.json", "sequenceLength": 32}),
            "data.tokenizer",
            "nowhere.json",
        ),
        (causal_lm(model={"path": "/nowhere/llama"}), "model.path", "/nowhere/llama"),
    ],
    ids=["data", "tokenizer", "weights"],
)
def test_files_that_are_not_here_end_with_4_before_anything_starts(
    place: Workplace, recipe: dict[str, object], field: str, value: str
) -> None:
    ended = place.ctj("run", str(place.write_job(recipe=recipe)))
    assert ended.code == 4, ended.err + ended.out
    assert f"spec.recipe.config.{field} is '{value}'" in ended.err
    assert "correct the path" in ended.err or "name a folder" in ended.err
    assert not (place.job_folder / "job.json").exists()


def test_a_missing_compiler_ends_with_4_unless_nothing_is_compiled(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    job = str(place.write_job())
    ended = place.ctj("run", job)
    assert ended.code == 4
    assert "apt install g++" in ended.err
    assert place.ctj("run", job, "--set", "spec.compile.scope=disabled").code == 0


def test_a_work_folder_that_cannot_be_written_ends_with_4(place: Workplace) -> None:
    (place.folder / "file").write_text("")
    ended = place.ctj("run", str(place.write_job()), "--work-dir", "file")
    assert ended.code == 4
    assert "--work-dir" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_work_folder_that_is_nearly_full_ends_with_4_before_training(place: Workplace) -> None:
    with small_disk(place) as small:
        ended = place.ctj("run", str(place.write_job()), "--work-dir", str(small))
    assert ended.code == 4
    assert "MiB free" in ended.err


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_work_folder_that_fills_up_while_training_ends_with_4_and_no_trainer_left(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prerequisites, "_MINIMUM_FREE_BYTES", 0)
    recipe = {"name": "stand_in:build", "config": {"stepSeconds": 0.01, "fillDiskAt": 3}}
    with small_disk(place) as small:
        ended = place.ctj("run", str(place.write_job(recipe=recipe)), "--work-dir", str(small))
    assert ended.code == 4
    assert "No space left on device" in ended.err
    assert "--work-dir" in ended.err
    assert "Traceback" not in ended.err
    assert place.processes() == []
