"""Tools, cache folder, variables and versions: judged from facts, each rule broken by three and kept by two."""

from pathlib import Path
from typing import Any

import pytest

from ctj_trainer.checks import machine
from ctj_trainer.checks.finding import Finding, Verdict
from ctj_trainer.checks.machine import Folder, Gpu

BLACKWELL = Gpu(capability=(12, 0), triton=True, ptxas=(12, 4))
PLENTY = 10 * 1024**3


def verdict(findings: list[Finding]) -> Verdict:
    (finding,) = findings
    assert finding.verdict is not Verdict.VIOLATING or finding.remedy
    return finding.verdict


def test_a_missing_or_failing_compiler_is_violating(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'no stdc++' >&2\nexit 1\n", encoding="utf-8")
    broken.chmod(0o755)
    (missing,) = machine.judge_compiler({"CXX": "no-such-compiler"})
    assert missing.evidence == "CXX is 'no-such-compiler', which is not there"
    (failing,) = machine.judge_compiler({"CXX": str(broken)})
    assert failing.evidence == "exit code 1: no stdc++"
    monkeypatch.setenv("PATH", str(tmp_path))
    (nothing,) = machine.judge_compiler({})
    assert nothing.evidence.startswith("neither g++")
    assert {f.verdict for f in (missing, failing, nothing)} == {Verdict.VIOLATING}


@pytest.mark.parametrize("environment", [{}, {"CXX": "g++"}])
def test_a_compiler_that_builds_is_compliant(environment: dict[str, str]) -> None:
    assert verdict(machine.judge_compiler(environment)) is Verdict.COMPLIANT


@pytest.mark.parametrize(
    "gpu",
    [BLACKWELL, Gpu(capability=(9, 0), triton=False, ptxas=None), Gpu(capability=(9, 0), triton=True, ptxas=None)],
)
def test_an_assembler_that_does_not_fit_is_violating(gpu: Gpu) -> None:
    assert verdict(machine.judge_gpu(gpu, {})) is Verdict.VIOLATING


def test_an_old_assembler_for_blackwell_is_told_the_variable() -> None:
    assert machine.judge_gpu(BLACKWELL, {})[0].rewrite.startswith("export TRITON_PTXAS_PATH=")


@pytest.mark.parametrize(
    "gpu", [Gpu(capability=(9, 0), triton=True, ptxas=(12, 4)), Gpu(capability=(12, 0), triton=True, ptxas=(12, 8))]
)
def test_an_assembler_that_fits_is_compliant(gpu: Gpu) -> None:
    assert verdict(machine.judge_gpu(gpu, {})) is Verdict.COMPLIANT


def test_without_a_gpu_the_assembler_is_not_judged() -> None:
    assert verdict(machine.judge_gpu(None, {})) is Verdict.NOT_APPLICABLE


@pytest.mark.parametrize(
    ("changes", "environment", "evidence"),
    [
        ({"writable": False}, {}, "cannot be written"),
        ({"free_bytes": 1024}, {}, "MiB free"),
        ({"filesystem": "nfs4"}, {}, "ranks of several nodes"),
        ({"torn": ("a.so",)}, {}, "CppCompileError"),
        ({}, {"TORCH_COMPILE_FORCE_DISABLE_CACHES": "1"}, "switches the cache off"),
    ],
)
def test_a_bad_cache_folder_is_violating(changes: dict[str, Any], environment: dict[str, str], evidence: str) -> None:
    facts: dict[str, Any] = {"path": Path("/cache"), "writable": True, "free_bytes": PLENTY} | changes
    (finding,) = machine.judge_cache(Folder(**facts), environment)
    assert finding.verdict is Verdict.VIOLATING
    assert evidence in finding.evidence


def test_a_folder_that_does_not_exist_yet_and_one_with_whole_files_are_compliant(tmp_path: Path) -> None:
    assert verdict(machine.judge_cache(machine.look_at_folder(tmp_path / "new" / "cache"), {})) is Verdict.COMPLIANT
    (tmp_path / "empty").mkdir()
    assert verdict(machine.judge_cache(machine.look_at_folder(tmp_path / "empty"), {})) is Verdict.COMPLIANT


def test_cut_shared_objects_are_found(tmp_path: Path) -> None:
    import _socket

    whole = Path(_socket.__file__).read_bytes()
    (tmp_path / "whole.so").write_bytes(whole)
    (tmp_path / "cut.so").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.so").write_bytes(b"")
    assert machine.look_at_folder(tmp_path).torn == ("cut.so", "empty.so")


@pytest.mark.parametrize(
    "environment",
    [
        {"TORCH_COMPILE_DISABLE": "1"},
        {"TORCHDYNAMO_DISABLE": "1"},
        {"ACCELERATE_DYNAMO_USE_DYNAMIC": "False"},
        {"CUDA_LAUNCH_BLOCKING": "1"},
    ],
)
def test_variables_that_defeat_compilation_are_violating(environment: dict[str, str]) -> None:
    (finding,) = machine.judge_compile_environment(environment)
    assert finding.verdict is Verdict.VIOLATING
    assert finding.rewrite == f"unset {next(iter(environment))}"


@pytest.mark.parametrize("environment", [{}, {"TORCHDYNAMO_DISABLE": "0", "ACCELERATE_DYNAMO_USE_DYNAMIC": "True"}])
def test_other_values_of_them_are_compliant(environment: dict[str, str]) -> None:
    assert verdict(machine.judge_compile_environment(environment)) is Verdict.COMPLIANT


@pytest.mark.parametrize(
    "environment",
    [
        {"NCCL_SOCKET_IFNAME": "ib0"},
        {"GLOO_SOCKET_IFNAME": "eth9,eth0"},
        {"NCCL_ASYNC_ERROR_HANDLING": "1"},
        {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"},
        {"NCCL_P2P_DISABLE": "1"},
        {"NCCL_GRAPH_REGISTER": "1"},
    ],
)
def test_conflicting_network_variables_are_violating(environment: dict[str, str]) -> None:
    (finding,) = machine.judge_network_environment(environment, interfaces=["lo", "eth0"])
    assert finding.verdict is Verdict.VIOLATING
    assert finding.subject in environment


@pytest.mark.parametrize(
    "environment", [{}, {"NCCL_SOCKET_IFNAME": "eth", "GLOO_SOCKET_IFNAME": "^lo", "NCCL_GRAPH_REGISTER": "0"}]
)
def test_network_variables_that_fit_are_compliant(environment: dict[str, str]) -> None:
    assert verdict(machine.judge_network_environment(environment, interfaces=["lo", "eth0"])) is Verdict.COMPLIANT


@pytest.mark.parametrize(
    ("installed", "python"),
    [
        ({"torch": "2.12.1"}, (3, 11)),
        ({"torch": "2.15.0", "accelerate": "1.14.0"}, (3, 11)),
        ({"torch": "2.15.0", "deepspeed": "0.14.2"}, (3, 11)),
        ({"torch": "2.15.0"}, (3, 15)),
    ],
)
def test_versions_known_to_fail_together_are_violating(installed: dict[str, str], python: tuple[int, int]) -> None:
    assert verdict(machine.judge_versions(installed, python=python)) is Verdict.VIOLATING


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ({"torch": "2.15.0+cpu", "accelerate": "1.15.0", "deepspeed": "0.19.8"}, "the combination that is tested"),
        ({"torch": "2.14.1"}, "not tested together: torch 2.14.1"),
    ],
)
def test_other_versions_are_compliant_and_told_apart(installed: dict[str, str], said: str) -> None:
    (finding,) = machine.judge_versions(installed, python=(3, 12))
    assert finding.verdict is Verdict.COMPLIANT
    assert said in finding.evidence


def test_this_machine_is_judged_as_a_whole(tmp_path: Path) -> None:
    rules = [finding.rule for finding in machine.check_machine({}, cache=tmp_path)]
    expected = [
        machine.COMPILER,
        machine.TRITON,
        machine.CACHE,
        machine.COMPILE_ENV,
        machine.NETWORK_ENV,
        machine.VERSIONS,
    ]
    assert rules == [rule.name for rule in expected]
