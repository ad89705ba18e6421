"""The one pure evaluator of thresholds: the trainer's compile verdict and the operator's gates both use it."""

import math
from enum import StrEnum


class Verdict(StrEnum):
    """Outcome of one check; `worst` orders them."""

    PASSED = "Passed"
    INCONCLUSIVE = "Inconclusive"
    FAILED = "Failed"


_SEVERITY = {Verdict.PASSED: 0, Verdict.INCONCLUSIVE: 1, Verdict.FAILED: 2}


def evaluate(value: float | None, *, minimum: float | None = None, maximum: float | None = None) -> Verdict:
    """Judge one trainer measurement; both limits are inclusive.

    A missing value is Inconclusive: no data never passes and never condemns. NaN and infinities are Failed, since a
    trainer that measures them has diverged.
    """
    if value is None:
        return Verdict.INCONCLUSIVE
    if not math.isfinite(value):
        return Verdict.FAILED
    if minimum is not None and value < minimum:
        return Verdict.FAILED
    if maximum is not None and value > maximum:
        return Verdict.FAILED
    return Verdict.PASSED


def worst(verdicts: list[Verdict]) -> Verdict:
    """Return the most severe verdict; an empty list is Inconclusive, never a success."""
    return max(verdicts, key=_SEVERITY.__getitem__, default=Verdict.INCONCLUSIVE)
