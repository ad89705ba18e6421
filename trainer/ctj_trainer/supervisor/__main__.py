"""`python -m ctj_trainer.supervisor`: run one pod of an attempt; the exit code is the one of the contract's table."""

import signal
import sys


def start() -> int:
    """Hold stop signals back during the slow imports: a pod's first process loses what it has no handler for."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    from ctj_trainer.supervisor.run import main

    return main()


if __name__ == "__main__":
    sys.exit(start())
