"""FSDP2: parameters, gradients and optimizer state lie in shards, one block at a time is gathered."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ctj_api.spec import Offload, Training
from ctj_trainer.strategies.foundation import named_tensors
from ctj_trainer.strategies.optimized import Optimized


class Fsdp(Optimized):
    """Shards over all ranks.

    Gradients are reduced and scattered in every micro batch: waiting for the last one would keep whole, unsharded
    gradients in memory, which is what this strategy exists to avoid.
    """

    computes_alone = False

    def __init__(
        self,
        inner: nn.Module,
        blocks: list[nn.Module],
        training: Training,
        *,
        device: torch.device,
        offload: Offload = Offload.NONE,
    ) -> None:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        # The root's own group holds what is outside the blocks, and blocks that share a parameter with anything else:
        # tied weights must lie in one group to stay one parameter (two raise, huggingface/accelerate#4171).
        policy = offload_policy(offload, device)
        for unit in [*untied(blocks, inner), inner]:
            fully_shard(unit, mesh=mesh, offload_policy=policy)
            _sum_gradients(unit)
        super().__init__(inner, inner, training)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Forward only, and then shard again: the root waits for a backward to do so, and none follows."""
        with super().evaluating():
            yield
        assert isinstance(self.inner, FSDPModule)
        self.inner.reshard()

    @torch.no_grad()
    def full_weights(self) -> dict[str, Tensor]:
        """Gather one tensor at a time; only rank 0 keeps it."""
        weights = {}
        for name, tensor in named_tensors(self.inner).items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if dist.get_rank() == 0:
                weights[name] = whole.detach().cpu()
        return weights


def offload_policy(offload: Offload, device: torch.device) -> OffloadPolicy:
    """FSDP2 moves shards, gradients and optimizer state together, or nothing."""
    return OffloadPolicy() if offload is Offload.NONE else CPUOffloadPolicy(pin_memory=device.type == "cuda")


def untied(blocks: list[nn.Module], model: nn.Module) -> list[nn.Module]:
    """Return the blocks whose parameters are theirs alone."""
    places = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    return [
        block
        for block in blocks
        if Counter(id(p) for module in block.modules() for p in module.parameters(recurse=False)).items()
        <= places.items()
    ]


def _sum_gradients(unit: nn.Module) -> None:
    """FSDP2 averages over ranks unless told otherwise; plain sums need no special reduction of the backend."""
    assert isinstance(unit, FSDPModule)
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)
