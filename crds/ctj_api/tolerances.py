"""How much may compiled and eager, or two stages, differ? The numbers both sides use where the spec names none."""

from dataclasses import dataclass

from ctj_api.spec import Precision, Tolerances

# About ten times what was measured on a 4-layer model (CPU, one seed): one step from equal state differs 30-80 times
# less than ten steps of training do. As text, since gates store limits as people wrote them.
_HALF = Tolerances(probe_loss="5e-5", probe_grad_norm="5e-3", window_loss="3e-3", window_grad_norm="0.2")
_DEFAULTS = {
    Precision.FP32: Tolerances(probe_loss="1e-6", probe_grad_norm="5e-6", window_loss="1e-5", window_grad_norm="1e-3"),
    Precision.BF16: _HALF,
    Precision.FP16: _HALF,
}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Largest relative differences between compiled and eager, from equal state, that still count as equal."""

    probe_loss: float
    probe_grad_norm: float


def completed(asked: Tolerances, precision: Precision) -> Tolerances:
    """Return the spec's tolerances, each absent one replaced by the precision's default."""
    return _DEFAULTS[precision].model_copy(update=asked.model_dump(exclude_none=True))


def limits_for(asked: Tolerances, precision: Precision) -> Limits:
    """Return the probe's limits as numbers."""
    allowed = completed(asked, precision)
    assert allowed.probe_loss is not None
    assert allowed.probe_grad_norm is not None
    return Limits(probe_loss=float(allowed.probe_loss), probe_grad_norm=float(allowed.probe_grad_norm))
