"""Two processes joined by gloo that run test functions on request: torch and DeepSpeed are imported once, not per case.

`python rank_pair.py RANK WORLD PORT` is one of them; it reads (file, function, keywords) from stdin and answers on the
descriptor that was its stdout. The fixture `ranks` of conftest.py is the other side.
"""

import importlib
import os
import pickle
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def module_at(path: str) -> ModuleType:
    """Import a file of the tests by the name under which other test files import it: two copies would count apart."""
    return importlib.import_module(".".join(Path(path).relative_to(ROOT).with_suffix("").parts))


def main() -> None:
    rank, world_size, port = (int(argument) for argument in sys.argv[1:])
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a case or a library prints goes to stderr
    # As torchrun would set it; DeepSpeed reads some of it.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "DS_ACCELERATOR": "cpu"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(world_size)}
    sys.path.insert(0, str(ROOT))  # cases import tests.trainer.small
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=90))
    while True:
        try:
            path, function, keywords = pickle.load(sys.stdin.buffer)
        except EOFError:
            break
        try:
            answer = (True, getattr(module_at(path), function)(**keywords))
        except BaseException:
            answer = (False, traceback.format_exc())
        pickle.dump(answer, answers)
        answers.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
