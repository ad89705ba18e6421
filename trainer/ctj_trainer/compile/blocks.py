"""Which modules of a model repeat? They are compiled, sharded and checkpointed one by one, and share what is compiled.

Blocks lie in a ModuleList, Sequential or ModuleDict. Two of one class with equal parameter shapes are twins; what holds
twins holds blocks, also of other classes (attention and state-space layers in turn). Twins tell a decoder's layers,
which may hold lists of experts, from a vision model's stages, each of another width, whose own lists repeat.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)
_CONTAINERS = (*_NEVER_CALLED, nn.Sequential)
SMALL_SHARE = 0.05
"""A list with fewer parameters than this share of the largest one's is part of something, not a list of blocks."""


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks in the order of the model; empty where nothing repeats."""
    groups = list(_lists_of_blocks(model)) or _lists_of_layers(model)
    largest = max(map(num_parameters, groups), default=0)
    chosen = [block for group in groups if num_parameters(group) >= SMALL_SHARE * largest for block in group]
    return list({id(block): block for block in chosen}.values())  # one block may stand in several places


def is_bare_torch(module: nn.Module) -> bool:
    """Whether its forward is torch's own: the compiler skips that frame unless a frame of ours calls it."""
    return type(module).forward.__module__.startswith("torch.nn.modules")


def is_one_layer(module: nn.Module) -> bool:
    """Whether it is a single layer of torch (Linear, Embedding, LayerNorm): one kernel, nothing to fuse."""
    return is_bare_torch(module) and next(module.children(), None) is None


def num_parameters(modules: Sequence[nn.Module]) -> int:
    """Count the elements of all parameters."""
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def _lists_of_blocks(module: nn.Module) -> Iterator[list[nn.Module]]:
    """The outermost containers of twins."""
    members = (child for child in module._modules.values() if child is not None)  # with repetitions, unlike children()
    children = [child for child in members if num_parameters([child]) and not is_one_layer(child)]
    if isinstance(module, _CONTAINERS) and _holds_twins([m for m in children if not isinstance(m, _NEVER_CALLED)]):
        yield children
        return
    for child in children:
        yield from _lists_of_blocks(child)


def _lists_of_layers(model: nn.Module) -> list[list[nn.Module]]:
    """The largest container of one class, where there are no twins: growing widths, or single layers."""
    lists = [list(module.children()) for module in model.modules() if isinstance(module, _CONTAINERS)]
    alike = [members for members in lists if len(members) >= 2 and len({type(member) for member in members}) == 1]
    return [max(alike, key=num_parameters)] if alike else []


def _holds_twins(modules: Sequence[nn.Module]) -> bool:
    seen = Counter((type(module), _shapes(module)) for module in modules)
    return any(count >= 2 for count in seen.values())


def _shapes(module: nn.Module) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(parameter.shape) for parameter in module.parameters())
