"""`python -m ctj_trainer.supervisor`: run one pod of an attempt; the exit code is the one of the contract's table."""

import sys

from ctj_trainer.supervisor.run import main

if __name__ == "__main__":
    sys.exit(main())
