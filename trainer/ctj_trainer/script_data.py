"""Where in its data does somebody's own Accelerate script go on after a restart? Exactly where it was, or not at all.

For scripts that keep their loop; a recipe's samples are addressed by step and need none of this. Save a `Position` with
each checkpoint, and call `rest_of_epoch` for every epoch from the resumed one on.
"""

from dataclasses import dataclass
from typing import Any


class InexactResumeError(ValueError):
    """The loader's order cannot be repeated: samples would be seen twice or never in the resumed epoch."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """A place in a shuffled loader's stream; `batches` counts from the epoch's start, however often it was resumed."""

    epoch: int
    batches: int
    seed: int | None
    """Of the order; None where the order has none."""


def position(loader: Any, *, epoch: int, batches: int) -> Position:
    """Describe where a prepared loader stands, for the checkpoint."""
    return Position(epoch=epoch, batches=batches, seed=getattr(_sampler(loader), "initial_seed", None))


def rest_of_epoch(loader: Any, at: Position, *, allow_inexact: bool = False) -> Any:
    """Return a loader of the batches after `at` in its epoch: the same ones an uninterrupted run would see.

    Raises:
        InexactResumeError: that cannot be known, and was not allowed.
    """
    from accelerate.data_loader import skip_first_batches

    problem = _why_inexact(loader, at)
    if problem and not allow_inexact:
        raise InexactResumeError(f"{problem}; or pass allow_inexact=True and accept repeated and lost samples")
    # On the loader too: the skipping one does not reach a sampler behind a shard, and would take the order of epoch 0.
    loader.set_epoch(at.epoch)
    rest = skip_first_batches(loader, at.batches)
    rest.set_epoch(at.epoch)
    return rest


def _why_inexact(loader: Any, at: Position) -> str:
    from accelerate.data_loader import SeedableRandomSampler
    from torch.utils.data import IterableDataset, SequentialSampler

    sampler = _sampler(loader)
    if isinstance(loader.dataset, IterableDataset):
        return "the data set is iterable and has no order that can be repeated; give it indices"
    if isinstance(sampler, SeedableRandomSampler):
        if sampler.initial_seed == at.seed:
            return ""
        return (
            f"the order's seed is {sampler.initial_seed}, and was {at.seed} when the position was saved; "
            "set data_seed in DataLoaderConfiguration, or call set_seed before prepare as the first run did"
        )
    if isinstance(sampler, SequentialSampler) or hasattr(sampler, "set_epoch"):
        return ""
    return (
        f"the order of a {type(sampler).__name__} depends on what the process drew before; "
        "use DataLoaderConfiguration(use_seedable_sampler=True)"
    )


def _sampler(loader: Any) -> Any:
    from accelerate.data_loader import get_sampler

    return get_sampler(loader)
