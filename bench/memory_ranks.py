"""One rank of `memory.py`: what one process of a stage really holds, and its peak, counted allocation by allocation.

`python memory_ranks.py RANK WORLD PORT` reads cases as one JSON list from stdin and prints one line for each.
Resident pages would say less: they hold the interpreter, and whatever the C library has not given back. torch's
profiler sees every allocation of the CPU allocator, as `torch.cuda.max_memory_allocated` would on a GPU.
"""

import gc
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function

from ctj_api.spec import Strategy, Training
from ctj_trainer.memory import memory_use
from ctj_trainer.recipe import Recipe, RecipeContext, collate, load_recipe
from ctj_trainer.strategies import prepare
from ctj_trainer.strategies.prepared import Prepared

CPU = torch.device("cpu")
SEQUENCE = 64
WARM_STEPS = 2
"""DDP lays its buckets out anew after the first step, and holds both layouts for a while."""
_STEP = "measured step"


def recipe_of(case: dict[str, Any]) -> Recipe:
    """Return the recipe of a case: a Llama over bytes."""
    model = {"hiddenSize": case["hidden"], "layers": case["layers"], "heads": 4, "vocabularySize": case["vocabulary"]}
    config = {"model": model, "data": {"builtin": "python-stdlib", "sequenceLength": case["sequence"]}}
    return load_recipe("causal_lm", config, RecipeContext(device=CPU, seed=0))


def training_of(case: dict[str, Any]) -> Training:
    """Return the training of a case: one micro batch in each step."""
    return Training.from_document(
        {
            "steps": 4,
            "globalBatchSize": 2 * case["micro"],
            "microBatchSize": case["micro"],
            "precision": case["precision"],
            "activationCheckpointing": case["checkpointing"],
        }
    )


def measure(case: dict[str, Any]) -> dict[str, int]:
    """Lay the model out, train, and count during the last step. Collective."""
    recipe, training = recipe_of(case), training_of(case)
    gc.collect()  # what an earlier case left in cycles would be freed, and counted, in the middle of this one
    before = memory_use().used
    with _counting() as count:
        prepared = prepare(
            Strategy(case["strategy"]),
            recipe,
            training=training,
            micro_batch_size=case["micro"],
            device=CPU,
            place=None,
        )
        for _ in range(WARM_STEPS):
            _step(prepared, recipe, training)
        with record_function(_STEP):
            held = _step(prepared, recipe, training)
    resident = memory_use().peak - before
    prepared.close()
    return {**held, "peak": count.peak(), "resident": resident}


def _step(prepared: Prepared, recipe: Recipe, training: Training) -> dict[str, int]:
    """One optimizer step; what is held is counted where gradients are complete and nothing is updated yet."""
    batch = collate(recipe.samples, list(range(training.micro_batch_size)))
    with prepared.accumulating(last=True):
        loss, count = recipe.loss(prepared.model, batch)
        prepared.backward(loss / count)
    del loss
    held = {role: _bytes(tensors) for role, tensors in _held(prepared).items()}
    prepared.step(learning_rate=1e-3, clip=1.0)
    return held


def _held(prepared: Prepared) -> dict[str, list[Tensor]]:
    """Parameters, gradients and optimizer state of this process, as its strategy keeps them."""
    if hasattr(prepared, "optimizer"):
        parameters = list(prepared.inner.parameters())
        return {
            "parameters": parameters,
            "gradients": [p.grad for p in parameters if p.grad is not None],
            "optimizer": [value for state in prepared.optimizer.state.values() for value in state.values()],
        }
    return _held_by_deepspeed(prepared)


def _held_by_deepspeed(prepared: Any) -> dict[str, list[Tensor]]:
    from deepspeed.utils import safe_get_local_grad

    parameters = list(prepared.inner.parameters())
    optimizer = prepared._engine.optimizer
    moments = [value for state in optimizer.optimizer.state.values() for value in state.values()]
    return {
        "parameters": [p.ds_tensor for p in parameters],
        "gradients": [safe_get_local_grad(p) for p in parameters],
        "optimizer": [*optimizer.fp32_partitioned_groups_flat, *moments],
    }


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of distinct storages: views and ties count once."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}
    return sum(storages.values())


class _Count:
    """Allocations and frees in order, and where the measured step lies among them."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def peak(self) -> int:
        """Most bytes alive at once in the measured step, of all that was allocated since before the model was built."""
        step = next(event for event in self.events if event.name() == _STEP)
        begin, end = step.start_ns(), step.start_ns() + step.duration_ns()
        alive = peak = 0
        memory = (event for event in self.events if event.name() == "[memory]")
        for event in sorted(memory, key=lambda event: event.start_ns()):
            alive += event.nbytes()
            if begin <= event.start_ns() <= end:
                peak = max(peak, alive)
        return peak


@contextmanager
def _counting() -> Iterator[_Count]:
    count = _Count()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield count
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    count.events = results.events()


def main() -> None:
    """Join the other ranks and measure case after case."""
    rank, world_size, port = (int(argument) for argument in sys.argv[1:])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to stderr
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "DS_ACCELERATOR": "cpu"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(world_size)}
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    for case in json.load(sys.stdin):
        print(json.dumps(measure(case)), file=answers, flush=True)
    answers.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
