"""`ctj run` with the real trainer: whatever interrupts it, the next run ends with the same model."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
# Where set-up has built DeepSpeed's op: a minute that belongs to no test.
SHARED_OPS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"
SMALL = {
    "apiVersion": "training.ctj.dev/v1alpha1",
    "kind": "CompiledTrainingJob",
    "metadata": {"name": "small"},
    "spec": {
        "recipe": {
            "name": "causal_lm",
            "config": {
                "model": {"hiddenSize": 32, "layers": 2, "heads": 2},
                "data": {"builtin": "python-stdlib", "sequenceLength": 32},
            },
        },
        "training": {"steps": 40, "globalBatchSize": 8, "microBatchSize": 2, "checkpoint": {"everySteps": 2}},
        "ladder": [
            {"name": "single", "strategy": "single", "steps": 8},
            {"name": "ddp", "strategy": "ddp", "processesPerNode": 2},
        ],
        "compile": {"keep": "IfCorrect"},
    },
}


class Run:
    """One job in a folder of its own; the compile cache is shared by this file's tests, as it is in life."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        self.job = folder / "small.yaml"
        self.job.write_text(yaml.safe_dump(SMALL))
        self.checkpoints = folder / "ctj-runs" / "small" / "checkpoints"
        self._cache = cache

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "ctj_operator.cli.main", *arguments],
            cwd=self.folder,
            env={**os.environ, "XDG_CACHE_HOME": str(self._cache), "TORCH_EXTENSIONS_DIR": str(SHARED_OPS)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self) -> str:
        process = self.start("run", str(self.job))
        out, _ = process.communicate(timeout=400)
        assert process.returncode == 0, out
        return out

    def records(self) -> list[dict[str, Any]]:
        lines = [
            line for path in sorted(self.checkpoints.glob("*/steps.jsonl")) for line in path.read_text().splitlines()
        ]
        return [json.loads(line) for line in lines]

    def losses(self) -> dict[int, float]:
        """Return each step's loss, as the newest attempt that made the step saw it."""
        return {record["step"]: record["loss"] for record in self.records()}

    def until_step(self, step: int) -> None:
        self.until(lambda: any(record["step"] >= step for record in self.records()))

    def until(self, reached: Callable[[], bool], *, seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < deadline, "it did not come to that"
            time.sleep(0.02)

    def trainers(self) -> list[int]:
        """Return every process below the runner: supervisor, agent, workers and their compile processes."""
        needle = f"CTJ_CHECKPOINT_ROOT={self.checkpoints}".encode()
        return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if needle in _read(path)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def run(tmp_path: Path, cache: Path) -> Run:
    return Run(tmp_path, cache)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> dict[int, float]:
    run = Run(tmp_path_factory.mktemp("undisturbed"), cache)
    run.finish()
    return run.losses()


def test_kill_9_of_the_runner_leaves_no_trainer_and_the_next_run_ends_the_same(
    run: Run, undisturbed: dict[int, float]
) -> None:
    process = run.start("run", str(run.job))
    run.until_step(15)
    assert len(run.trainers()) >= 4  # supervisor, agent, two workers
    process.kill()
    process.communicate()
    run.until(lambda: run.trainers() == [], seconds=5)
    run.finish()
    assert run.losses() == pytest.approx(undisturbed, rel=1e-5)


def test_ctrl_c_loses_no_step_and_the_next_run_ends_the_same(run: Run, undisturbed: dict[int, float]) -> None:
    process = run.start("run", str(run.job))
    run.until_step(11)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, out
    assert run.trainers() == []
    reached = run.records()[-1]["step"]
    assert f"The checkpoint of step {reached} is kept." in out
    run.finish()
    made_again = [record["step"] for record in run.records() if record["attempt"] == 3]
    assert made_again[0] == reached + 1
    assert run.losses() == pytest.approx(undisturbed, rel=1e-5)


def test_a_corrupt_checkpoint_is_named_and_the_one_before_it_is_used(run: Run, undisturbed: dict[int, float]) -> None:
    process = run.start("run", str(run.job))
    run.until_step(15)
    process.kill()
    process.communicate()
    run.until(lambda: run.trainers() == [], seconds=5)
    newest = max(run.checkpoints.glob("attempt-00002/step-*/manifest.json")).parent
    victim = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-100])
    run.finish()
    assert run.losses() == pytest.approx(undisturbed, rel=1e-5)
    out, _ = run.start("explain", "small").communicate(timeout=60)
    assert newest.name in out


@pytest.mark.timeout(1200)
def test_the_quickstart_trains_through_all_four_stages_compiled(tmp_path: Path, cache: Path) -> None:
    run = Run(tmp_path, cache)
    example = ROOT / "examples" / "quickstart.yaml"
    run.job.write_text(example.read_text())
    run.checkpoints = tmp_path / "ctj-runs" / "quickstart" / "checkpoints"
    out = run.finish()
    status = json.loads((tmp_path / "ctj-runs/quickstart/status.json").read_text())["status"]
    assert [stage["phase"] for stage in status["ladder"]] == ["Passed"] * 4
    assert [stage["mode"] for stage in status["ladder"]] == ["Compiled"] * 4
    for stage in status["ladder"]:
        assert float(stage["measurements"]["recompilesAfterWarmup"]) == 0
    assert all(record["graphs"] >= 1 for record in run.records() if record["mode"] == "Compiled")
    losses = run.losses()
    assert losses[max(losses)] < 0.75 * losses[1]
    assert (run.checkpoints / "export" / "model.safetensors").exists()
    assert (tmp_path / "ctj-runs/quickstart/report.html").exists()
    assert "quickstart succeeded: 120 steps through 4 stages" in out


OWN_TEXT = (
    "spec.compile.scope=disabled",
    "spec.recipe.config.model={hiddenSize: 32, layers: 2, heads: 2}",
    "spec.recipe.config.data.sequenceLength=32",
    "spec.training.steps=8",
    "spec.training.optimizer.warmupSteps=2",
    "spec.training.evaluation.everySteps=2",
    "spec.training.checkpoint.everySteps=2",
    "spec.ladder[0].steps=4",
)


def test_the_own_text_example_uses_tokenizer_evaluation_tracker_store_and_offload_together(
    tmp_path: Path, cache: Path
) -> None:
    run = Run(tmp_path, cache)
    run.job.write_text((ROOT / "examples" / "own-text.yaml").read_text())
    run.checkpoints = tmp_path / "ctj-runs" / "own-text" / "checkpoints"
    write_texts_and_tokenizer(tmp_path)
    sets = [
        part
        for change in (*OWN_TEXT, f"spec.training.checkpoint.url=file://{tmp_path}/store")
        for part in ("--set", change)
    ]
    process = run.start("run", str(run.job), *sets)
    out, _ = process.communicate(timeout=500)
    assert process.returncode == 0, out
    status = json.loads((tmp_path / "ctj-runs/own-text/status.json").read_text())["status"]
    single, zero3 = status["ladder"]
    assert [gate["name"] for gate in zero3["gates"] if gate["verdict"] == "Passed"].count("learns") == 1
    evaluated = {(r["stage"], r["step"]): r["evaluationLoss"] for r in run.records() if r.get("evaluationLoss")}
    assert float(single["measurements"]["evaluationLoss"]) == evaluated["single", 4]
    assert evaluated["zero3", 4] == pytest.approx(evaluated["single", 4], rel=3e-3)  # replayed: the same weights
    assert {"tokenizer.json", "model.safetensors"} <= {path.name for path in (run.checkpoints / "export").iterdir()}
    assert list((run.checkpoints / "trackers" / "tensorboard" / "own-text").iterdir())
    assert list((tmp_path / "store").glob("default/own-text-*/attempt-00002/step-00000008/manifest.json"))
    assert not list(run.checkpoints.glob("attempt-*/step-*"))


def write_texts_and_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    texts = [path.read_text() for path in sorted((ROOT / "crds" / "ctj_api").glob("*.py"))]
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text("".join(texts[:-2]))
    (folder / "texts" / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[-2:]))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.save(str(folder / "tokenizer.json"))
