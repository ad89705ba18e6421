"""How the contract writes moments and durations. Every other file of the core counts in seconds."""

import re
from datetime import UTC, datetime

_PART = re.compile(r"([0-9]+)(ms|s|m|h)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def stamp(moment: float) -> str:
    """Write seconds since the epoch as RFC 3339 with milliseconds (local stages last seconds)."""
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def moment(timestamp: str) -> float:
    """Read what `stamp`, or any RFC 3339 writer, wrote."""
    return datetime.fromisoformat(timestamp).timestamp()


def seconds(duration: str) -> float:
    """Read a duration such as 1h30m."""
    return sum(int(number) * _SECONDS[unit] for number, unit in _PART.findall(duration))


def spoken(duration_seconds: float) -> str:
    """Write a duration for people: 45 s, 12 min, 3.5 h."""
    if duration_seconds < 120:
        return f"{duration_seconds:.0f} s"
    if duration_seconds < 7200:
        return f"{duration_seconds / 60:.0f} min"
    return f"{duration_seconds / 3600:.1f} h"
