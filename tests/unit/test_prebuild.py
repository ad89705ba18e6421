"""Set-up says what it cannot build without."""

import pytest

from ctj_trainer import prebuild


def test_without_a_compiler_it_says_what_needs_one_and_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert prebuild.main() == 1
    message = capsys.readouterr().err
    assert "no C++ compiler (no-such-compiler)" in message
    assert "apt-get install g++" in message
