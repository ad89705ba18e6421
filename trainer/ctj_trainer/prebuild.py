"""Build DeepSpeed's CPU communication op once, at set-up: `python -m ctj_trainer.prebuild` (1-2 minutes, needs g++).

Without it the first ZeRO-3 stage on a CPU builds it, while every process of the stage waits.
"""

import os
import shutil
import sys


def main() -> int:
    """Build, or say what is missing."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        print(
            f"no C++ compiler ({compiler}): strategy zero3 on a CPU, and torch.compile, need one; "
            "install it (Debian: apt-get install g++ python3-dev)",
            file=sys.stderr,
        )
        return 1
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    ShareMemCommBuilder().load(verbose=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
