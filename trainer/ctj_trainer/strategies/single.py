"""One process trains alone."""

from ctj_trainer.strategies.optimized import Optimized


class Single(Optimized):
    """Nothing is shared, nothing is synchronised."""
