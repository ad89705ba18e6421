"""What is printed ends quietly where nobody reads it, and what is read is bounded."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.workplace import Workplace

from ctj_api.checks.yaml_text import MAX_FILE_BYTES
from ctj_operator.local.files import replace_json
from ctj_operator.local.store import Store

CTJ = (sys.executable, "-m", "ctj_operator.cli.main")
SIGPIPE_EXIT = -13


@pytest.fixture
def store(store: Store) -> Store:
    """A job with more output than a pipe holds."""
    child = store.children / "tiny-single-1"
    (child / "node-0").mkdir(parents=True)
    replace_json(child / "child.json", {"name": "tiny-single-1", "uid": "u", "attempt": 1, "nodes": 1})
    (child / "node-0" / "log").write_text("[rank 0] a line of no great interest\n" * 50_000)
    return store


@pytest.mark.parametrize(
    "command",
    [
        ("logs", "tiny"),
        ("explain", "tiny"),
        ("list",),
        ("list", "--json"),
        ("validate", "job.yaml", "job.yaml"),
        ("watch", "tiny", "--plain"),
        ("--help",),
    ],
    ids=" ".join,
)
def test_a_command_whose_reader_is_gone_ends_quietly(place: Workplace, store: Store, command: tuple[str, ...]) -> None:
    place.write_job()
    reading, writing = os.pipe()
    process = subprocess.Popen([*CTJ, *command], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    if command[0] == "logs":
        assert os.read(reading, 20)
    os.close(reading)
    _, err = process.communicate(timeout=60)
    assert err == ""
    assert process.returncode == SIGPIPE_EXIT


def test_a_run_whose_reader_is_gone_ends_as_the_job_did_and_writes_its_page(place: Workplace) -> None:
    reading, writing = os.pipe()
    process = subprocess.Popen([*CTJ, "run", str(place.write_job())], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    os.close(reading)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert place.status()["phase"] == "Succeeded"
    assert (place.job_folder / "report.html").exists()


def test_a_run_that_is_refused_with_nobody_reading_says_so_and_only_so(place: Workplace) -> None:
    reading, writing = os.pipe()
    process = subprocess.Popen([*CTJ, "run", "nowhere.yaml"], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    os.close(reading)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert err.startswith("ctj: nowhere.yaml")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("command", ["validate", "run"])
def test_a_file_that_is_far_too_large_is_refused_unread(place: Workplace, command: str) -> None:
    large = place.folder / "large.yaml"
    with large.open("wb") as file:
        file.truncate(1 << 40)
    ended = place.ctj(command, str(large))
    assert ended.code == 2
    assert f"{1 << 40} bytes" in ended.out + ended.err


@pytest.mark.parametrize("endless", ["/dev/zero", "-"])
def test_what_has_no_known_end_is_read_to_a_limit(place: Workplace, endless: str) -> None:
    with Path("/dev/zero").open("rb") as zeros:
        done = subprocess.run(
            [*CTJ, "validate", endless, "--json"], stdin=zeros, capture_output=True, text=True, check=False, timeout=60
        )
    assert done.returncode == 2, done.stderr
    assert f"more than {MAX_FILE_BYTES} bytes" in json.loads(done.stdout)["problems"][0]["value"]


def test_a_job_that_is_piped_in_is_judged(place: Workplace) -> None:
    text = place.write_job().read_text()
    done = subprocess.run([*CTJ, "validate", "-"], input=text, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "-: valid"), done.stderr
