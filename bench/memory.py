"""Is the memory predictor right? Judged on our own models, measured here; then held beside published figures.

Two processes, every strategy, small Llamas of different kinds (states weigh most; activations weigh most; checkpointed;
half precision): bytes of real parameters, gradients and optimizer state, and the peak of counted allocations during a
step (`memory_ranks.py`). CPU only: nothing about a GPU was measured. Last line: one JSON object.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # PYTHONSAFEPATH keeps a script's own folder out
from bench import memory_published, memory_ranks

from ctj_api.spec import Offload, Strategy
from ctj_trainer.memory_prediction import Activations, Workload, count_activations, peak_bytes
from ctj_trainer.memory_states import ModelSize, States, host_bytes, offloaded, states_of
from ctj_trainer.recipe import blocks_of

WORLD_SIZE = 2
ROLES = ("parameters", "gradients", "optimizer")
STATES_GOAL, PEAK_GOAL = 0.10, 0.25
FIT = 0.10
"""Worst relative error at which published figures count as explained."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """One kind of model and training; `memory_ranks.recipe_of` builds it."""

    name: str
    hidden: int
    layers: int
    vocabulary: int
    sequence: int
    micro: int
    precision: str = "fp32"
    checkpointing: str = "None"


MODELS = (
    Model(name="states weigh most", hidden=192, layers=3, vocabulary=1024, sequence=64, micro=1),
    Model(name="activations weigh most", hidden=64, layers=3, vocabulary=256, sequence=64, micro=8),
    Model(name="the same in bf16", hidden=64, layers=3, vocabulary=256, sequence=64, micro=8, precision="bf16"),
    Model(
        name="the same, checkpointed", hidden=64, layers=3, vocabulary=256, sequence=64, micro=8, checkpointing="Blocks"
    ),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Predicted and measured bytes of the worst rank."""

    model: str
    strategy: str
    predicted: States
    predicted_peak: int
    measured: dict[str, int]

    @property
    def states_error(self) -> float:
        """Largest relative error of the three."""
        return max(abs(getattr(self.predicted, role) / self.measured[role] - 1) for role in ROLES)

    @property
    def peak_error(self) -> float:
        """Relative error, with its sign."""
        return self.predicted_peak / self.measured["peak"] - 1


def case_of(model: Model, strategy: Strategy) -> dict[str, Any]:
    """Return what a rank is asked to measure."""
    return asdict(model) | {"strategy": strategy.value}


def measured(cases: list[dict[str, Any]], *, patience_seconds: float) -> list[list[dict[str, int]]]:
    """Run all cases in two ranks; return what each found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with tempfile.TemporaryDirectory(prefix="ctj-bench-") as folder:
        asked = Path(folder) / "cases.json"
        asked.write_text(json.dumps(cases))
        logs = [Path(folder) / f"rank-{rank}.log" for rank in range(WORLD_SIZE)]
        ranks = [
            subprocess.Popen(
                [sys.executable, memory_ranks.__file__, str(rank), str(WORLD_SIZE), str(port)],
                stdin=asked.open(),
                stdout=subprocess.PIPE,
                stderr=log.open("w"),
                text=True,
                env=environment,
            )
            for rank, log in enumerate(logs)
        ]
        try:
            return [_answers(rank, log, patience_seconds) for rank, log in zip(ranks, logs, strict=True)]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def _answers(rank: "subprocess.Popen[str]", log: Path, patience_seconds: float) -> list[dict[str, int]]:
    out, _ = rank.communicate(timeout=patience_seconds)
    if rank.returncode != 0:
        sys.exit(f"a rank ended with {rank.returncode}:\n{log.read_text()[-4000:]}")
    return [json.loads(line) for line in out.splitlines()]


def predicted(model: Model, strategy: Strategy) -> tuple[States, int]:
    """Ask the predictor, as preflight does."""
    size, activations, training = _counted(model)
    world = 1 if strategy is Strategy.SINGLE else WORLD_SIZE
    states = states_of(size, strategy, world)
    return states, peak_bytes(states, size, activations, checkpointing=training.activation_checkpointing)


def _counted(model: Model) -> tuple[ModelSize, Activations, Any]:
    case = asdict(model)
    recipe, training = memory_ranks.recipe_of(case), memory_ranks.training_of(case)
    with torch.device("meta"):
        meta = recipe.build_model()
    blocks = blocks_of(meta, recipe)
    workload = Workload(
        loss=recipe.loss,
        sample=recipe.samples[0],
        blocks=blocks,
        micro_batch_size=model.micro,
        device=torch.device("cpu"),
    )
    return ModelSize.of(meta, blocks), count_activations(meta, workload, training.precision), training


def rows(pairs: list[tuple[Model, Strategy]], ranks: list[list[dict[str, int]]]) -> list[Row]:
    """Put what the ranks found beside what was predicted; the process that needs more counts."""
    found = []
    for (model, strategy), *figures in zip(pairs, *ranks, strict=True):
        states, peak = predicted(model, strategy)
        most = {name: max(one[name] for one in figures) for name in figures[0]}
        found.append(
            Row(model=model.name, strategy=strategy.value, predicted=states, predicted_peak=peak, measured=most)
        )
    return found


def _own(judged: list[Row]) -> Table:
    table = Table(
        "model", "strategy", *(f"{role}, MB" for role in ROLES), "error", "peak, MB", "error", title="measured here"
    )
    for row in judged:
        cells = [f"{getattr(row.predicted, role) / 1e6:.2f} / {row.measured[role] / 1e6:.2f}" for role in ROLES]
        table.add_row(
            row.model,
            row.strategy,
            *cells,
            f"{row.states_error:.1%}",
            f"{row.predicted_peak / 1e6:.1f} / {row.measured['peak'] / 1e6:.1f}",
            f"{row.peak_error:+.1%}",
        )
    table.caption = "predicted / measured, of the process that needs most"
    return table


def _offloaded() -> Table:
    """What the sharded strategies keep on a GPU, for the 3B model of the published rows on 4 GPUs; not measured."""
    table = Table("strategy", "offload", "on the GPU, GB", "on the host, GB", title="offload, predicted, not measured")
    size = memory_published.size_of("3B")
    for strategy, offload in product((Strategy.FSDP, Strategy.ZERO3), Offload):
        if strategy is Strategy.FSDP and offload is Offload.PARAMETERS:
            continue  # FSDP2 moves all or nothing
        states = states_of(size, strategy, 4)
        left = offloaded(states, offload)
        here = left.held + left.buffers + left.gathered
        table.add_row(strategy.value, offload.value, f"{here / 1e9:.1f}", f"{host_bytes(states, offload) / 1e9:.1f}")
    table.caption = "states, buffers and gathered blocks of the 3B model in fp32 on 4 GPUs; activations come on top"
    return table


def _theirs(fits: list[memory_published.Fit]) -> Table:
    table = Table("1B: single, ddp, fsdp, zero3", "3B", "worst", "assumed", title="published, GB for each GPU")
    table.add_row(
        *(_gigabytes(memory_published.PUBLISHED_GB[m]) for m in ("1B", "3B")), "", "published; nothing stated"
    )
    for fit in fits:
        table.add_row(
            *(_gigabytes(fit.predicted[model]) for model in ("1B", "3B")), f"{fit.worst:.0%}", str(fit.assumption)
        )
    within = "the first is" if fits[0].worst <= FIT else "none is"
    table.caption = f"the best assumption of each layout of the states; {within} within {FIT:.0%} of all eight figures"
    return table


def _gigabytes(values: tuple[float, ...]) -> str:
    return "  ".join(f"{value:.1f}" for value in values)


def main() -> None:
    """Print both tables and the verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=len(MODELS), help="only the first so many")
    parser.add_argument("--patience", type=float, default=1800, help="seconds for all measurements")
    options = parser.parse_args()
    console = Console()
    fits = memory_published.search()
    console.print(_theirs(fits))
    console.print(_offloaded())
    pairs = [(model, strategy) for model in MODELS[: options.models] for strategy in Strategy]
    with console.status(f"{len(pairs)} layouts, a few seconds each"):
        found = measured([case_of(*pair) for pair in pairs], patience_seconds=options.patience)
    judged = rows(pairs, found)
    console.print(_own(judged))
    states_error = max(row.states_error for row in judged)
    peak_error = max(abs(row.peak_error) for row in judged)
    print(
        json.dumps(
            {
                "states_error": round(states_error, 4),
                "peak_error": round(peak_error, 4),
                "states_within_goal": states_error <= STATES_GOAL,
                "peak_within_goal": peak_error <= PEAK_GOAL,
                "published_error": round(fits[0].worst, 4),
                "published_assumption": str(fits[0].assumption),
                "published_error_as_we_train": round(
                    next(fit for fit in fits if fit.assumption.layout is memory_published.LAYOUTS[0]).worst, 4
                ),
            }
        )
    )


if __name__ == "__main__":
    main()
