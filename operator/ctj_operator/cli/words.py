"""How figures read: the same words in the live view, in plain lines, in tables and in `explain`."""

import math
from collections.abc import Sequence

from ctj_api.status import Status


def duration(seconds: float | None) -> str:
    """Write 8.2 s, 1m 40s, 3h 05m."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m"


def size(num_bytes: float | None) -> str:
    """Write 612 MiB, 1.4 GiB."""
    if num_bytes is None:
        return "-"
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def figure(value: float | None, digits: int = 4) -> str:
    """Write a number shortly."""
    return "-" if value is None else f"{value:.{digits}g}"


def plural(count: int, noun: str) -> str:
    """Write 1 process, 2 processes, 1 step, 2 steps."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}{'es' if noun.endswith('s') else 's'}"


def phase_and_place(status: Status) -> str:
    """Write Running in stage ddp at step 32."""
    place = f" in stage {status.stage}" if status.stage else ""
    return f"{status.phase}{place} at step {status.step}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Write rows as lines with every column as wide as its widest cell."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def shortened(line: str, width: int = 240) -> str:
    """Cut a line a person would not read to its end."""
    return line if len(line) <= width else f"{line[: width - 4]} ..."
