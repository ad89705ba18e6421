"""The first code of every worker process: bound to its agent, readable for stack dumps, never silent when it dies."""

import faulthandler
import gc
import importlib
import os
import signal
import sys
import traceback
from pathlib import Path

from ctj_api import names
from ctj_api.exit_codes import ExitCode
from ctj_trainer.marks import write_mark
from ctj_trainer.supervisor.processes import allow_stack_dumps, die_with_parent, parent_from_environment


def main() -> int:
    """Run the worker's `main()`; whatever it lets through becomes this rank's mark."""
    # Imports make a million objects that stay: looking for garbage among them is a sixth of their CPU time (measured).
    gc.disable()  # until training starts: see stage.py
    die_with_parent(parent_from_environment())
    allow_stack_dumps()
    run_dir, rank = Path(os.environ[names.ENV_RUN_DIR]), int(os.environ["RANK"])
    faulthandler.enable()
    # Kept open for the life of the process: the handler writes without Python's help.
    stacks = (run_dir / f"stacks-{rank}.txt").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    try:
        worker = importlib.import_module(os.environ[names.ENV_WORKER_MODULE])
        code = worker.main()
    except Exception as error:
        write_mark(
            run_dir,
            rank=rank,
            kind=ExitCode.USER_CODE_OR_IMAGE,
            message=f"{type(error).__name__}: {error}",
            last_lines=traceback.format_exc(),
        )
        traceback.print_exc()
        return 1
    return int(code or 0)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # All is written; taking torch apart module by module costs 2 s of CPU in every stage switch.
    os._exit(code)
