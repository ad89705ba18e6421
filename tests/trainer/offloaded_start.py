"""One start of an offloaded, compiled block; run twice with one cache folder. Prints what it saw as JSON."""

import json

import torch
from accelerate import cpu_offload
from tests.trainer.hooked_models import WIDTH, Block
from torch._dynamo.utils import counters

from ctj_trainer.hooks.pure import compile_around_hooks


def main() -> None:
    torch.manual_seed(0)
    block = Block().requires_grad_(False)
    x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
    expected = block(x)
    cpu_offload(block, execution_device=torch.device("cpu"))
    compile_around_hooks(block, lambda: {"backend": "inductor"})
    outputs = [block(x) for _ in range(3)]
    block.linear._hf_hook.weights_map["weight"].mul_(2)
    changed = block(x)
    print(
        json.dumps(
            {
                "equal": all(torch.allclose(output, expected, atol=1e-6) for output in outputs),
                "read_anew": not torch.allclose(changed, expected, atol=1e-3),
                "offloaded": block.linear.weight.is_meta,
                "hits": counters["aot_autograd"]["autograd_cache_hit"],
                "graphs": counters["stats"]["unique_graphs"],
            }
        )
    )


main()
