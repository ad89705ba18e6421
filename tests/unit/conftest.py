"""Where a test of the command line works: a folder of its own, and in it a job that was submitted and never run."""

from pathlib import Path

import pytest
from tests.unit.workplace import Workplace, job_document

from ctj_operator.local.store import Store


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Workplace:
    return Workplace(tmp_path, monkeypatch, capsys)


@pytest.fixture
def store(place: Workplace) -> Store:
    place.job_folder.mkdir(parents=True)
    store = Store(place.job_folder)
    store.submit(job_document())
    return store
