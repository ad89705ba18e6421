"""Names that several sides use have one home, and a person finds each in the reference."""

import re
from pathlib import Path

from ctj_api import names
from ctj_api.exit_codes import ExitCode, reason_of

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("crds", "operator", "trainer", "bench", "scripts", "examples", "docs", "README.md")
VARIABLE = re.compile(r"\bCTJ_[A-Z_]*[A-Z]\b")


def product_files(*suffixes: str) -> list[Path]:
    files = [
        file for part in PRODUCT for file in ([ROOT / part] if (ROOT / part).is_file() else (ROOT / part).rglob("*"))
    ]
    return [file for file in files if file.suffix in suffixes]


def test_every_variable_that_is_read_or_written_about_is_in_the_reference() -> None:
    known = {*names.ENVIRONMENT, *names.ENVIRONMENT_OUTSIDE}
    listed = (ROOT / "docs/reference/names.md").read_text()
    assert [name for name in known if name not in listed] == []
    unknown = {
        (name, str(file.relative_to(ROOT)))
        for file in product_files(".py", ".md", ".yaml", ".toml")
        for name in VARIABLE.findall(file.read_text())
        if name not in known and not f"{name}_".startswith(names.ENV_OPERATOR_PREFIX)
    }
    assert unknown == set(), "give it a home in ctj_api.names, with its meaning in ENVIRONMENT"


def test_a_variable_is_spelled_in_one_place_only() -> None:
    spelled = re.compile(r"""["']CTJ_""")
    elsewhere = [str(file.relative_to(ROOT)) for file in product_files(".py") if spelled.search(file.read_text())]
    assert elsewhere == ["crds/ctj_api/names.py"]


def test_every_exit_code_has_one_word() -> None:
    assert [reason_of(code) for code in (ExitCode.OUT_OF_MEMORY, ExitCode.HANG)] == ["OutOfMemory", "Hang"]
    assert reason_of(ExitCode.COMPILE) == "CompileFailed"
    assert {reason_of(code) for code in (1, 2, 99, 139)} == {"UserCodeOrImage"}
