"""Commands that look at jobs or ask something of them; none of them starts a trainer."""

import json
import re
import shlex
import subprocess
import sys

import pytest
from tests.unit.workplace import Workplace

from ctj_api.attempt import Mode
from ctj_api.status import HoldState, StageStatus, Status
from ctj_operator.local.files import replace_json
from ctj_operator.local.lock import hold
from ctj_operator.local.store import Store


def test_help_comes_without_the_imports_of_any_command() -> None:
    code = "import sys, ctj_operator.cli.main; sys.exit(bool({'rich', 'pydantic', 'yaml'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_help_names_every_command_and_shows_how_to_start(place: Workplace) -> None:
    out = place.ctj("--help").out
    for command in ("run", "validate", "list", "watch", "explain", "report", "logs", "approve", "retry", "pause"):
        assert f"  {command} " in out
    assert "ctj run examples/quickstart.yaml" in out


def test_version_is_the_contracts(place: Workplace) -> None:
    assert place.ctj("--version").out.strip() == "ctj 0.1.0"


def test_an_unknown_job_is_named_with_the_jobs_there_are(place: Workplace, store: Store) -> None:
    ended = place.ctj("explain", "tinny")
    assert ended.code == 2
    assert "'tinny'" in ended.err
    assert "jobs there: tiny" in ended.err


def test_an_unknown_option_is_usage_and_says_so(place: Workplace) -> None:
    ended = place.ctj("run", "--steps", "3")
    assert ended.code == 2
    assert "--steps" in ended.err


def test_validate_prints_every_problem_of_every_file_and_ends_with_2(place: Workplace) -> None:
    good = place.write_job()
    bad = place.folder / "bad.yaml"
    bad.write_text("kind: CompiledTrainingJob\nspec: {surprise: 1}\n")
    ended = place.ctj("validate", str(good), str(bad))
    assert ended.code == 2
    assert f"{good}: valid" in ended.out
    assert "spec.surprise" in ended.out
    assert "spec.recipe" in ended.out
    assert place.ctj("validate", str(good)).code == 0


def test_validate_for_programs_gives_path_value_rule_and_remedy(place: Workplace) -> None:
    job = place.write_job(surprise=1)
    line = json.loads(place.ctj("validate", str(job), "--json").out)
    assert line["valid"] is False
    assert {"path", "value", "rule", "remedy"} <= set(line["problems"][0])


def test_validate_of_a_file_that_is_not_there_is_a_problem_of_that_file(place: Workplace) -> None:
    ended = place.ctj("validate", "nowhere.yaml")
    assert ended.code == 2
    assert "nowhere.yaml" in ended.out


def test_list_shows_each_job_and_who_runs_it(place: Workplace, store: Store) -> None:
    assert place.ctj("list").out.splitlines()[1].split() == ["tiny", "Pending", "-", "0/12", "-", "0", "-"]
    with hold(store.folder, command="ctj run job.yaml"):
        (row,) = (json.loads(line) for line in place.ctj("list", "--json").out.splitlines())
    assert "ctj run job.yaml" in row["runBy"]


def test_list_in_an_empty_folder_says_how_to_start(place: Workplace) -> None:
    assert "ctj run FILE" in place.ctj("list").out


def test_a_folder_kept_by_fresh_is_not_listed_as_a_job(place: Workplace, store: Store) -> None:
    store.folder.rename(store.folder.with_name("tiny.20260101-000000"))
    assert "No jobs" in place.ctj("list").out


@pytest.mark.parametrize("command", ["eager", "pause", "explain"])
def test_printed_commands_work_as_printed_from_any_work_folder(place: Workplace, store: Store, command: str) -> None:
    elsewhere = place.job_folder.parent.parent / "other runs é" / "tiny"
    elsewhere.parent.mkdir()
    store.folder.rename(elsewhere)

    out = place.ctj(command, "tiny", "--work-dir", str(elsewhere.parent)).out

    printed = re.search(r"ctj (run|resume) ('[^']*')", out)
    assert printed is not None, out
    (folder,) = shlex.split(printed[2])
    assert place.ctj("explain", folder).code == 0


def test_watching_a_job_that_nobody_runs_says_where_it_stands_and_ends(place: Workplace, store: Store) -> None:
    ended = place.ctj("watch", "tiny", "--plain")
    assert ended.code == 130
    assert "Pending at step 0; nobody runs it now" in ended.out


def test_explaining_a_job_that_was_stopped_names_the_command_that_goes_on(place: Workplace, store: Store) -> None:
    out = place.ctj("explain", "tiny").out
    assert "Not being run by any process" in out
    assert "ctj run ctj-runs/tiny" in out


def test_explain_shows_step_times_and_after_how_many_steps_compiling_pays(place: Workplace, store: Store) -> None:
    verdict = {"mode": "Compiled", "reason": "Correct", "eagerStepSeconds": 0.5, "compiledStepSeconds": 0.4}
    report = {"attempt": 1, "stage": "single", "exitCode": 0, "compile": {**verdict, "breakEvenSteps": 120}}
    (store.checkpoints / "attempt-00001").mkdir(parents=True)
    replace_json(store.checkpoints / "attempt-00001" / "report.json", report)
    stage = StageStatus(name="single", mode=Mode.COMPILED, compile_reason="Correct")
    store.write_status(Status(attempt=1, stage="single", ladder=[stage]), over=0)
    out = place.ctj("explain", "tiny").out
    assert "Correct (a step takes 0.5 s eager, 0.4 s compiled; compiling pays for itself after 120 steps)" in out


def test_explain_shows_since_when_a_job_is_held(place: Workplace, store: Store) -> None:
    held = HoldState(since="2026-01-01T00:00:00Z", deadline="2026-01-02T00:00:00Z", reason="GateInconclusive")
    store.write_status(Status(hold=held), over=0)
    assert "(since 2026-01-01T00:00:00Z, until 2026-01-02T00:00:00Z)" in place.ctj("explain", "tiny").out


def test_logs_can_be_cut_down_to_one_rank(place: Workplace, store: Store) -> None:
    child = store.children / "tiny-single-1"
    (child / "node-0").mkdir(parents=True)
    replace_json(child / "child.json", {"name": "tiny-single-1", "uid": "u", "attempt": 1, "nodes": 1})
    (child / "node-0" / "log").write_text("[rank 0] one\n[rank 1] two\nsupervisor\n")
    assert place.ctj("logs", "tiny", "--rank", "1").out == "two\n"
    assert "supervisor" in place.ctj("logs", "tiny").out
    ended = place.ctj("logs", "tiny", "--attempt", "4")
    assert (ended.code, "attempts: 1" in ended.err) == (2, True)


def test_logs_say_where_the_middle_of_a_long_one_was_dropped(place: Workplace, store: Store) -> None:
    child = store.children / "tiny-single-1"
    (child / "node-0").mkdir(parents=True)
    replace_json(child / "child.json", {"name": "tiny-single-1", "uid": "u", "attempt": 1, "nodes": 1})
    with (child / "node-0" / "log").open("wb") as log:
        log.write(b"[rank 0] first\n")
        log.seek(3 << 20)
        log.write(b"[rank 0] last\n")
    out = place.ctj("logs", "tiny").out.splitlines()
    assert (out[1], out[-1]) == ("[rank 0] first", "[rank 0] last")
    assert "3 MiB of output were dropped here" in out[-2]


def test_logs_before_any_trainer_started_say_so(place: Workplace, store: Store) -> None:
    assert "has not started any trainer yet" in place.ctj("logs", "tiny").err
