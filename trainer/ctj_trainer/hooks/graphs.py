"""Does a captured graph hold only computation? Read from the FX graph: no device move, no freed tensor."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx


@dataclass(kw_only=True)
class GraphLog:
    """A compile backend that runs graphs as they are and keeps them: `torch.compile(model, backend=log)`."""

    graphs: list[fx.GraphModule] = field(default_factory=list)
    inputs: list[Sequence[Any]] = field(default_factory=list)

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Keep the graph and run it eagerly."""
        self.graphs.append(graph)
        self.inputs.append(inputs)
        return graph.forward

    def problems(self) -> list[str]:
        """Return what the graphs hold besides computation."""
        return [p for graph, inputs in zip(self.graphs, self.inputs, strict=True) for p in impurities(graph, inputs)]


def impurities(graph: fx.GraphModule, inputs: Sequence[Any] = ()) -> list[str]:
    """Return every device move and every freed tensor that a graph refers to, with the line it came from."""
    return [*_moves(graph), *_freed(graph, inputs)]


def _moves(graph: fx.GraphModule) -> Iterator[str]:
    for node in graph.graph.nodes:
        before = {_device(argument) for argument in node.all_input_nodes} - {None}
        after = _device(node)
        if node.op.startswith("call_") and after is not None and before and after not in before:
            yield f"{node.name} moves a tensor from {before.pop()} to {after} inside a graph{_line(node)}"


def _freed(graph: fx.GraphModule, inputs: Sequence[Any]) -> Iterator[str]:
    held = {**dict(graph.named_parameters()), **dict(graph.named_buffers())}
    held |= {f"input {index}": value for index, value in enumerate(inputs) if isinstance(value, torch.Tensor)}
    for name, tensor in held.items():
        if tensor.device.type == "meta":
            yield f"{name} has no memory (it is on meta): the graph was made while it was offloaded"
        elif tensor.numel() and not _is_fake(tensor) and tensor.untyped_storage().size() == 0:
            yield f"{name} refers to freed memory: its storage is empty"


def _device(node: fx.Node) -> str | None:
    value = node.meta.get("example_value", node.meta.get("val"))
    return value.device.type if isinstance(value, torch.Tensor) else None


def _is_fake(tensor: torch.Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def _line(node: fx.Node) -> str:
    frames = [line.strip() for line in (node.stack_trace or "").splitlines() if line.strip().startswith("File ")]
    return f" ({frames[-1]})" if frames else ""
