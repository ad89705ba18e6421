"""DeepSpeed ZeRO-3: parameters, gradients and optimizer state are cut into flat pieces; DeepSpeed gathers each block.

Only this file knows DeepSpeed, and imports it late: 10 s that no other strategy pays.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ctj_api.spec import Offload, Training
from ctj_trainer.loss_scale import LossScale
from ctj_trainer.optimizer import build_adamw, create_state, set_learning_rate
from ctj_trainer.prebuild import hand_over
from ctj_trainer.strategies.foundation import forward_only, named_tensors
from ctj_trainer.strategies.prepared import ReadTensors

MOMENTS = ("exp_avg", "exp_avg_sq")
REDUCE_BUCKET_ELEMENTS = 50_000_000  # 200 MB; DeepSpeed's default takes 2 GB of every GPU
READ_AT_ONCE_BYTES = 256 * 2**20  # whole parameters in memory while a checkpoint is restored


class StrategyUnavailableError(RuntimeError):
    """A chosen strategy needs something that is not installed; the message says what and how."""


def import_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed for this device.

    Raises:
        StrategyUnavailableError: it is not installed.
    """
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
    except ImportError as error:
        raise StrategyUnavailableError(
            f"strategy zero3 needs deepspeed ({error}); install it with: pip install 'ctj[trainer]', "
            "or choose strategy fsdp"
        ) from error
    if device.type == "cpu":
        hand_over()
    return deepspeed


def make_leaves(model: nn.Module, blocks: list[nn.Module], *, device: torch.device) -> None:
    """Let ZeRO-3 gather block by block: its hooks stay outside a block, so a compiled block is one graph (else 33)."""
    import_deepspeed(device)
    from deepspeed.utils import set_z3_leaf_modules

    if not blocks:
        return
    for block in blocks:
        block.register_forward_pre_hook(_require_gradient)
    set_z3_leaf_modules(model, sorted({type(block) for block in blocks}, key=lambda cls: cls.__name__))


def _require_gradient(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Let a gradient flow into a block's inputs even if nobody needs it there.

    DeepSpeed collects a leaf's gradients in its full backward hook, which fires too early, before the leaf's own
    backward, where no input requires a gradient: behind frozen embeddings, or in a first block fed with data.
    """
    floating = [isinstance(value, Tensor) and value.is_floating_point() for value in inputs]
    if not torch.is_grad_enabled() or True not in floating:
        return None
    if any(value.requires_grad for value, is_floating in zip(inputs, floating, strict=True) if is_floating):
        return None
    first = floating.index(True)
    return (*inputs[:first], inputs[first].detach().requires_grad_(), *inputs[first + 1 :])


class Zero3:
    """A DeepSpeed engine behind the verbs of `Prepared`."""

    computes_alone = False

    def __init__(
        self,
        inner: nn.Module,
        training: Training,
        *,
        micro_batch_size: int,
        device: torch.device,
        offload: Offload = Offload.NONE,
    ) -> None:
        deepspeed = import_deepspeed(device)
        self._zero = deepspeed.zero
        self.inner = inner
        self._trainable = {name: p for name, p in inner.named_parameters() if p.requires_grad}
        self.num_elements = sum(tensor.numel() for tensor in named_tensors(inner).values())
        settings = _settings(micro_batch_size, device, self.num_elements, offload)
        # Cut parameter by parameter now: `initialize` alone would first move the whole model to the device.
        deepspeed.zero.Init(module=inner, config_dict_or_path=settings)
        inner.to(device)  # buffers
        engine, *_ = deepspeed.initialize(model=inner, optimizer=build_adamw(inner, training), config=settings)
        self.model = engine
        self._engine = engine
        self.loss_scale = LossScale.of(training, averaged_over=dist.get_world_size())
        self._adamw = engine.optimizer.optimizer
        self._flat_groups = engine.optimizer.fp32_partitioned_groups_flat
        # DeepSpeed would create the state in the first step; before that, restoring into it fails silently.
        create_state(self._adamw, self._flat_groups)

    @contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        """DeepSpeed reduces every micro batch; the flag only tells it when the step is complete."""
        self._engine.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: Tensor) -> None:
        """DeepSpeed divides by the number of processes (always) and of micro batches (not if told so)."""
        if self.loss_scale is not None:
            # DeepSpeed applies it, and takes it off when it clips. Its own scaler comes only with fp16 weights.
            self._engine.optimizer.override_loss_scale(self.loss_scale.factor)
        self._engine.backward(loss.float() * dist.get_world_size(), scale_wrt_gas=False)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Forward only."""
        with forward_only(self.inner):
            yield

    def step(self, *, learning_rate: float, clip: float) -> float:
        """Clip, update, zero; DeepSpeed itself skips the update if a gradient is not finite."""
        norm = self._gradient_norm()
        if math.isfinite(norm):
            self._engine.optimizer.clip_grad = clip
            set_learning_rate(self._adamw, learning_rate)
            self._engine.step()
        else:
            self._engine.optimizer.zero_grad()
        if self.loss_scale is not None:
            self.loss_scale.learn(norm)
        return norm

    def discard_gradients(self) -> float:
        """Norm, then start the accumulation anew."""
        norm = self._gradient_norm()
        self._engine.optimizer.zero_grad()
        return norm

    @torch.no_grad()
    def state(self) -> dict[str, Tensor]:
        """Gather tensor by tensor; each is kept by one rank only, the one that holds least so far."""
        share = _FairShares()
        kept: dict[str, Tensor] = {}
        for name, tensor in named_tensors(self.inner).items():
            mine = share.next(_whole_numel(tensor)) == dist.get_rank()
            gathered = {f"model.{name}": self._whole(tensor)}
            if name in self._trainable:
                gathered |= {f"optimizer.{name}.{key}": self._whole(tensor, key) for key in MOMENTS}
                gathered[f"optimizer.{name}.step"] = self._steps()
            if mine:
                kept |= {key: value.detach().cpu().clone() for key, value in gathered.items()}
        return kept

    @torch.no_grad()
    def load_state(self, read: ReadTensors) -> None:
        """Read whole parameters, a bounded number at a time; each rank keeps its piece."""
        from deepspeed.utils import safe_set_full_optimizer_state

        steps = torch.zeros(())
        for chunk in self._restore_chunks():
            wanted = {key: value for name, tensor in chunk.items() for key, value in self._blank(name, tensor).items()}
            read(wanted)
            for name, tensor in chunk.items():
                self._put(tensor, wanted[f"model.{name}"])
                if name in self._trainable:
                    for key in MOMENTS:
                        safe_set_full_optimizer_state(tensor, wanted[f"optimizer.{name}.{key}"], key)
                    steps = torch.maximum(steps, wanted[f"optimizer.{name}.step"])
        for flat in self._flat_groups:
            self._adamw.state[flat]["step"].copy_(steps)

    @torch.no_grad()
    def full_weights(self) -> dict[str, Tensor]:
        """Gather one tensor at a time; only rank 0 keeps it."""
        weights = {}
        for name, tensor in named_tensors(self.inner).items():
            whole = self._whole(tensor)
            if dist.get_rank() == 0:
                weights[name] = whole.detach().cpu().clone()
        return weights

    def close(self) -> None:
        """Remove the engine's hooks."""
        self._engine.destroy()

    def _gradient_norm(self) -> float:
        """Global norm from the reduced pieces; ours, since DeepSpeed reports none where a gradient is not finite."""
        from deepspeed.utils import safe_get_local_grad

        pieces = [safe_get_local_grad(p) for p in self._trainable.values()]
        total = torch.stack(torch._foreach_norm(pieces)).square().sum()
        dist.all_reduce(total)
        return float(total.sqrt()) / (1.0 if self.loss_scale is None else self.loss_scale.factor)

    def _whole(self, tensor: Tensor, moment: str | None = None) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if not hasattr(tensor, "ds_id"):
            return tensor  # a buffer
        if not tensor.requires_grad:
            with self._zero.GatheredParameters([tensor]):
                return tensor.detach().clone()
        whole: Tensor = (
            safe_get_full_fp32_param(tensor) if moment is None else safe_get_full_optimizer_state(tensor, moment)
        )
        return whole.view(getattr(tensor, "ds_shape"))  # noqa: B009  # DeepSpeed's attribute, unknown to mypy

    def _steps(self) -> Tensor:
        steps: Tensor = self._adamw.state[self._flat_groups[0]]["step"]
        return steps

    def _restore_chunks(self) -> Iterator[dict[str, Tensor]]:
        chunk: dict[str, Tensor] = {}
        held = 0
        for name, tensor in named_tensors(self.inner).items():
            chunk[name] = tensor
            held += (1 + len(MOMENTS)) * 4 * _whole_numel(tensor)
            if held > READ_AT_ONCE_BYTES:
                yield chunk
                chunk, held = {}, 0
        if chunk:
            yield chunk

    def _blank(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        shape = getattr(tensor, "ds_shape", tensor.shape)
        blank = {f"model.{name}": torch.empty(shape, dtype=tensor.dtype)}
        if name in self._trainable:
            blank |= {f"optimizer.{name}.{key}": torch.empty(shape) for key in MOMENTS}
            blank[f"optimizer.{name}.step"] = torch.empty(())
        return blank

    def _put(self, tensor: Tensor, value: Tensor) -> None:
        """Set a weight twice: what the next forward gathers, and the optimizer's fp32 copy.

        Setting only the latter, as DeepSpeed's `safe_set_full_fp32_param` does, leaves the next forward on the old
        weights without a word.
        """
        from deepspeed.utils import safe_set_full_fp32_param

        if not hasattr(tensor, "ds_id"):
            tensor.copy_(value)
            return
        with self._zero.GatheredParameters([tensor], modifier_rank=0):
            if dist.get_rank() == 0:
                tensor.copy_(value)
        if tensor.requires_grad:
            safe_set_full_fp32_param(tensor, value)


class _FairShares:
    """Deals tensors to ranks so that each gathers about the same number of bytes."""

    def __init__(self) -> None:
        self._held = [0] * dist.get_world_size()

    def next(self, numel: int) -> int:
        rank = self._held.index(min(self._held))
        self._held[rank] += numel
        return rank


def _whole_numel(tensor: Tensor) -> int:
    return int(getattr(tensor, "ds_numel", tensor.numel()))


def offload_settings(offload: Offload, device: torch.device) -> dict[str, Any]:
    """Sections of DeepSpeed's configuration that move parameters, or the optimizer too, to the host."""
    host = {"device": "cpu", "pin_memory": device.type == "cuda"}
    sections = {
        Offload.NONE: (),
        Offload.PARAMETERS: ("offload_param",),
        Offload.PARAMETERS_AND_OPTIMIZER: ("offload_param", "offload_optimizer"),
    }
    return {section: dict(host) for section in sections[offload]}


def _settings(micro_batch_size: int, device: torch.device, num_elements: int, offload: Offload) -> dict[str, Any]:
    """DeepSpeed's configuration; everything not named here is its default."""
    return {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        # We say which micro batch is the last one: accumulation may change between attempts.
        "gradient_accumulation_steps": 1,
        "zero_optimization": {
            "stage": 3,
            **offload_settings(offload, device),
            "overlap_comm": device.type == "cuda",
            "reduce_bucket_size": min(REDUCE_BUCKET_ELEMENTS, num_elements),
            # Else blocks stay gathered from forward to backward in any model below half a billion parameters.
            "stage3_max_reuse_distance": 0,
            # It replaces torch.nn.functional.linear for the whole process, and breaks compiled graphs.
            "memory_efficient_linear": False,
            # Small parameters are gathered with their block anyway; keeping them whole would save nothing.
            "stage3_param_persistence_threshold": 0,
        },
        "zero_allow_untested_optimizer": True,  # plain AdamW: the same arithmetic as the other strategies
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**62,
        "wall_clock_breakdown": False,
    }
