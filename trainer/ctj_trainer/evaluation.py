"""How good is the model on samples it never trained on? Which samples those are, and their mean loss.

Eager and without dropout in every stage, on the same samples each time, so that the numbers of all stages compare and
nothing is compiled for them. Neither the order of training samples nor any generator that training uses is touched.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from ctj_api.attempt import Attempt
from ctj_api.spec import Evaluation
from ctj_trainer.ranks import Ranks
from ctj_trainer.recipe import Batch, DataError, Recipe, Samples, collate
from ctj_trainer.strategies.prepared import Prepared


@dataclass(frozen=True, kw_only=True)
class Part:
    """Samples [start, stop) of others."""

    whole: Samples
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, index: int) -> Batch:
        """Return one sample."""
        return self.whole[self.start + index]


def hold_out(recipe: Recipe, evaluation: Evaluation | None) -> Recipe:
    """Return a recipe whose `evaluation` samples are not among its `samples`.

    Raises:
        DataError: there are too few samples.
    """
    if evaluation is None or recipe.evaluation is not None:
        return recipe
    total = len(recipe.samples)
    held = max(int(total * float(evaluation.share)), 1)
    if held >= total:
        raise DataError(f"spec.training.evaluation holds out {held} of {total} samples; add data, or leave it out")
    trained = Part(whole=recipe.samples, start=0, stop=total - held)
    return dataclasses.replace(
        recipe, samples=trained, evaluation=Part(whole=recipe.samples, start=total - held, stop=total)
    )


class Evaluator:
    """Measures the mean token loss of the held-out samples; every rank forwards its share."""

    def __init__(
        self,
        prepared: Prepared,
        recipe: Recipe,
        *,
        attempt: Attempt,
        ranks: Ranks,
        eagerly: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._prepared = prepared
        self._recipe = recipe
        self._training = attempt.training
        self._end_step = attempt.window.end_step
        self._micro_batch_size = attempt.micro_batch_size
        self._ranks = ranks
        self._eagerly = eagerly

    def is_due(self, step: int) -> bool:
        """Whether something is evaluated after this step: every so often, and at the end of the stage."""
        evaluation = self._training.evaluation
        return evaluation is not None and (step % evaluation.every_steps == 0 or step == self._end_step)

    def loss(self, *, is_stopping: Callable[[], bool]) -> float | None:
        """Return the global mean, None where a stop was asked for meanwhile on any rank. Collective."""
        total, tokens = 0.0, 0.0
        with self._eagerly(), self._prepared.evaluating():
            for batch, counts in self._rounds():
                if self._ranks.vote([is_stopping()])[0]:
                    return None
                # A rank without a share of the last round forwards all the same: parameters are gathered by all.
                loss, count = self._recipe.loss(self._prepared.model, batch)
                total += float(loss) * counts
                tokens += float(count) * counts
        total, tokens = self._ranks.add_up([total, tokens])
        return total / tokens

    def _rounds(self) -> Iterator[tuple[Batch, bool]]:
        """Yield this rank's batches, as many as every other rank has, and whether each one counts."""
        samples, evaluation = self._recipe.evaluation, self._training.evaluation
        assert samples is not None
        assert evaluation is not None
        wanted = min(evaluation.steps * self._training.global_batch_size, len(samples))
        starts = range(0, wanted, self._micro_batch_size)
        chunks = [range(start, min(start + self._micro_batch_size, wanted)) for start in starts]
        rank, world = self._ranks.rank, self._ranks.world_size
        for first in range(0, len(chunks), world):
            is_mine = first + rank < len(chunks)
            yield self._batch(chunks[first + rank] if is_mine else chunks[0]), is_mine

    def _batch(self, indices: range) -> Batch:
        assert self._recipe.evaluation is not None
        batch = collate(self._recipe.evaluation, indices)
        return {key: tensor.to(self._ranks.device, non_blocking=True) for key, tensor in batch.items()}
