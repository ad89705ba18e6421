"""Compiled code goes from one attempt to the next, and none of it runs unless its digest came another way."""

import os
import tarfile
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from ctj_api.attempt import CacheArchive
from ctj_api.names import CACHE_FOLDER
from ctj_trainer.compile import archive as archives
from ctj_trainer.compile.archive import ArchiveError, fetch, fetch_once, forget_others, publish

CODE = {"ab/code.py": b"answer = 42\n", "ab/code.so": b"\x7fELF", "fxgraph/xy/entry": b"pickle"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The cache of the node that compiled."""
    made = tmp_path / "node-1" / "cache"
    for name, content in CODE.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_bytes(content)
    (made / "ab" / "code.so").chmod(0o755)
    (made / "locks").mkdir()
    (made / "locks" / "code.lock").touch()
    (made / "ab" / ".123.tmp").write_text("another process is writing this")
    return made


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The empty cache of another node."""
    made = tmp_path / "node-2" / "cache"
    made.mkdir(parents=True)
    return made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def published(folder: Path, root: Path) -> CacheArchive:
    archive = publish(folder, root, key="torch-2.15.0-cpu")
    assert archive is not None
    return archive


def path_of(archive: CacheArchive, root: Path) -> Path:
    return root / CACHE_FOLDER / f"{archive.digest}.tar"


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".fetched"))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_another_node_gets_the_same_files_without_locks_and_drafts(folder: Path, root: Path, other: Path) -> None:
    archive = published(folder, root)
    assert fetch(archive, root, other) == len(CODE)
    assert content(other) == CODE
    assert os.access(other / "ab" / "code.so", os.X_OK)
    assert [path.name for path in other.parent.iterdir()] == ["cache"]  # nothing is left beside it


def test_equal_content_has_an_equal_digest_whenever_it_was_written(folder: Path, root: Path) -> None:
    first = published(folder, root)
    os.utime(folder / "ab" / "code.py", (1, 1))
    assert published(folder, root) == first


def test_an_archive_is_fetched_once_and_again_after_a_wipe(folder: Path, root: Path, other: Path) -> None:
    archive = published(folder, root)
    assert fetch_once(archive, root, other) == len(CODE)
    assert fetch_once(archive, root, other) == 0
    (other / f".fetched-{archive.digest}").unlink()
    assert fetch_once(archive, root, other) == len(CODE)


@pytest.mark.parametrize("harm", ["poisoned", "truncated", "lengthened", "replaced", "missing"])
def test_a_harmed_archive_is_not_used_and_nothing_of_it_is_left(
    folder: Path, root: Path, other: Path, harm: str
) -> None:
    archive = published(folder, root)
    path = path_of(archive, root)
    whole = path.read_bytes()
    if harm == "poisoned":
        path.write_bytes(whole.replace(b"answer = 42", b"answer = 43"))
    elif harm == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif harm == "lengthened":
        path.write_bytes(whole + bytes(50 * 2**20))
    elif harm == "replaced":  # by a file that is in order and vouches for itself
        (folder / "ab" / "code.py").write_bytes(b"import os\n")
        path_of(published(folder, root), root).replace(path)
    else:
        path.unlink()
    with pytest.raises(ArchiveError, match=r"compiled again"):
        fetch(archive, root, other)
    assert content(other) == {}
    assert [found.name for found in other.parent.iterdir()] == ["cache"]


@pytest.mark.parametrize("name", ["../outside.py", "/tmp/ctj-outside.py"])
def test_an_archive_writes_nothing_outside_the_cache_whatever_its_digest(root: Path, other: Path, name: str) -> None:
    (root / CACHE_FOLDER).mkdir(parents=True)
    draft = root / "evil.tar"
    with tarfile.open(draft, "w") as made:
        made.addfile(tarfile.TarInfo(name))
    digest = archives._digest(draft)
    draft.replace(root / CACHE_FOLDER / f"{digest}.tar")
    archive = CacheArchive(key="k", digest=digest, num_bytes=20_000)
    with suppress(ArchiveError):  # or it lands inside, without its leading slash
        fetch(archive, root, other)
    assert not (other.parent / "outside.py").exists()
    assert not Path("/tmp/ctj-outside.py").exists()


def test_what_was_verified_replaces_what_was_broken_here(folder: Path, root: Path, other: Path) -> None:
    (other / "ab").mkdir()
    (other / "ab" / "code.so").write_bytes(b"\x7fE")
    fetch(published(folder, root), root, other)
    assert content(other) == CODE


def test_an_archive_has_at_most_its_size_and_the_newest_files(folder: Path, root: Path, other: Path) -> None:
    for number in range(10):
        (folder / f"{number}.bin").write_bytes(bytes([number]) * 1000)
        os.utime(folder / f"{number}.bin", (1000 + number, 1000 + number))
    for name in CODE:
        os.utime(folder / name, (1, 1))
    archive = publish(folder, root, key="k", most_bytes=3500)
    assert archive is not None
    fetch(archive, root, other)
    assert sorted(content(other)) == ["7.bin", "8.bin", "9.bin"]


def test_an_empty_cache_is_not_published(root: Path, other: Path) -> None:
    assert publish(other, root, key="k") is None
    assert not root.exists()


def test_an_unwritable_root_is_an_error_that_the_caller_turns_into_a_notice(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Not a directory"):
        publish(folder, tmp_path / "file", key="k")


def test_older_archives_go_once_a_newer_one_is_there(folder: Path, root: Path) -> None:
    old = published(folder, root)
    (folder / "more.py").touch()
    new = published(folder, root)
    forget_others(root, new)
    assert not path_of(old, root).exists()
    assert path_of(new, root).exists()


def test_two_pods_may_fetch_into_one_folder_at_once(folder: Path, root: Path, other: Path) -> None:
    archive = published(folder, root)
    counts: list[int] = []
    threads = [threading.Thread(target=lambda: counts.append(fetch(archive, root, other))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert counts == [len(CODE)] * 4
    assert content(other) == CODE
