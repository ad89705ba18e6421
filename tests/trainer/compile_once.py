"""Compile one small function with inductor, forward and backward, and print what the cache did, as JSON."""

import json

import torch
from torch._dynamo import utils


def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w).sin().sum()


def main() -> None:
    x = torch.linspace(0, 1, 256).reshape(16, 16).requires_grad_()
    w = torch.linspace(-1, 1, 256).reshape(16, 16).requires_grad_()
    value = torch.compile(function)(x, w)
    value.backward()
    assert x.grad is not None
    counters = utils.counters["inductor"]
    result = {"hits": counters["fxgraph_cache_hit"], "misses": counters["fxgraph_cache_miss"]}
    print(json.dumps({"value": value.item(), "gradient": x.grad.sum().item(), **result}))


if __name__ == "__main__":
    main()
