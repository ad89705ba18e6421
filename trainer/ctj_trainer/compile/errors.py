"""Which errors of compiling end an attempt? Everything else costs speed and not the attempt."""


class RanksDifferError(ValueError):
    """The ranks have not the same torch, device or settings; one line for each difference."""


class LateRankError(RuntimeError):
    """A rank was still compiling when the wait for it was over. Another attempt can run the stage eager."""
