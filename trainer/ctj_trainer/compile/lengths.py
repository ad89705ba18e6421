"""Which sizes of this batch are lengths that change? Marked where compiled code begins, so one graph serves them all.

Without a mark torch compiles the first length it meets, and again for all when it meets a second one. A mark on the
batch itself does not reach a block's inputs, which are new tensors: there each dimension that is as long as a declared
one at the first call is marked, then and ever after (torch compiles again for a dimension marked later). A size that
only happened to be equal (the hidden size) is bound by the weights, and torch goes back to it.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from ctj_trainer.compile.policy import CompileConfigError

Call = Callable[..., Any]


class Lengths:
    """The declared dimensions of a batch, and their sizes in the batch at hand."""

    def __init__(self, dims: Mapping[str, tuple[int, ...]]) -> None:
        self._dims = dims
        self._sizes: frozenset[int] = frozenset()
        self._checked = False
        self._chosen: dict[tuple[type, int, int], list[int]] = {}

    def see(self, batch: Mapping[str, Any]) -> None:
        """Take the sizes of the next forward's batch, and mark the batch itself.

        Raises:
            CompileConfigError: a declared tensor or dimension is not there.
        """
        if not self._checked:
            self._check(batch)
        sizes = set()
        for name, dims in self._dims.items():
            tensor = batch.get(name)
            if isinstance(tensor, Tensor):
                sizes |= {tensor.shape[dim] for dim in dims}
                _mark(tensor, dims)
        # 0 and 1 are always compiled for themselves.
        self._sizes = frozenset(size for size in sizes if size > 1)

    def marking(self, call: Call) -> Call:
        """Return `call`, its tensors marked before compiled code begins."""

        def marked(module: nn.Module, *inputs: Any, **keywords: Any) -> Any:
            if self._sizes:
                for place, tensor in enumerate(_tensors((*inputs, *keywords.values()))):
                    _mark(tensor, self._dims_of((type(module), place, tensor.dim()), tensor))
            return call(module, *inputs, **keywords)

        return marked

    def _dims_of(self, key: tuple[type, int, int], tensor: Tensor) -> list[int]:
        if key not in self._chosen:
            equal = [dim for dim, size in enumerate(tensor.shape) if size in self._sizes]
            if not equal:
                return equal
            self._chosen[key] = equal
        return self._chosen[key]

    def _check(self, batch: Mapping[str, Any]) -> None:
        self._checked = True
        problems = []
        for name, dims in self._dims.items():
            tensor = batch.get(name)
            if not isinstance(tensor, Tensor):
                known = ", ".join(sorted(key for key, value in batch.items() if isinstance(value, Tensor)))
                problems.append(f"dynamic_dims names {name!r}; the batch has {known or 'no tensors'}; correct the name")
            elif max(dims) >= tensor.dim():
                last = tensor.dim() - 1
                problems.append(
                    f"dynamic_dims.{name} is {list(dims)}; the tensor has dimensions 0 to {last}; correct it"
                )
        if problems:
            raise CompileConfigError(problems)


def _mark(tensor: Tensor, dims: Iterable[int]) -> None:
    import torch

    for dim in dims:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    """Tensors among arguments, also one level down, as in (cos, sin)."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from (item for item in value if isinstance(item, Tensor))
