"""The house stays as drawn: no package marker where it would break Python, nothing generated out of date."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("folder", ["operator", "trainer", "crds"])
def test_a_folder_that_only_holds_a_package_never_becomes_one(folder: str) -> None:
    # operator/__init__.py would shadow the standard library's `operator` for every Python started in the root.
    assert not (ROOT / folder / "__init__.py").exists()


def test_python_started_in_the_root_still_finds_its_own_operator_module() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import operator; print(operator.__file__)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(ROOT) not in done.stdout


def test_the_contract_and_the_deciding_side_start_without_torch() -> None:
    code = "import sys, ctj_operator.core.decide; sys.exit(bool({'torch', 'kubernetes'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_test_file_is_in_a_tier() -> None:
    tiers = {"unit", "contract", "trainer", "cluster", "page"}
    strays = [
        path for path in (ROOT / "tests").rglob("test_*.py") if path.relative_to(ROOT / "tests").parts[0] not in tiers
    ]
    assert strays == []
