"""How long until the first compiled step: regional against full, warm against cold, through the product's own trainer.

Each row is one new trainer (supervisor, torchrun agent, one rank) on a 12-block Llama with its own or a shared compile
cache. Seconds are of the first compiled forward and backward, compilation included, as the trainer itself reports them
in its verdict. Ratios within one run are what counts; seconds are this machine's. Last line: one JSON object.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ctj_api import names
from ctj_api.attempt import Attempt
from ctj_api.report import Report

PER_RUN_SECONDS = 1200


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row: what is compiled, with which cache."""

    name: str
    scope: str
    cache: str


CASES = (
    Case(name="full, cold cache", scope="full", cache="full"),
    Case(name="regional, cold cache", scope="regional", cache="regional"),
    Case(name="regional, warm cache, new process", scope="regional", cache="regional"),
)


def attempt_message(scope: str, *, blocks: int, hidden: int) -> Attempt:
    """Return a four-step job of one process; `IfCorrect` so that speed does not decide what is measured."""
    stage = {"name": "bench", "strategy": "single"}
    return Attempt.from_document(
        {
            "job": {"namespace": "bench", "name": f"compile-{scope}", "uid": "bench"},
            "attempt": 1,
            "stage": stage,
            "ladder": [stage],
            "window": {"startStep": 0, "endStep": 4, "saveAt": []},
            "floorStep": 0,
            "mode": "Compiled",
            "microBatchSize": 4,
            "recipe": {
                "name": "causal_lm",
                "config": {
                    "model": {"hiddenSize": hidden, "layers": blocks, "heads": 4},
                    "data": {"builtin": "python-stdlib", "sequenceLength": 128},
                },
            },
            "training": {"steps": 4, "globalBatchSize": 4, "microBatchSize": 4},
            "compile": {"scope": scope, "keep": "IfCorrect"},
        }
    )


def first_compiled_seconds(case: Case, folder: Path, *, blocks: int, hidden: int) -> float:
    """Run one trainer to its end and read the verdict of its report."""
    run = Path(tempfile.mkdtemp(dir=folder))
    environment = {
        **os.environ,
        names.ENV_ATTEMPT: json.dumps(attempt_message(case.scope, blocks=blocks, hidden=hidden).to_document()),
        names.ENV_CONTROL_FILE: str(run / "control.json"),
        names.ENV_CHECKPOINT_ROOT: str(run / "checkpoints"),
        names.ENV_CACHE_DIR: str(folder / f"cache-{case.cache}"),
        names.ENV_RUN_DIR: str(run),
        names.ENV_TERMINATION_FILE: str(run / "termination.json"),
        names.ENV_NODE_RANK: "0",
    }
    command = [sys.executable, "-m", "ctj_trainer.supervisor"]
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PER_RUN_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"{case.name}: the trainer ended with {done.returncode}\n{done.stdout[-4000:]}")
    report = Report.from_document(
        json.loads((run / "checkpoints" / names.attempt_folder(1) / "report.json").read_text())
    )
    if report.compile is None or report.compile.first_compiled_seconds is None:
        sys.exit(f"{case.name}: nothing was compiled: {report.compile}")
    return report.compile.first_compiled_seconds


def main() -> None:
    """Run every case once, in order, and print the table and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=128)
    options = parser.parse_args()
    console = Console()
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="ctj-bench-") as folder:
        for number, case in enumerate(CASES, start=1):
            with console.status(f"{number} of {len(CASES)}: {case.name} (about a minute)"):
                seconds[case.name] = first_compiled_seconds(
                    case, Path(folder), blocks=options.blocks, hidden=options.hidden
                )
    full, cold, warm = (seconds[case.name] for case in CASES)
    table = Table(
        "first compiled step", "seconds", "of full, cold", title=f"{options.blocks} blocks, hidden {options.hidden}"
    )
    for name, value in seconds.items():
        table.add_row(name, f"{value:.1f}", f"{value / full:.3f}")
    console.print(table)
    ratios = {
        "first_step_regional_over_full": cold / full,
        "warm_over_cold": warm / cold,
        "warm_over_full_cold": warm / full,
    }
    print(json.dumps({name: round(value, 4) for name, value in ratios.items()}))


if __name__ == "__main__":
    main()
