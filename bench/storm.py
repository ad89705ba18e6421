"""What do lengths that change cost? Ours against marking by hand, and `accelerate launch`'s default against ours.

One small Llama-like model trains on 24 distinct lengths, in one new process and with an empty compile cache per row.
Processor seconds of the process and the compilers it starts, from the first step to the last: the machine may be busy
with other work. Ratios within one run are what counts. Last line: one JSON object.

    ours              safe_compile_with_accelerate, the dimension declared: blocks in place, marked where they begin
    by hand           the whole model compiled, torch._dynamo.mark_dynamic on every batch: the ideal without our help
    launch default    what `accelerate launch --dynamo_backend inductor` gives: dynamic False, one compile per length
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

LENGTHS = tuple(range(32, 32 + 24 * 8, 8))
WAYS = ("ours", "by hand", "launch default")


def cpu_seconds() -> float:
    """Processor time of this process and its finished children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def measure(way: str, *, steps: int, blocks: int, hidden: int) -> dict[str, float]:
    """Train in this process, one way."""
    import torch
    from torch._dynamo.utils import counters, get_compilation_metrics

    from ctj_trainer.recipes.llama import Llama, LlamaShape

    torch.manual_seed(0)
    shape = LlamaShape(
        vocabulary_size=256,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        layers=blocks,
        heads=4,
        key_value_heads=4,
        head_size=hidden // 4,
    )
    llama = Llama(shape)
    llama.initialise()
    model, before_step = PREPARE[way](llama)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lengths = random.Random(0).choices(LENGTHS, k=max(0, steps - len(LENGTHS))) + list(LENGTHS)
    random.Random(1).shuffle(lengths)
    began = cpu_seconds()
    for length in lengths:
        tokens = torch.randint(256, (4, length))
        before_step(tokens)
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    recompiles = sum(bool(record.recompile_reason) for record in get_compilation_metrics())
    graphs = counters["stats"]["unique_graphs"]
    return {
        "cpu_seconds": cpu_seconds() - began,
        "graphs": graphs,
        "recompiles": recompiles,
        "loss": float(loss.detach()),
    }


def ours(model: Any) -> tuple[Any, Callable[[Any], None]]:
    """As a script would call it."""
    from accelerate import Accelerator

    from ctj_trainer.accelerate import resolve_policy, safe_compile_with_accelerate

    policy = resolve_policy(dynamic_dims={"tokens": (1,)})
    return safe_compile_with_accelerate(Accelerator(cpu=True), model, policy), lambda _: None


def by_hand(model: Any) -> tuple[Any, Callable[[Any], None]]:
    """What somebody writes who knows it all."""
    import torch

    return torch.compile(model), lambda tokens: torch._dynamo.mark_dynamic(tokens, 1)


def launch_default(model: Any) -> tuple[Any, Callable[[Any], None]]:
    """What the variables that `accelerate launch` exports make of it."""
    os.environ |= {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR", "ACCELERATE_DYNAMO_MODE": "default"}
    os.environ |= {
        f"ACCELERATE_DYNAMO_USE_{name}": "False" for name in ("DYNAMIC", "FULLGRAPH", "REGIONAL_COMPILATION")
    }
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(model), lambda _: None


PREPARE = {"ours": ours, "by hand": by_hand, "launch default": launch_default}


def in_new_process(way: str, options: argparse.Namespace) -> dict[str, float]:
    """Measure one way with an empty cache, so that no way finds what another one compiled."""
    with tempfile.TemporaryDirectory(prefix="ctj-bench-") as cache:
        command = [sys.executable, __file__, "--one", way, "--steps", str(options.steps)]
        command += ["--blocks", str(options.blocks), "--hidden", str(options.hidden)]
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{way}: ended with {done.returncode}")
    row: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return row


def main() -> None:
    """Run every way once and print the table and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, steps=options.steps, blocks=options.blocks, hidden=options.hidden)))
        return
    console = Console()
    rows = {}
    for way in WAYS:
        with console.status(f"{way} (minutes)"):
            rows[way] = in_new_process(way, options)
    title = f"{options.steps} steps, {len(LENGTHS)} lengths, {options.blocks} blocks, hidden {options.hidden}"
    table = Table("way", "processor seconds", "graphs", "recompiles", "last loss", title=title)
    for way, row in rows.items():
        table.add_row(
            way, f"{row['cpu_seconds']:.0f}", f"{row['graphs']}", f"{row['recompiles']}", f"{row['loss']:.4f}"
        )
    console.print(table)
    seconds = {way: row["cpu_seconds"] for way, row in rows.items()}
    ratios = {
        "ours_over_ideal": seconds["ours"] / seconds["by hand"],
        "launch_default_over_ours": seconds["launch default"] / seconds["ours"],
    }
    print(json.dumps({name: round(value, 3) for name, value in ratios.items()}))


if __name__ == "__main__":
    main()
