"""Regional compilation the way its source measures it: eager, full and regional, batch 1 and 4, sequence 128.

For each row the compile time is the median of 2 first steps, each after a reset with cleared caches; the step time is
the median of 100 steps with gradients enabled, forward and backward. Models are Llama-like, scaled to this machine;
`--size 1B|3B|8B|13B` takes the source's. Then each of the source's five conclusions is judged on these rows, with the
number it rests on. Last line: one JSON object with the rows.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch._inductor.utils import fresh_cache

from ctj_api.spec import CompileScope
from ctj_trainer.compile.policy import CompilePolicy
from ctj_trainer.recipes.llama import Llama, LlamaShape

SEQUENCE = 128
BATCHES = (1, 4)
FORMS = ("eager", "full", "regional")
REPEATS = 2


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model of the table; hidden and layers of the larger ones as published for Llama models of that size."""

    hidden: int
    layers: int
    heads: int
    vocabulary: int = 32_000


SIZES = {
    "small": Size(hidden=64, layers=2, heads=4, vocabulary=256),
    "medium": Size(hidden=128, layers=6, heads=4, vocabulary=256),
    "1B": Size(hidden=2048, layers=16, heads=32),
    "3B": Size(hidden=3072, layers=28, heads=24),
    "8B": Size(hidden=4096, layers=32, heads=32),
    "13B": Size(hidden=5120, layers=40, heads=40),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table; compile seconds are 0 for eager."""

    size: str
    batch: int
    form: str
    compile_seconds: float
    step_seconds: float


def build(size: Size, device: str) -> Llama:
    """Build a model with random weights."""
    shape = LlamaShape(
        vocabulary_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=4 * size.hidden,
        layers=size.layers,
        heads=size.heads,
        key_value_heads=size.heads,
        head_size=size.hidden // size.heads,
    )
    with torch.device(device):
        model = Llama(shape)
    torch.manual_seed(0)
    model.initialise()
    return model


def step(model: Any, tokens: torch.Tensor) -> None:
    """Forward and backward."""
    model(tokens).float().square().mean().backward()
    if tokens.is_cuda:
        torch.cuda.synchronize()


def seconds_of(model: Any, tokens: torch.Tensor) -> float:
    """Time one step."""
    began = time.perf_counter()
    step(model, tokens)
    return time.perf_counter() - began


def compiled(size: Size, form: str, device: str) -> Any:
    """Build anew and place compilation."""
    model = build(size, device)
    return model if form == "eager" else CompilePolicy(scope=CompileScope(form)).apply(model)


def measure(name: str, batch: int, form: str, *, steps: int, device: str) -> Row:
    """Compile twice from nothing, then step."""
    tokens = torch.randint(SIZES[name].vocabulary, (batch, SEQUENCE), device=device)
    first = []
    model: Any = None
    for _ in range(REPEATS if form != "eager" else 1):
        model = None
        torch.compiler.reset()
        with fresh_cache():
            model = compiled(SIZES[name], form, device)
            first.append(seconds_of(model, tokens))
    step_seconds = statistics.median(seconds_of(model, tokens) for _ in range(steps))
    spent = max(0.0, statistics.median(first) - step_seconds) if form != "eager" else 0.0
    return Row(size=name, batch=batch, form=form, compile_seconds=spent, step_seconds=step_seconds)


def conclusions(rows: list[Row]) -> Iterator[tuple[str, bool | None, str]]:
    """Judge each claim: the claim, whether these rows bear it out (None: they cannot say), and the numbers."""
    by = {(row.size, row.batch, row.form): row for row in rows}
    cases = sorted({(row.size, row.batch) for row in rows}, key=lambda case: (list(SIZES).index(case[0]), case[1]))
    slower = {c: by[(*c, "regional")].step_seconds / by[(*c, "full")].step_seconds for c in cases}
    saved = {c: by[(*c, "full")].compile_seconds / by[(*c, "regional")].compile_seconds for c in cases}
    gained = {c: by[(*c, "eager")].step_seconds / by[(*c, "regional")].step_seconds for c in cases}
    yield "speed close to full compile (within 10 %)", max(slower.values()) <= 1.1, listed(slower)
    yield "compiles much faster (at least twice)", min(saved.values()) >= 2, listed(saved)
    sizes = list(dict.fromkeys(size for size, _ in cases))
    shrinks = [slower[size, BATCHES[-1]] <= slower[size, BATCHES[0]] for size in sizes]
    yield "the gap to full shrinks with the batch", all(shrinks), listed(slower)
    several = len(sizes) > 1
    grows = all(saved[sizes[-1], batch] > saved[sizes[0], batch] for batch in BATCHES) if several else None
    yield "the saving grows with the model", grows, listed(saved)
    best = gained[sizes[-1], BATCHES[-1]] == max(gained.values()) if several else None
    yield "best for large models with larger batches (speed over eager)", best, listed(gained)


def listed(ratios: dict[tuple[str, int], float]) -> str:
    """Ratios in one line."""
    return ", ".join(f"{size} x{batch}: {ratio:.2f}" for (size, batch), ratio in ratios.items())


def main() -> None:
    """Measure every row and print table, verdicts and JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--size", action="append", choices=list(SIZES), help="may be repeated; small and medium if absent"
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    console = Console()
    sizes = options.size or ["small", "medium"]
    rows = []
    for name in sorted(sizes, key=list(SIZES).index):
        for batch in BATCHES:
            for form in FORMS:
                with console.status(f"{name}, batch {batch}, {form}"):
                    rows.append(measure(name, batch, form, steps=options.steps, device=options.device))
    table = Table("model", "batch", "form", "compile s", "step ms", title=f"sequence {SEQUENCE}, {options.device}")
    for row in rows:
        table.add_row(
            row.size, str(row.batch), row.form, f"{row.compile_seconds:.1f}", f"{1000 * row.step_seconds:.2f}"
        )
    console.print(table)
    verdicts = list(conclusions(rows))
    for claim, holds, numbers in verdicts:
        word = {True: "holds", False: "does not hold", None: "one model cannot say"}[holds]
        console.print(f"{word}: {claim} ({numbers})")
    document = {"device": options.device, "rows": [asdict(row) for row in rows]}
    document["conclusions"] = {claim: holds for claim, holds, _ in verdicts}
    print(json.dumps(document))


if __name__ == "__main__":
    main()
