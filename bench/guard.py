"""What does the product's own work cost a training step? Two numbers, single process, CPU.

1. Seconds per step inside our own calls (requests, vote, guard, telemetry, records), summed by timers, as a share of a
   250 ms step. Without what any loop does: batches, forward, backward, update.
2. Throughput of the product's loop against a hand-written one on the same model and samples: blocks of both in turn,
   the ratio of each pair, and a 95 % interval of its geometric mean (bootstrap over pairs).

Both sides compile their blocks with backend `eager`: Dynamo's guards run, and no kernel is faster on either side. The
last line is one JSON object.
"""

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ctj_api.attempt import Attempt
from ctj_trainer.batches import SampleOrder
from ctj_trainer.checkpoint import Checkpoints
from ctj_trainer.compile.guard import guarded
from ctj_trainer.compile.session import CompileSession
from ctj_trainer.evaluation import Evaluator
from ctj_trainer.gradients import Gradients
from ctj_trainer.loop import Loop, Parts
from ctj_trainer.optimizer import Schedule, build_adamw, set_learning_rate
from ctj_trainer.ranks import Ranks, joined
from ctj_trainer.recipe import Recipe, RecipeContext, blocks_of, collate, load_recipe
from ctj_trainer.requests import Requests
from ctj_trainer.strategies import prepare
from ctj_trainer.telemetry import telling
from ctj_trainer.trackers import tracking

STEP_SECONDS = 0.250
BATCH = 4


def attempt_message(hidden: int, layers: int) -> Attempt:
    stage = {"name": "bench", "strategy": "single"}
    return Attempt.from_document(
        {
            "job": {"namespace": "bench", "name": "guard", "uid": "bench"},
            "attempt": 1,
            "stage": stage,
            "ladder": [stage],
            # Longer than the bench runs, so that nothing is saved; the timing blocks of the verdict would run eager.
            "window": {"startStep": 0, "endStep": 100_000, "saveAt": [4]},
            "floorStep": 0,
            "mode": "Compiled",
            "microBatchSize": BATCH,
            "recipe": {
                "name": "causal_lm",
                "config": {
                    "model": {"hiddenSize": hidden, "layers": layers, "heads": 4},
                    "data": {"builtin": "python-stdlib", "sequenceLength": 128},
                },
            },
            "training": {
                "steps": 100_000,
                "globalBatchSize": BATCH,
                "microBatchSize": BATCH,
                "checkpoint": {"everySteps": 100_000},
            },
            "compile": {"backend": "eager", "keep": "IfCorrect"},
        }
    )


@dataclass(kw_only=True)
class Clock:
    """Seconds inside our own calls, by name, of each step; a call inside another one is counted once.

    Wall seconds, of which the median step counts (a busy machine stops a process in the middle of a call), and seconds
    of this thread's CPU.
    """

    wall: list[dict[str, float]] = field(default_factory=list)
    cpu: dict[str, float] = field(default_factory=dict)
    depth: int = 0

    def begin(self) -> None:
        """A step begins."""
        self.wall.append({})

    def medians(self) -> dict[str, float]:
        """Wall seconds of the median step, by name."""
        names = {name for step in self.wall for name in step}
        return {name: statistics.median(step.get(name, 0.0) for step in self.wall) for name in names}

    def around(self, owner: Any, name: str) -> None:
        """Time every call of a method from now on."""
        call: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any, **keywords: Any) -> Any:
            self.depth += 1
            began, cpu_began = time.perf_counter(), time.thread_time()
            try:
                return call(*arguments, **keywords)
            finally:
                self.depth -= 1
                if not self.depth:
                    label = f"{type(owner).__name__}.{name.strip('_')}"
                    step = self.wall[-1]
                    step[label] = step.get(label, 0.0) + time.perf_counter() - began
                    self.cpu[label] = self.cpu.get(label, 0.0) + time.thread_time() - cpu_began

        object.__setattr__(owner, name, timed)


def watched(loop: Loop) -> Clock:
    """A clock around everything a step does beside batches, forward, backward and update."""
    clock, parts = Clock(), loop.parts
    for name in ("_vote", "_publish", "_act", "_is_save_due"):
        clock.around(loop, name)
    for name in ("before_step", "mode_of", "measures_peak", "look", "after_step"):
        clock.around(parts.session, name)
    clock.around(parts.ranks, "add_up")
    return clock


@contextmanager
def product_loop(attempt: Attempt, recipe: Recipe, ranks: Ranks, folder: Path) -> Iterator[Loop]:
    """The product's loop, as a stage puts it together."""
    requests = Requests(attempt=1, control_file=folder / "control.json", run_dir=folder)
    root = folder / "checkpoints"
    with (
        telling(attempt, run_dir=folder, folder=root / "attempts" / "1", ranks=ranks) as telemetry,
        tracking(attempt, root=root, is_first_rank=True, resumed_at=0, notice=print) as trackers,
        guarded(on_compiling=telemetry.compiling) as guard,
    ):
        session = CompileSession(attempt, decision=None, guard=guard, folder=folder, ranks=ranks)
        prepared = prepare(
            attempt.stage.strategy,
            recipe,
            training=attempt.training,
            micro_batch_size=BATCH,
            device=ranks.device,
            offload=attempt.stage.offload,
            place=lambda model, _: compile_blocks(model, recipe),
        )
        session.attach(prepared.inner)
        checkpoints = Checkpoints.of(attempt, volume=root, group=ranks.control, notice=print)
        checkpoints.claim()
        parts = Parts(
            attempt=attempt,
            ranks=ranks,
            prepared=prepared,
            gradients=Gradients(prepared, recipe, attempt=attempt, ranks=ranks, eagerly=session.eagerly),
            evaluator=Evaluator(prepared, recipe, attempt=attempt, ranks=ranks, eagerly=session.eagerly),
            session=session,
            checkpoints=checkpoints,
            requests=requests,
            telemetry=telemetry,
            trackers=trackers,
            notice=print,
        )
        yield Loop(parts, resumed_at=0, history={}, checkpoint=None)


def compile_blocks(model: torch.nn.Module, recipe: Recipe) -> None:
    for block in blocks_of(model, recipe):
        block.compile(backend="eager", dynamic=None)


def hand_written(attempt: Attempt, recipe: Recipe) -> Callable[[int], None]:
    """One step as a person would write it: the same weights, samples, optimizer, schedule and clipping."""
    torch.manual_seed(attempt.training.seed)
    model = recipe.build_model().train()
    compile_blocks(model, recipe)
    optimizer = build_adamw(model, attempt.training)
    schedule = Schedule.of(attempt.training)
    order = SampleOrder(num_samples=len(recipe.samples), global_batch_size=BATCH, seed=attempt.training.seed)
    clip = float(attempt.training.optimizer.gradient_clip)

    def step(number: int) -> None:
        batch = collate(recipe.samples, order.of_step(number))
        total, count = recipe.loss(model, batch)
        loss = total / count
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip if clip else math.inf)
        set_learning_rate(optimizer, schedule.learning_rate(number))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not (math.isfinite(loss.item()) and math.isfinite(norm.item())):  # anybody prints them
            raise RuntimeError(f"step {number}: not finite")

    return step


def ratios(ours: Callable[[int], Any], theirs: Callable[[int], Any], *, pairs: int, block: int) -> list[float]:
    """Time of theirs over time of ours, for each pair of neighbouring blocks; who begins alternates."""
    found = []
    step = 10  # both are warm by then
    for pair in range(pairs):
        seconds = {}
        for side in (ours, theirs) if pair % 2 else (theirs, ours):
            began = time.perf_counter()
            for number in range(step, step + block):
                side(number)
            seconds[side] = time.perf_counter() - began
        step += block
        found.append(seconds[theirs] / seconds[ours])
    return found


def interval(values: list[float], *, draws: int = 2000) -> tuple[float, float, float]:
    """Geometric mean with its 95 % bootstrap interval."""
    logs = [math.log(value) for value in values]
    chance = random.Random(0)
    means = sorted(statistics.fmean(chance.choices(logs, k=len(logs))) for _ in range(draws))
    return math.exp(statistics.fmean(logs)), math.exp(means[int(0.025 * draws)]), math.exp(means[int(0.975 * draws)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=12, help="pairs of blocks (12)")
    parser.add_argument("--block", type=int, default=10, help="steps of a block (10)")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    attempt = attempt_message(options.hidden, options.layers)
    with tempfile.TemporaryDirectory() as folder, joined(timeout_seconds=600) as ranks:
        recipe = load_recipe(
            attempt.recipe.name, attempt.recipe.config, RecipeContext(device=ranks.device, seed=attempt.training.seed)
        )
        theirs = hand_written(attempt, recipe)
        with product_loop(attempt, recipe, ranks, Path(folder)) as loop:
            loop._probe(1)
            for step in range(1, 10):
                loop._one(step)
                theirs(step)
            clock = watched(loop)

            def ours(step: int) -> None:
                clock.begin()
                loop._one(step)

            found = ratios(ours, theirs, pairs=options.pairs, block=options.block)
    _show(clock, found)


def _show(clock: Clock, found: list[float]) -> None:
    console = Console()
    per_step, steps = clock.medians(), len(clock.wall)
    table = Table("our own calls", "us, median step", "CPU us, mean", "of a 250 ms step", title="Inside our own calls")
    for name, seconds in sorted(per_step.items(), key=lambda item: -item[1]):
        cpu = clock.cpu[name] / steps
        table.add_row(name, f"{seconds * 1e6:.0f}", f"{cpu * 1e6:.0f}", f"{seconds / STEP_SECONDS:.3%}")
    total, cpu = statistics.median(sum(step.values()) for step in clock.wall), sum(clock.cpu.values()) / steps
    table.add_row("all", f"{total * 1e6:.0f}", f"{cpu * 1e6:.0f}", f"{total / STEP_SECONDS:.3%}  (goal 0.5 %)")
    console.print(table)
    mean, low, high = interval(found)
    console.print(f"throughput against a hand-written loop: {mean:.3f} [{low:.3f}, {high:.3f}], {len(found)} pairs")
    document = {
        "overhead_share_of_250ms_step": round(total / STEP_SECONDS, 6),
        "overhead_cpu_share_of_250ms_step": round(cpu / STEP_SECONDS, 6),
        "throughput_vs_plain_loop": round(mean, 4),
        "throughput_interval_95": [round(low, 4), round(high, 4)],
        "microseconds_per_step": {name: round(seconds * 1e6, 1) for name, seconds in per_step.items()},
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
