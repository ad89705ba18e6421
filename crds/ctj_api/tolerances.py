"""How much may compiled and eager, or two stages, differ? The numbers both sides use where the spec names none."""

from dataclasses import dataclass

from ctj_api.spec import Precision, Tolerances


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Largest relative differences that still count as equal: at equal state, and over a replay window."""

    probe_loss: float
    probe_grad_norm: float
    window_loss: float
    window_grad_norm: float


# About ten times what was measured on a 4-layer model (CPU, one seed): one step from equal state differs 30-80 times
# less than ten steps of training do.
DEFAULT_LIMITS = {
    Precision.FP32: Limits(probe_loss=1e-6, probe_grad_norm=5e-6, window_loss=1e-5, window_grad_norm=1e-3),
    Precision.BF16: Limits(probe_loss=5e-5, probe_grad_norm=5e-3, window_loss=3e-3, window_grad_norm=0.2),
}


def limits_for(tolerances: Tolerances, precision: Precision) -> Limits:
    """Return the spec's tolerances, each absent one replaced by the precision's default."""
    default = DEFAULT_LIMITS[precision]
    return Limits(
        probe_loss=_or_default(tolerances.probe_loss, default.probe_loss),
        probe_grad_norm=_or_default(tolerances.probe_grad_norm, default.probe_grad_norm),
        window_loss=_or_default(tolerances.window_loss, default.window_loss),
        window_grad_norm=_or_default(tolerances.window_grad_norm, default.window_grad_norm),
    )


def _or_default(asked: str | None, default: float) -> float:
    return default if asked is None else float(asked)
