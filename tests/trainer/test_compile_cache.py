"""The compile cache of an attempt: broken, it costs a compilation and never the attempt; what is in it travels."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ctj_trainer.compile.archive import fetch, publish
from ctj_trainer.compile.board import alone
from ctj_trainer.compile.cache import CompileCache, cache_trouble
from ctj_trainer.compile.cache_folder import ENV_FOLDER, cache_key, prepare_compile_cache
from ctj_trainer.compile.policy import CompilePolicy
from ctj_trainer.ranks import Ranks

POLICY = CompilePolicy()
TOO_SHORT = "OSError: {folder}/ab/code.main.so: file too short"


@dataclass(kw_only=True)
class Record:
    """As much of torch's record of a compilation as is looked at."""

    fail_type: str | None
    fail_reason: str | None


def failed(reason: str, *, kind: str = "BackendCompilerFailed") -> Record:
    return Record(fail_type=kind, fail_reason=reason)


class Alone(Ranks):
    """One rank, without a process group."""

    def gather(self, value: Any) -> list[Any]:
        return [value]


class Compiler:
    """Fails in the first `failures` runs as a broken cache makes it fail; each run is one compilation."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, *, failures: int) -> None:
        self.records: list[Record] = []
        self.folders: list[str] = []
        self.started_over = 0
        self._failures = failures
        self._text = TOO_SHORT.format(folder=folder)
        monkeypatch.setattr("torch._dynamo.utils.get_compilation_metrics", lambda: list(self.records))

    def run(self) -> None:
        self.folders.append(os.environ[ENV_FOLDER])
        is_broken = len(self.folders) <= self._failures
        self.records.append(failed(self._text) if is_broken else Record(fail_type=None, fail_reason=None))

    def start_over(self) -> None:
        self.started_over += 1


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    made = tmp_path / cache_key()
    (made / "ab").mkdir(parents=True)
    (made / "ab" / "code.main.so").write_bytes(b"\x7fE")
    monkeypatch.setenv(ENV_FOLDER, str(made))
    yield made
    torch.compiler.config.force_disable_caches = False


def mend(compiler: Compiler) -> list[str]:
    said: list[str] = []
    ranks = Alone(
        rank=0,
        local_rank=0,
        world_size=1,
        local_world_size=1,
        device=torch.device("cpu"),
        control=None,
        board=alone(),
    )
    cache = CompileCache(POLICY, rank=0)
    guard: Any = compiler  # of a guard only `start_over` is used
    cache.mended(compiler.run, guard=guard, ranks=ranks, notice=said.append)
    return said


def test_a_whole_cache_is_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(monkeypatch, folder, failures=0)
    compiler.records.append(failed(TOO_SHORT.format(folder=folder)))  # of an earlier stage of this process
    assert mend(compiler) == []
    assert (folder / "ab" / "code.main.so").exists()
    assert len(compiler.folders) == 1


def test_a_broken_cache_is_wiped_once_and_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(monkeypatch, folder, failures=1)
    [said] = mend(compiler)
    assert said.startswith("the compile cache is broken on rank 0 (BackendCompilerFailed: OSError:")
    assert "file too short" in said
    assert "wiped, and compiled again" in said
    assert list(folder.iterdir()) == []
    assert compiler.folders == [str(folder)] * 2
    assert compiler.started_over == 1
    assert not torch.compiler.config.force_disable_caches


def test_a_cache_that_stays_broken_is_switched_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(monkeypatch, folder, failures=2)
    first, second = mend(compiler)
    assert "wiped" in first
    assert "switched off for this attempt" in second
    assert compiler.folders[2] != str(folder)
    assert torch.compiler.config.force_disable_caches
    Path(compiler.folders[2]).rmdir()


def test_a_compiler_that_fails_for_another_reason_does_not_cost_the_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler(monkeypatch, folder, failures=1)
    compiler._text = "InvalidCxxCompiler: No working C++ compiler found"
    assert mend(compiler) == []
    assert (folder / "ab" / "code.main.so").exists()


@pytest.mark.parametrize(
    ("reason", "is_blamed"),
    [
        ("OSError: [Errno 28] No space left on device", True),
        ("ImportError: x.so: undefined symbol: kernel", True),
        ("FileNotFoundError: [Errno 2] No such file or directory: '{folder}/ab/x.py'", True),
        ("PermissionError: [Errno 13] Permission denied: '{folder}/ab'", True),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/data/labels.txt'", False),
        ("RuntimeError: shape mismatch", False),
    ],
)
def test_only_what_lies_in_the_cache_is_blamed_on_it(folder: Path, reason: str, is_blamed: bool) -> None:
    assert bool(cache_trouble([failed(reason.format(folder=folder))])) is is_blamed


@pytest.mark.parametrize("rank", [0, 3])
def test_graphs_with_collectives_go_into_the_ranks_own_folder_C10(folder: Path, rank: int) -> None:
    """C10: in every pod and also on a shared volume, since ranks are numbered over all pods."""
    CompileCache(POLICY, rank=rank)
    assert os.environ[ENV_FOLDER] == str(folder)
    CompileCache(CompilePolicy(options={"bucket_all_gathers_fx": "all"}), rank=rank)
    assert os.environ[ENV_FOLDER] == str(folder / f"rank-{rank}")


def test_what_was_compiled_is_published_and_an_archive_that_served_is_passed_on(folder: Path, tmp_path: Path) -> None:
    cache, root = CompileCache(POLICY, rank=0), tmp_path / "checkpoints"
    made = cache.publish(root, before=None, compiled=True)
    assert made is not None
    assert made.key == cache_key()
    (folder / "more.py").touch()
    assert cache.publish(root, before=made, compiled=False) == made
    newer = cache.publish(root, before=made, compiled=True)
    assert newer is not None
    assert newer.digest != made.digest
    assert [path.stem for path in (root / "compile-cache").iterdir()] == [newer.digest]


def compiling(folder: Path) -> "subprocess.Popen[str]":
    environment = os.environ | {ENV_FOLDER: str(folder), "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("compile_once.py")
    return subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment)


def result_of(process: "subprocess.Popen[str]") -> dict[str, float]:
    output, _ = process.communicate()
    assert process.returncode == 0  # a cut library would be a bus error
    result: dict[str, float] = json.loads(output)
    return result


def test_code_compiled_by_two_processes_at_once_runs_on_another_node_and_after_its_libraries_were_cut(
    tmp_path: Path,
) -> None:
    """With the real compiler: one folder for two, an archive for a third, and what a full disk leaves of a library."""
    first, _ = prepare_compile_cache(tmp_path / "node-1")
    both = [result_of(process) for process in [compiling(first), compiling(first)]]
    assert both[0]["value"] == both[1]["value"]
    archive = publish(first, tmp_path, key=cache_key())
    assert archive is not None

    second, _ = prepare_compile_cache(tmp_path / "node-2")
    fetch(archive, tmp_path, second)
    libraries = list(second.rglob("*.so"))
    assert libraries
    for library in libraries:
        os.truncate(library, library.stat().st_size // 2)
        os.utime(library, (1, 1))
    assert prepare_compile_cache(tmp_path / "node-2") == (second, None)
    found = result_of(compiling(second))
    assert (found["hits"], found["misses"]) == (2, 0)
    assert (found["value"], found["gradient"]) == (both[0]["value"], both[0]["gradient"])
