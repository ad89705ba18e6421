"""Which limit applies to this process, read from control group files of both versions."""

from pathlib import Path

import pytest

from ctj_trainer.memory import memory_use, oom_kills, pod_memory_limit, process_limit

MACHINE = pod_memory_limit(cgroup=Path("/does/not/exist"))


def groups(tmp_path: Path, line: str, files: dict[str, str]) -> dict[str, Path]:
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "self").write_text(line)
    return {"cgroup": tmp_path / "self", "root": tmp_path / "cgroup"}


@pytest.mark.parametrize(
    ("line", "files", "limit"),
    [
        ("0::/pod/box\n", {"pod/memory.max": "1000\n", "pod/box/memory.max": "max\n"}, 1000),
        ("0::/pod/box\n", {"pod/memory.max": "1000\n", "pod/box/memory.max": "500\n"}, 500),
        ("0::/seen/from/the/node\n", {"memory.max": "700\n"}, 700),
        ("4:memory:/pod\n0::/\n", {"memory/pod/memory.limit_in_bytes": "900\n"}, 900),
        ("4:memory:/pod\n", {"memory/pod/memory.limit_in_bytes": "9223372036854771712\n"}, MACHINE),
        ("0::/\n", {}, MACHINE),
    ],
)
def test_the_tightest_limit_counts(tmp_path: Path, line: str, files: dict[str, str], limit: int) -> None:
    assert pod_memory_limit(**groups(tmp_path, line, files)) == limit


@pytest.mark.parametrize(
    ("line", "files", "kills"),
    [
        ("0::/pod\n", {"pod/memory.events": "oom 3\noom_kill 2\n"}, 2),
        ("0::/seen/from/the/node\n", {"memory.events": "oom_kill 1\n"}, 1),
        ("4:memory:/pod\n", {"memory/pod/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n"}, 4),
        ("0::/\n", {}, 0),
    ],
)
def test_kills_by_the_kernel_are_counted(tmp_path: Path, line: str, files: dict[str, str], kills: int) -> None:
    assert oom_kills(**groups(tmp_path, line, files)) == kills


def test_processes_share_the_machine() -> None:
    whole = process_limit(None, local_processes=1)
    assert whole is not None
    assert process_limit(None, local_processes=4) == whole // 4


def test_a_peak_does_not_fall() -> None:
    before = memory_use()
    block = bytearray(64 << 20)
    during = memory_use()
    del block
    after = memory_use()
    assert during.used - before.used > 60 << 20
    assert during.peak >= during.used - (1 << 20)
    assert after.peak >= during.peak
    assert after.peak_ratio is not None
    assert 0 < after.peak_ratio < 1
