"""Which assumptions make the predictor say what was published for a 1B and a 3B model? A search over stated ones.

The source gives four figures for each model and neither number of GPUs, precision, batch nor length. Its first figure
is near 12 bytes for each parameter, which no mixed precision with fp32 weights can be (that takes 16), so layouts of
the states are part of what is searched; ours is one of them. Activations are counted on fake tensors, one micro batch
at a length, and scaled; nothing is allocated.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from ctj_api.spec import ActivationCheckpointing, Precision, Strategy
from ctj_trainer.memory_prediction import Activations, Workload, count_activations, peak_bytes
from ctj_trainer.memory_states import ModelSize, States, states_of
from ctj_trainer.recipes.causal_lm import llama_blocks, loss
from ctj_trainer.recipes.llama import Llama, LlamaShape

PUBLISHED_GB = {"1B": (12.4, 12.4, 4.1, 3.9), "3B": (36.8, 36.8, 11.2, 10.5)}
STRATEGIES = (Strategy.SINGLE, Strategy.DDP, Strategy.FSDP, Strategy.ZERO3)
SHAPES = {
    "1B": LlamaShape(
        vocabulary_size=32_000,
        hidden_size=2048,
        intermediate_size=5632,
        layers=18,
        heads=16,
        key_value_heads=16,
        head_size=128,
    ),
    "3B": LlamaShape(
        vocabulary_size=32_000,
        hidden_size=3072,
        intermediate_size=8192,
        layers=25,
        heads=24,
        key_value_heads=24,
        head_size=128,
    ),
}  # 1.05 and 3.03 billion parameters
GPUS = (2, 4, 8, 16)
LENGTHS = (128, 512, 2048)
BATCHES = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Bytes for each parameter."""

    name: str
    parameters: int
    gradients: int
    optimizer: int
    master: int
    """A copy of the weights that the optimizer updates; ZeRO-3 has one in every layout but pure bf16."""


LAYOUTS = (
    Layout(name="ours: fp32 weights, autocast", parameters=4, gradients=4, optimizer=8, master=0),
    Layout(name="bf16 weights and gradients, fp32 moments", parameters=2, gradients=2, optimizer=8, master=0),
    Layout(name="bf16 throughout", parameters=2, gradients=2, optimizer=4, master=0),
    Layout(name="bf16 weights and gradients, fp32 copy and moments", parameters=2, gradients=2, optimizer=8, master=4),
)


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """One point of the search."""

    layout: Layout
    gpus: int
    length: int
    batch: int
    checkpointing: ActivationCheckpointing

    def __str__(self) -> str:
        return (
            f"{self.layout.name}; {self.gpus} GPUs; micro batch {self.batch} of {self.length} tokens; "
            f"activation checkpointing {self.checkpointing}"
        )


@dataclass(frozen=True, kw_only=True)
class Fit:
    """An assumption and what it predicts, in GB by model and strategy."""

    assumption: Assumption
    predicted: dict[str, tuple[float, ...]]

    @property
    def worst(self) -> float:
        """Largest relative difference from the published figures."""
        return max(
            abs(value / published - 1)
            for model, values in self.predicted.items()
            for value, published in zip(values, PUBLISHED_GB[model], strict=True)
        )


def search() -> list[Fit]:
    """Return the best fit of every layout, the best layout first."""
    counted = {
        (model, length, cast): _counted(SHAPES[model], length, cast=cast)
        for model, length, cast in product(SHAPES, LENGTHS, (True, False))
    }
    best: dict[str, Fit] = {}
    for assumption in _assumptions():
        fit = Fit(
            assumption=assumption,
            predicted={
                m: _row(assumption, *counted[m, assumption.length, assumption.layout.parameters == 4]) for m in SHAPES
            },
        )
        known = best.get(assumption.layout.name)
        if known is None or fit.worst < known.worst:
            best[assumption.layout.name] = fit
    return sorted(best.values(), key=lambda fit: fit.worst)


def size_of(model: str) -> ModelSize:
    """Count a published model."""
    with torch.device("meta"):
        built = Llama(SHAPES[model])
    return ModelSize.of(built, llama_blocks(built))


def _assumptions() -> Iterator[Assumption]:
    for layout, gpus, length, batch, checkpointing in product(LAYOUTS, GPUS, LENGTHS, BATCHES, ActivationCheckpointing):
        yield Assumption(layout=layout, gpus=gpus, length=length, batch=batch, checkpointing=checkpointing)


def _counted(shape: LlamaShape, length: int, *, cast: bool) -> tuple[ModelSize, Activations]:
    """Activations in bf16: of fp32 weights that autocast casts, keeping the copies, or of bf16 weights."""
    with torch.device("meta"):
        model = Llama(shape)
    precision = Precision.BF16
    if not cast:
        model, precision = model.bfloat16(), Precision.FP32
    blocks = llama_blocks(model)
    workload = Workload(
        loss=loss,
        sample={"tokens": torch.zeros(length + 1, dtype=torch.long)},
        blocks=blocks,
        micro_batch_size=1,
        device=torch.device("cpu"),
    )
    return ModelSize.of(model, blocks), count_activations(model, workload, precision)


def _row(assumption: Assumption, size: ModelSize, one: Activations) -> tuple[float, ...]:
    batch = assumption.batch
    activations = Activations(
        outside=one.outside * batch,
        inside=tuple(value * batch for value in one.inside),
        entrances=tuple(value * batch for value in one.entrances),
        largest=one.largest * batch,
    )
    worlds = (1, *[assumption.gpus] * 3)
    return tuple(
        peak_bytes(
            _laid_out(states_of(size, strategy, world), size, strategy, assumption.layout, world),
            size,
            activations,
            checkpointing=assumption.checkpointing,
        )
        / 1e9
        for strategy, world in zip(STRATEGIES, worlds, strict=True)
    )


def _laid_out(states: States, size: ModelSize, strategy: Strategy, layout: Layout, world: int) -> States:
    """Our strategy's layout with other bytes for each parameter; what is gathered has the type of the weights."""
    share = size.parameters // (world if strategy in (Strategy.FSDP, Strategy.ZERO3) else 1)
    return States(
        parameters=share * layout.parameters,
        gradients=share * layout.gradients,
        optimizer=share * (layout.optimizer + layout.master),
        gradients_stay=states.gradients_stay,
        buffers=states.buffers * layout.gradients // 4,
        gathered=states.gathered * layout.parameters // 4,
        flushed=states.flushed * layout.gradients // 4,
        flushes_early=states.flushes_early,
    )
