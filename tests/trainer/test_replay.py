"""Stages handed over from strategy to strategy: each repeats its predecessor's last steps to the same numbers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.conftest import Ranks
from tests.trainer.messages import CAUSAL_LM, attempt
from tests.trainer.stages import run

from ctj_api import names
from ctj_api.report import Report

JOB = {"steps": 30}
WORLD_1 = {"name": "single", "strategy": "single", "steps": 12}


def report_of(run_dir: Path) -> Report:
    return Report.model_validate_json((run_dir / "report.json").read_text())


def worker(document: dict[str, Any], root: Path, **environment: str) -> tuple[int, str, Path]:
    """Train as torchrun would start it, with one process; exit code, output, run folder."""
    run_dir = root / "alone"
    outcome = subprocess.run(
        [sys.executable, "-m", "ctj_trainer.worker"],
        env=os.environ
        | {
            names.ENV_ATTEMPT: json.dumps(document),
            names.ENV_RUN_DIR: str(run_dir),
            names.ENV_CHECKPOINT_ROOT: str(root),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return outcome.returncode, outcome.stdout + outcome.stderr, run_dir


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root whose attempt 1 trained the stage `single` for 12 steps, compiled by Inductor."""
    root = tmp_path_factory.mktemp("job")
    document = attempt(recipe=CAUSAL_LM, stage=WORLD_1, training=JOB, compile={"backend": "inductor"}, microBatchSize=4)
    code, output, run_dir = worker(document, root)
    assert code == 0, output
    report = report_of(run_dir)
    assert report.mode == "Compiled", output
    assert report.memory, output
    return root


def test_inductor_compiles_one_graph_once_and_equals_eager(alone: Path) -> None:
    report = report_of(alone / "alone")
    assert report.compile is not None
    assert report.measurements["recompilesAfterWarmup"] == 0
    assert report.measurements["probeLossRelative"] <= 1e-6
    assert report.measurements["probeGradNormRelative"] <= 5e-6
    steps = [json.loads(line) for line in (alone / "attempt-00001" / "steps.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, 13))
    assert steps[-1]["graphs"] == 1
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert {stage.stage for stage in report.memory} == {"ddp", "fsdp", "zero3"}


def test_every_stage_replays_its_predecessor_within_rounding(ranks: Ranks, alone: Path) -> None:
    lineage: list[dict[str, int]] = [{"attempt": 1, "maxStep": 9}]
    start = 9
    for number, strategy in enumerate(["ddp", "fsdp", "zero3"], start=2):
        document = attempt(
            strategy,
            number=number,
            start=start,
            end=start + 9,
            recipe=CAUSAL_LM,
            training=JOB,
            lineage=lineage,
            replay={"attempt": number - 1, "fromStep": start, "toStep": start + 3},
        )
        result = ranks(run, document=document, root=str(alone), name=strategy)[0]
        report = report_of(alone / strategy)
        assert report.start_step == start
        assert report.measurements["replayLossRelative"] <= 1e-5
        assert report.measurements["replayGradNormRelative"] <= 1e-3
        replayed = [step for step, record in result["records"].items() if record["replay"]]
        assert replayed == [start + 1, start + 2, start + 3]
        assert (alone / "export").exists() == (document["window"]["endStep"] == JOB["steps"])
        start += 6
        lineage.append({"attempt": number, "maxStep": start})
    export = alone / "export"
    assert (export / "model.safetensors").exists()


def test_a_message_of_another_version_ends_in_one_line_before_torch_is_imported(tmp_path: Path) -> None:
    code, output, run_dir = worker(attempt(version=99), tmp_path, PYTHONPROFILEIMPORTTIME="1")
    assert code == 10
    assert "| torch\n" not in output
    mark = json.loads((run_dir / "mark-0.json").read_text())
    assert mark["kind"] == "CONFIGURATION"
    assert "has version 99; trainer" in mark["message"]


def test_a_recipe_that_raises_leaves_its_traceback(tmp_path: Path) -> None:
    recipe = {"name": "tests.trainer.odd_recipes:build", "config": {"oddity": "raises"}}
    code, output, run_dir = worker(attempt(recipe=recipe, stage=WORLD_1, mode="Eager"), tmp_path)
    assert code == 11, output
    mark = json.loads((run_dir / "mark-0.json").read_text())
    assert mark["kind"] == "USER_CODE"
    assert "a mistake in somebody's loss" in mark["message"]
    assert "odd_recipes.py" in mark["lastLines"]


def test_a_recipe_that_leaves_by_sys_exit_has_failed_and_says_where(tmp_path: Path) -> None:
    recipe = {"name": "tests.trainer.odd_recipes:build", "config": {"oddity": "leaves"}}
    code, output, run_dir = worker(attempt(recipe=recipe, stage=WORLD_1, mode="Eager"), tmp_path)
    assert code == 11, output
    mark = json.loads((run_dir / "mark-0.json").read_text())
    assert mark["kind"] == "USER_CODE", "without a mark its peers would say they lost it, and be tried again"
    assert "odd_recipes.py" in mark["lastLines"]
