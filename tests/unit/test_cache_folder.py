"""Where compiled code lies on a node: whatever is wrong with the folder costs time, never the job."""

import errno
import os
import shutil
import stat
import struct
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import pytest

from ctj_api import names
from ctj_trainer.compile import cache_folder
from ctj_trainer.compile.cache_folder import (
    LEAST_FREE_BYTES,
    cache_key,
    holds_collectives,
    prepare_compile_cache,
    rank_folder,
    remove_damaged,
    wipe,
)

LONG_AGO = time.time() - 3600


def library(path: Path, *, cut: int = 0, written: float = LONG_AGO) -> Path:
    """A shared library as far as its header goes: sections of 5 x 64 bytes after 1,000 bytes of code."""
    header = bytearray(64)
    header[:5] = b"\x7fELF\x02"
    struct.pack_into("<Q", header, 0x28, 1064)
    struct.pack_into("<HH", header, 0x3A, 64, 5)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((bytes(header) + bytes(1000 + 5 * 64))[: 1384 - cut])
    os.utime(path, (written, written))
    return path


def test_compiled_code_is_kept_per_torch_triton_python_and_hardware(tmp_path: Path) -> None:
    folder, notice = prepare_compile_cache(tmp_path / "cache")
    assert notice is None
    assert folder == tmp_path / "cache" / cache_key()
    assert folder.is_dir()
    assert folder.name.startswith("torch-2.")
    assert "-triton-" in folder.name
    assert f"py{sys.version_info.major}.{sys.version_info.minor}" in folder.name
    assert prepare_compile_cache(tmp_path / "cache") == (folder, None)


def assert_thrown_away(spare: Path, notice: str | None, because: str) -> None:
    assert spare.is_dir()
    assert stat.S_IMODE(spare.stat().st_mode) == 0o700
    assert notice is not None
    assert names.ENV_CACHE_DIR in notice
    assert because in notice
    spare.rmdir()


def test_an_unwritable_cache_is_replaced_for_this_attempt_and_said(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.touch()
    assert_thrown_away(*prepare_compile_cache(blocker), "Not a directory")


def test_a_read_only_cache_is_replaced_for_this_attempt_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> NoReturn:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(cache_folder.tempfile, "TemporaryFile", refuse)
    assert_thrown_away(*prepare_compile_cache(tmp_path), "Read-only file system")


def test_a_full_cache_is_replaced_before_a_compilation_fails_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(
        cache_folder.shutil, "disk_usage", lambda _: usage(total=10**12, used=10**12, free=LEAST_FREE_BYTES // 2)
    )
    assert_thrown_away(*prepare_compile_cache(tmp_path), "32 MiB free, 64 needed")


def test_a_cut_library_goes_at_start_and_whole_ones_stay(tmp_path: Path) -> None:
    folder, _ = prepare_compile_cache(tmp_path)
    whole = library(folder / "ab" / "whole.so")
    cut = library(folder / "ab" / "cut.so", cut=1)
    empty = library(folder / "cd" / "empty.so", cut=1384)
    young = library(folder / "cd" / "young.so", cut=100, written=time.time())  # another job links it at this moment
    poisoned = library(folder / "cd" / "text.so")
    poisoned.write_text("no library")
    os.utime(poisoned, (LONG_AGO, LONG_AGO))
    assert prepare_compile_cache(tmp_path) == (folder, None)
    assert [path.exists() for path in (whole, cut, empty, young, poisoned)] == [True, False, False, True, False]
    assert remove_damaged(folder) == 0


def test_the_libraries_of_this_python_are_whole() -> None:
    import pydantic_core

    folder = Path(pydantic_core.__file__).parent
    before = sorted(folder.iterdir())
    assert any(path.suffix == ".so" for path in before)
    assert not any(cache_folder._is_cut(path, written_before=time.time()) for path in before if path.suffix == ".so")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (None, False),
        ({"max_autotune": True}, False),
        ({"bucket_all_gathers_fx": "none"}, False),
        ({"bucket_all_gathers_fx": "all"}, True),
        ({"reorder_for_compute_comm_overlap": True}, True),
        ({"aten_distributed_optimizations.enable_overlap_scheduling": True}, True),
        ({"reorder_for_compute_comm_overlap_passes": []}, False),
    ],
)
def test_graphs_with_collectives_have_a_folder_per_rank_C10(options: dict[str, object] | None, expected: bool) -> None:
    """C10: generated code holds rank constants that the cache key does not; the volume may be shared by all pods."""
    assert holds_collectives(options) is expected


def test_no_two_ranks_share_a_rank_folder_C10(tmp_path: Path) -> None:
    """C10: by global rank, so that pods differ although they mount the same volume."""
    folder, _ = prepare_compile_cache(tmp_path)
    assert len({rank_folder(folder, rank) for rank in range(64)}) == 64


def test_wiping_leaves_an_empty_folder_also_while_others_write(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    ended = threading.Event()
    errors: list[str] = []

    def write() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            target = folder / f"{number % 7}" / "code.py"
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text("1")
            except (FileNotFoundError, FileExistsError):
                continue  # a miss: it compiles again
            except OSError as error:
                errors.append(str(error))

    thread = threading.Thread(target=write)
    thread.start()
    for _ in range(20):
        wipe(folder)
        assert folder.is_dir()
    ended.set()
    thread.join(10)
    wipe(folder)
    assert list(folder.iterdir()) == []
    assert list(tmp_path.iterdir()) == [folder]
    assert errors == []
