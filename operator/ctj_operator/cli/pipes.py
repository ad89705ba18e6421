"""What is said to somebody who may have gone: a cut pipe costs the words and nothing else."""

import os
import sys
from collections.abc import Callable


def said(say: Callable[[], None] = lambda: None) -> None:
    """Say it and let it out, with all that was said before."""
    try:
        say()
        sys.stdout.flush()
    except BrokenPipeError:
        # What is still buffered goes nowhere, or the interpreter would complain of it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
