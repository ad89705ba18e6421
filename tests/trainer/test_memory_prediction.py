"""Predicted bytes against real ones: states to the byte, activations to the byte of what autograd keeps."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ctj_api.spec import ActivationCheckpointing, Precision, Stage, Strategy, Training
from ctj_trainer.memory_prediction import (
    CannotPredict,
    ModelSize,
    Workload,
    count_activations,
    predict_memory,
    state_bytes,
)
from ctj_trainer.recipes.llama import Llama, LlamaShape

LENGTH, MICRO = 64, 4
CPU = torch.device("cpu")


def build(*, tied: bool = False) -> Llama:
    shape = LlamaShape(
        vocabulary_size=256,
        hidden_size=64,
        intermediate_size=96,
        layers=3,
        heads=4,
        key_value_heads=2,
        head_size=16,
        tie_embeddings=tied,
    )
    return Llama(shape)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    tokens = batch["tokens"]
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten(), reduction="sum"), torch.tensor(
        tokens.numel()
    )


def on_meta(**options: bool) -> tuple[Llama, Workload]:
    with torch.device("meta"):
        model = build(**options)
    sample = {"tokens": torch.zeros(LENGTH, dtype=torch.long)}
    return model, Workload(
        loss=loss, sample=sample, blocks=list(model.model.layers), micro_batch_size=MICRO, device=CPU
    )


def stage(strategy: Strategy, processes: int = 1) -> Stage:
    return Stage(name="s", strategy=strategy, processes_per_node=processes)


def size_of(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("tied", [False, True])
def test_states_of_one_process_are_exact(tied: bool) -> None:
    real = build(tied=tied)
    optimizer = torch.optim.AdamW(real.parameters())
    loss(real, {"tokens": torch.randint(0, 256, (1, 8))})[0].backward()
    optimizer.step()
    parameters = list(real.parameters())
    moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    actual = size_of(parameters) + size_of([p.grad for p in parameters if p.grad is not None]) + size_of(moments)

    model, workload = on_meta(tied=tied)
    size = ModelSize.of(model, workload.blocks)
    assert state_bytes(size, stage=stage(Strategy.SINGLE), precision=Precision.FP32) == actual


def test_frozen_parameters_need_no_gradient_and_no_moments() -> None:
    model, workload = on_meta()
    for parameter in model.model.parameters():
        parameter.requires_grad = False
    size = ModelSize.of(model, workload.blocks)
    head = model.lm_head.weight.numel()
    expected = 4 * size.parameters + 12 * head
    assert state_bytes(size, stage=stage(Strategy.DDP, 2), precision=Precision.FP32) == expected


@pytest.mark.parametrize("precision", list(Precision))
def test_activations_are_what_autograd_keeps(precision: Precision) -> None:
    real = build()
    known = {p.untyped_storage().data_ptr() for p in (*real.parameters(), *real.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage
        return tensor

    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision is Precision.BF16)
    with autocast, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss(real, {"tokens": torch.randint(0, 256, (MICRO, LENGTH))})
    actual = sum(storage.nbytes() for storage in kept.values())

    model, workload = on_meta()
    counted = count_activations(model, workload, precision)
    assert counted.outside + sum(counted.inside) == actual


def test_checkpointed_blocks_keep_their_entrance_only() -> None:
    model, workload = on_meta()
    counted = count_activations(model, workload, Precision.FP32)
    hidden = MICRO * LENGTH * 64 * 4
    assert counted.entrances == (hidden,) * 3
    whole, thin = (counted.peak(choice) for choice in (ActivationCheckpointing.NONE, ActivationCheckpointing.BLOCKS))
    assert whole - thin == sum(counted.inside) - max(counted.inside) - 3 * hidden


def test_sharding_divides_states_over_processes() -> None:
    model, workload = on_meta()
    size = ModelSize.of(model, workload.blocks)
    for strategy in (Strategy.FSDP, Strategy.ZERO3):
        two, four = (state_bytes(size, stage=stage(strategy, n), precision=Precision.FP32) for n in (2, 4))
        per_element = 16 if strategy is Strategy.FSDP else 20  # ZeRO-3 keeps a second copy of the weights
        assert two - four == size.parameters * per_element // 4


def test_every_stage_of_the_ladder_is_predicted_with_its_share_of_the_machine() -> None:
    model, workload = on_meta()
    training = Training(steps=1, global_batch_size=4, micro_batch_size=MICRO)
    ladder = [stage(Strategy.SINGLE), stage(Strategy.FSDP, 2)]
    single, fsdp = predict_memory(model, workload, ladder=ladder, training=training)
    plus = predict_memory(model, workload, ladder=ladder, training=training, baseline_bytes=1000)
    assert single.limit_bytes is not None
    assert fsdp.limit_bytes == single.limit_bytes // 2
    assert plus[0].predicted_bytes == single.predicted_bytes + 1000


def test_a_model_that_looks_at_values_cannot_be_predicted() -> None:
    def looking(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        total, count = loss(model, batch)
        return total * float(total), count

    model, workload = on_meta()
    looking_workload = Workload(
        loss=looking, sample=workload.sample, blocks=workload.blocks, micro_batch_size=1, device=CPU
    )
    with pytest.raises(CannotPredict, match="memory prediction"):
        count_activations(model, looking_workload, Precision.FP32)
