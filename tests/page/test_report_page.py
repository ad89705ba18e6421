"""The report page in a real browser: what a person reads equals what the status and the records hold."""

import dataclasses
import math
from pathlib import Path
from typing import Any

from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

from ctj_api.spec import Spec
from ctj_api.status import Status
from ctj_operator.page.build import write_page
from ctj_operator.page.charts import loss_chart
from ctj_operator.page.gather import AttemptRecord, PageContent

SPEC = {
    "recipe": {"name": "causal_lm"},
    "training": {"steps": 60, "globalBatchSize": 16, "microBatchSize": 4},
    "ladder": [
        {"name": "single", "strategy": "single", "steps": 20},
        {"name": "ddp", "strategy": "ddp", "steps": 20, "processesPerNode": 2},
        {"name": "zero3", "strategy": "zero3", "processesPerNode": 2},
    ],
}
CHECK = {"measurement": "probeLossRelative", "value": "2.5e-7", "max": "1e-6", "verdict": "Passed"}
TOO_MUCH = {"measurement": "memoryPeakRatio", "value": "0.99", "max": "0.95", "verdict": "Failed"}


def stage(
    name: str, attempt: int, start: int, end: int, *, phase: str = "Passed", gates: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    return {
        "name": name,
        "phase": phase,
        "attempts": [attempt],
        "mode": "Compiled",
        "startStep": start,
        "endStep": end,
        "gates": gates or [],
        "measurements": {"probeLossRelative": "2.5e-7", "replayLossRelative": "1e-7"},
        "compileReason": "correct and 1.21x faster",
        "predictedMemoryBytes": 300 * 2**20,
    }


def gate(name: str, attempt: int, check: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "mode": "Enforce",
        "onFailure": "Rollback",
        "verdict": check["verdict"],
        "attempt": attempt,
        "evidence": [check],
    }


def records(stage_name: str, attempt: int, first: int, last: int, *, replayed: int = 0) -> AttemptRecord:
    steps = tuple(
        {
            "step": s,
            "stage": stage_name,
            "attempt": attempt,
            "loss": 5.5 * math.exp(-s / 60),
            "gradNorm": 1 + 3 / s,
            "seconds": 0.2,
            "mode": "Eager" if s % 9 == 0 else "Compiled",
            "recompiles": 0,
            "graphs": 1,
            "compileSeconds": 20.0,
            "memoryBytes": 700 * 2**20,
            "replay": s < first + replayed,
            "at": 1000.0 * attempt + s,
        }
        for s in range(first, last + 1)
    )
    return AttemptRecord(attempt=attempt, stage=stage_name, steps=steps, report=None)


def content(name: str = "quickstart") -> PageContent:
    ladder = [
        stage("single", 1, 0, 20, gates=[gate("parity", 1, CHECK)]),
        stage("ddp", 2, 15, 40, gates=[gate("parity", 2, CHECK), gate("memory", 2, TOO_MUCH)]),
        stage("zero3", 3, 35, 60, phase="Running"),
    ]
    status = Status.from_document({"phase": "Running", "attempt": 3, "step": 50, "mode": "Compiled", "ladder": ladder})
    attempts = (
        records("single", 1, 1, 20),
        records("ddp", 2, 16, 40, replayed=5),
        records("zero3", 3, 36, 50, replayed=5),
    )
    return PageContent(name=name, spec=Spec.from_document(SPEC), status=status, attempts=attempts)


def test_held_out_losses_are_a_line_of_their_own_where_something_was_evaluated() -> None:
    plain = content()
    evaluated = tuple(
        dataclasses.replace(a, steps=tuple(r | {"evaluationLoss": 5.0} if r["step"] % 10 == 0 else r for r in a.steps))
        for a in plain.attempts
    )
    assert "held out" not in loss_chart(plain)
    assert "held out" in loss_chart(dataclasses.replace(plain, attempts=evaluated))


def rows(browser: Chrome, table: str) -> list[list[str]]:
    body = browser.find_elements(By.CSS_SELECTOR, f"#{table} tr")
    return [[cell.text for cell in row.find_elements(By.TAG_NAME, "td")] for row in body[1:]]


def test_the_page_shows_every_check_with_value_limit_and_verdict(browser: Chrome, tmp_path: Path) -> None:
    browser.get(write_page(content(), tmp_path / "report.html").as_uri())

    assert rows(browser, "gates") == [
        ["single", "parity", "probeLossRelative", "2.5e-07", "at most 1e-6", "Passed"],
        ["ddp", "parity", "probeLossRelative", "2.5e-07", "at most 1e-6", "Passed"],
        ["ddp", "memory", "memoryPeakRatio", "0.99", "at most 0.95", "Failed"],
    ]


def test_the_page_shows_stages_parity_and_the_seconds_of_each_switch(browser: Chrome, tmp_path: Path) -> None:
    browser.get(write_page(content(), tmp_path / "report.html").as_uri())

    stages = rows(browser, "stages")
    assert [row[0] for row in stages if len(row) > 2] == ["single", "ddp", "zero3"]
    assert [row[1] for row in stages if len(row) == 2] == ["correct and 1.21x faster"] * 3
    assert rows(browser, "switches") == [["single", "ddp", "995.8"], ["ddp", "zero3", "995.8"]]
    assert rows(browser, "parity")[0] == ["single", "2.5e-07", "does not apply", "1e-07", "does not apply"]
    assert browser.find_element(By.ID, "phase").text == "Running"


def test_the_page_draws_its_curves_and_asks_nothing_of_any_network(browser: Chrome, tmp_path: Path) -> None:
    page = write_page(content(), tmp_path / "report.html")
    browser.get(page.as_uri())

    drawings = browser.find_elements(By.TAG_NAME, "svg")
    assert len(drawings) == 5
    assert all(drawing.size["width"] > 600 and drawing.size["height"] > 100 for drawing in drawings)
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert loaded == []
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    assert page.stat().st_size < 2_000_000


def test_names_from_users_are_text_and_never_markup(browser: Chrome, tmp_path: Path) -> None:
    browser.get(write_page(content("<img src=x onerror=document.title='broken'>"), tmp_path / "report.html").as_uri())

    assert browser.find_elements(By.TAG_NAME, "img") == []
    assert browser.title != "broken"


def test_a_job_without_any_step_has_a_page_that_says_so(browser: Chrome, tmp_path: Path) -> None:
    empty = PageContent(name="new", spec=Spec.from_document(SPEC), status=Status(), attempts=())
    browser.get(write_page(empty, tmp_path / "report.html").as_uri())

    assert browser.find_element(By.ID, "phase").text == "Pending"
    assert "No stage has been judged yet" in browser.find_element(By.TAG_NAME, "main").text
