"""What is the gradient of one optimizer step? Forward and backward of every micro batch, and the global mean loss.

The loss is a sum over tokens divided by the token count of all ranks and micro batches, so a ragged batch gives the
same number however it is split. The count is needed before the first backward: taken from the recipe where it tells,
else assumed equal for every sample, checked, and counted by an extra forward from then on where the check fails.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ctj_api.attempt import Attempt
from ctj_trainer.batches import SampleOrder, micro_batches, step_seed
from ctj_trainer.ranks import Ranks
from ctj_trainer.recipe import Batch, Recipe, RecipeError, collate, loss_of
from ctj_trainer.strategies.prepared import Prepared

COUNTING_NOTICE = (
    "token counts differ between samples: each step runs an extra forward to count them; give Recipe.count_tokens"
)


@dataclass(frozen=True, kw_only=True)
class StepLoss:
    """Global mean loss per token, and the global token count."""

    loss: float
    tokens: int


class Gradients:
    """Compute gradients into `prepared`; the caller updates or discards them."""

    def __init__(  # noqa: PLR0913  # independent parts; only the stage puts them together
        self,
        prepared: Prepared,
        recipe: Recipe,
        *,
        attempt: Attempt,
        ranks: Ranks,
        eagerly: Callable[[], AbstractContextManager[None]] = nullcontext,
        before_forward: Callable[[Batch], None] = lambda _: None,
    ) -> None:
        self._prepared = prepared
        self._recipe = recipe
        training = attempt.training
        self._seed = training.seed
        self._micro_batch_size = attempt.micro_batch_size
        self._ranks = ranks
        self._eagerly = eagerly
        self._before_forward = before_forward
        self._order = SampleOrder(
            num_samples=len(recipe.samples), global_batch_size=training.global_batch_size, seed=training.seed
        )
        self._per_sample: float | None = None
        self.counts_by_forward = False

    def batches_of(self, step: int) -> list[Batch]:
        """This rank's micro batches of a step, on its device."""
        shares = micro_batches(
            self._order.of_step(step),
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            micro_batch_size=self._micro_batch_size,
        )
        return [self._on_device(collate(self._recipe.samples, share)) for share in shares]

    def compute(self, step: int, batches: Sequence[Batch], *, seed_offset: int = 0) -> StepLoss:
        """Leave the gradients of these micro batches in the model. Collective.

        Every generator is seeded by (seed, step, rank), so no generator state is ever saved.
        """
        torch.manual_seed(step_seed(seed=self._seed + seed_offset, step=step, rank=self._ranks.rank))
        divisor = self._count(batches)
        loss, tokens, as_assumed = self._accumulate(batches, divisor)
        if as_assumed:
            return StepLoss(loss=loss, tokens=tokens)
        # All ranks come here together: the sums are the same everywhere.
        self._prepared.discard_gradients()
        self.counts_by_forward = True
        return self.compute(step, batches, seed_offset=seed_offset)

    def rehearse(self, batch: Batch) -> None:
        """Forward and backward of one batch, gradients dropped; alone where the strategy allows, else collective."""
        with self._prepared.accumulating(last=not self._prepared.computes_alone):
            self._before_forward(batch)
            loss, count = self._recipe.loss(self._prepared.model, batch)
            self._prepared.backward(loss / max(float(count), 1.0))
        self._prepared.discard_gradients()

    def _accumulate(self, batches: Sequence[Batch], divisor: float | None) -> tuple[float, int, bool]:
        device = self._ranks.device
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        tokens = torch.zeros((), dtype=torch.float64, device=device)
        for index, batch in enumerate(batches):
            with self._prepared.accumulating(last=index == len(batches) - 1):
                self._before_forward(batch)
                loss, count = loss_of(self._recipe, self._prepared.model, batch)
                if divisor is None:
                    self._per_sample = float(count) / _num_samples(batch)
                    divisor = self._per_sample * self._global_samples(batches) or 1.0  # no token of this one counts
                self._prepared.backward(loss / divisor)
            loss_sum += loss.detach()
            tokens += count
        return self._global(loss_sum, tokens, sum(map(_num_samples, batches)))

    def _global(self, loss_sum: Tensor, tokens: Tensor, num_samples: int) -> tuple[float, int, bool]:
        if self._is_counted:
            total, count = self._ranks.add_up([loss_sum, tokens])
            return _mean(total, count), int(count), True
        per_sample = self._per_sample or 0.0
        unexpected = (tokens != per_sample * num_samples).to(torch.float64)
        total, count, wrong, sum_of, sum_of_squares = self._ranks.add_up(
            [loss_sum, tokens, unexpected, per_sample, per_sample**2]
        )
        ranks_agree = sum_of**2 == sum_of_squares * self._ranks.world_size  # exact: small whole numbers
        return _mean(total, count), int(count), wrong == 0 and ranks_agree

    @property
    def _is_counted(self) -> bool:
        return self._recipe.count_tokens is not None or self.counts_by_forward

    def _count(self, batches: Sequence[Batch]) -> float | None:
        """Tokens of the step over all ranks; None before the first forward has shown how many a sample has."""
        if self._recipe.count_tokens is not None:
            return self._ranks.add_up([sum(self._recipe.count_tokens(batch) for batch in batches)])[0]
        if self.counts_by_forward:
            return self._ranks.add_up([self._count_by_forward(batches)])[0]
        return None if self._per_sample is None else self._per_sample * self._global_samples(batches)

    def _count_by_forward(self, batches: Sequence[Batch]) -> float:
        with torch.no_grad(), self._eagerly():  # compiled code would be compiled again for the missing gradient mode
            return sum(float(loss_of(self._recipe, self._prepared.model, batch)[1]) for batch in batches)

    def _global_samples(self, batches: Sequence[Batch]) -> int:
        """Samples of all ranks: shares are equal."""
        return sum(map(_num_samples, batches)) * self._ranks.world_size

    def _on_device(self, batch: Batch) -> Batch:
        return {key: tensor.to(self._ranks.device, non_blocking=True) for key, tensor in batch.items()}


def _mean(total: float, count: float) -> float:
    if count == 0:
        raise RecipeError(
            "the recipe's loss counted no token in a whole step; its second value must be the number of targets that "
            "the first one sums up; look at the mask of this step's samples"
        )
    return total / count


def _num_samples(batch: Batch) -> int:
    return len(next(iter(batch.values())))
