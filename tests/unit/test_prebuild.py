"""Set-up says what it cannot build without, and what is built once serves every environment of the same versions."""

import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest

from ctj_trainer import prebuild


class Builder:
    """DeepSpeed's builder of the op: counts how often it has to build."""

    _loaded_ops: ClassVar[dict[str, ModuleType]] = {}
    built = 0

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def is_compatible(self) -> bool:
        return True

    def load(self, **_: bool) -> ModuleType:
        type(self).built += 1
        module = ModuleType(prebuild.OP)
        module.__file__ = str(self._folder / "op.so")
        Path(module.__file__).write_bytes(b"compiled")
        return module


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Builder]:
    """Stands where DeepSpeed is; a library that set-up or another environment left can be loaded."""
    Builder._loaded_ops, Builder.built = {}, 0
    base, cpu = ModuleType("builder"), ModuleType("cpu")
    base.OpBuilder = Builder  # type: ignore[attr-defined]
    cpu.ShareMemCommBuilder = lambda: Builder(tmp_path)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed.ops.op_builder.builder", base)
    monkeypatch.setitem(sys.modules, "deepspeed.ops.op_builder.cpu", cpu)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setattr(prebuild, "_load", lambda path: ModuleType("loaded") if path.exists() else None)
    return Builder


def test_without_a_compiler_it_says_what_needs_one_and_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert prebuild.main() == 1
    message = capsys.readouterr().err
    assert "no C++ compiler (no-such-compiler)" in message
    assert "apt-get install g++" in message


def test_the_op_is_built_once_for_all_environments_that_share_a_home(builder: type[Builder]) -> None:
    prebuild.hand_over()
    assert builder.built == 1
    builder._loaded_ops = {}  # another process, of another checkout
    prebuild.hand_over()
    assert builder.built == 1
    assert builder._loaded_ops[prebuild.OP].__name__ == "loaded"
    assert prebuild.shared_library().read_bytes() == b"compiled"
    assert [path.name for path in prebuild.shared_library().parent.iterdir()] == [f"{prebuild.OP}.so"]


def test_other_versions_have_an_op_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    here = prebuild.shared_library()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9" if name == "deepspeed" else "1.0")
    assert prebuild.shared_library() != here


def test_a_folder_that_cannot_be_written_costs_a_build_and_nothing_else(
    builder: type[Builder], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "extensions").write_text("a file where the folder should be")
    prebuild.hand_over()
    assert builder.built == 1
    assert "every environment builds its own op" in capsys.readouterr().err
