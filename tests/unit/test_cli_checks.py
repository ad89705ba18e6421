"""What `ctj check` and `ctj doctor` ask the trainer, show, and return."""

import io
import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ctj_api.exit_codes import RunExit
from ctj_operator.cli import checks, main
from ctj_operator.cli.trainer import ask_trainer
from ctj_operator.local.refusal import Refusal

QUICKSTART = Path("examples/quickstart.yaml")
BROKEN = {
    "check": "ddp",
    "rule": "gradients are all-reduced in backward only",
    "verdict": "violating",
    "subject": "blocks.0",
    "location": "model.py:12",
    "evidence": "1 x allreduce during forward",
    "remedy": "move it out of the model",
    "rewrite": "y = x[0]",
}
HOLDS = {"check": "amp", "rule": "one dtype", "verdict": "compliant", "evidence": "[4] tensors"}
MACHINE = {"check": "toolchain", "rule": "a C++ compiler works", "verdict": "violating", "remedy": "apt install g++"}
ITEM = {
    "list": "Offload with compile",
    "question": "Is the guard in CI?",
    "verdict": "advice",
    "found": [],
    "answer": "Run ctj check",
    "rules": [],
}


def shown(answer: dict[str, Any]) -> str:
    output = io.StringIO()
    checks.show(answer, Console(file=output, width=160, color_system=None))
    return output.getvalue()


@pytest.mark.parametrize(
    ("findings", "code"),
    [
        ([HOLDS], RunExit.SUCCEEDED),
        ([], RunExit.SUCCEEDED),
        ([HOLDS, BROKEN], RunExit.FAILED),
        ([MACHINE, BROKEN], RunExit.FAILED),
        ([MACHINE, HOLDS], RunExit.ENVIRONMENT),
    ],
)
def test_the_exit_code_tells_violations_from_a_machine_that_lacks_something(findings: Any, code: RunExit) -> None:
    assert checks.exit_code({"findings": findings}) is code


def test_a_violation_is_shown_with_place_evidence_remedy_and_code() -> None:
    text = shown({"findings": [HOLDS, BROKEN], "items": [ITEM]})
    for part in ("blocks.0 (model.py:12)", "1 x allreduce", "remedy: move it out", "write:  y = x[0]", "[4] tensors"):
        assert part in text
    assert "Offload with compile" in text
    assert "Is the guard in CI?" in text
    assert text.rstrip().endswith("1 violation in 2 findings; --json for programs")


def test_nothing_violated_is_said() -> None:
    assert "1 finding: nothing violated" in shown({"findings": [HOLDS]})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the trainer was asked last."""
    seen: dict[str, Any] = {}

    def answer(module: str, arguments: Any = (), *, question: Any = None, seconds: float = 0) -> dict[str, Any]:
        seen.update(module=module, arguments=list(arguments), question=question)
        return {"findings": [HOLDS]}

    monkeypatch.setattr(checks, "ask_trainer", answer)
    return seen


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["ctj", *arguments])
    with pytest.raises(SystemExit) as ended:
        main.main()
    return int(ended.value.code or 0)


def test_a_job_brings_its_recipe_and_how_it_trains(monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]) -> None:
    assert run(monkeypatch, "check", "-f", str(QUICKSTART)) == 0
    assert asked["module"] == "ctj_trainer.checks"
    assert asked["arguments"] == ["check"]
    assert asked["question"]["recipe"]["name"] == "causal_lm"
    assert asked["question"]["spec"]["training"]["globalBatchSize"] == 16


def test_a_recipe_of_ones_own_takes_its_config_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("width: 8\n", encoding="utf-8")
    assert run(monkeypatch, "check", "mine:build", "--config", str(config), "--json") == 0
    assert asked["question"] == {"recipe": {"name": "mine:build", "config": {"width": 8}}}


def test_a_script_is_named_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(9)\n", encoding="utf-8")
    assert run(monkeypatch, "check", str(script)) == 0
    assert asked["question"] == {"script": str(script)}


def test_doctor_needs_nothing_and_tells_where_compiled_code_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    assert run(monkeypatch, "doctor", "--cache-dir", str(tmp_path)) == 0
    assert asked["question"] == {"cache": str(tmp_path)}
    assert asked["arguments"] == ["doctor"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check"], "name a recipe or a script"),
        (["check", "no-such.py"], "no script no-such.py"),
        (["doctor", "--isolate"], "--isolate runs a model"),
        (["check", "mine:build", "--config", "no-such.yaml"], "--config no-such.yaml"),
    ],
)
def test_bad_usage_is_one_line(
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    asked: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, *arguments) == RunExit.BAD_SPEC
    assert said in capsys.readouterr().err
    assert asked == {}


def trainer_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CTJ_TRAINER_PYTHON", str(python))


def test_the_trainer_is_asked_on_stdin_and_answers_on_the_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer_that(tmp_path, monkeypatch, 'echo a library says hello; echo "{\\"asked\\": $(cat)}"')
    assert ask_trainer("m", question={"a": 1}) == {"asked": {"a": 1}}


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("echo 'config.width is 0; it must be positive' >&2; exit 2", RunExit.BAD_SPEC, "config.width is 0"),
        ("echo 'No module named torch' >&2; exit 1", RunExit.ENVIRONMENT, "No module named torch"),
    ],
)
def test_what_the_trainer_refuses_and_what_is_missing_are_told_apart(
    body: str, code: RunExit, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer_that(tmp_path, monkeypatch, body)
    with pytest.raises(Refusal, match=said) as refused:
        ask_trainer("m")
    assert refused.value.exit_code is code


def test_json_is_one_object(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "doctor", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"findings": [HOLDS]}
