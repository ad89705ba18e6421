"""What has the compiler done so far, and is it still sane? Read after every optimizer step, in microseconds.

Counts graphs, recompilations with their reasons, breaks, failures and cache hits from torch's own records, and tells a
recompile storm from a warm-up.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

STORM_RECOMPILES = 3
STORM_WINDOW_STEPS = 20
_RECORDS_KEPT = 4096  # torch keeps 64, too few for a storm over many regions
_REASON_LENGTH = 300


@dataclass(frozen=True, kw_only=True)
class CompileFacts:
    """Totals since the watch began."""

    graphs: int = 0
    recompiles: int = 0
    graph_breaks: int = 0
    failures: int = 0
    limit_hits: int = 0
    compile_seconds: float = 0.0
    cache_hits: int = 0
    cache_misses: int = 0
    recompile_reason: str = ""
    failure_reason: str = ""


class CompileWatch:
    """Follow torch's compile records of this process."""

    def __init__(self) -> None:
        from torch._dynamo import utils

        self._metrics = utils.get_compilation_metrics
        self._counters = utils.counters
        utils.set_compilation_metrics_limit(_RECORDS_KEPT)
        records = self._metrics()
        self._last = records[-1] if records else None
        self._begin = self._counts()
        self._facts = CompileFacts()

    def read(self) -> CompileFacts:
        """Return the totals now. Costs microseconds where nothing was compiled since the last call."""
        records = self._metrics()
        graphs, breaks, hits, misses = self._counts()
        # Breaks alone make no record.
        if (not records or records[-1] is self._last) and breaks - self._begin[1] == self._facts.graph_breaks:
            return self._facts
        new = _since(records, self._last)
        self._last = records[-1] if records else None
        failed = [m for m in new if m.fail_type and not _is_limit_hit(m)]
        recompiled = [m for m in new if m.recompile_reason and not _is_limit_hit(m) and m.is_forward is not False]
        limited = [m for m in new if _is_limit_hit(m)]
        before = self._facts
        self._facts = CompileFacts(
            graphs=graphs - self._begin[0],
            graph_breaks=breaks - self._begin[1],
            cache_hits=hits - self._begin[2],
            cache_misses=misses - self._begin[3],
            recompiles=before.recompiles + len(recompiled),
            failures=before.failures + len(failed),
            limit_hits=before.limit_hits + len(limited),
            compile_seconds=before.compile_seconds + sum((m.duration_us or 0) for m in new) / 1e6,
            recompile_reason=before.recompile_reason or _first(_recompile_reason(m) for m in [*recompiled, *limited]),
            failure_reason=before.failure_reason or _first(_failure_reason(m) for m in failed),
        )
        return self._facts

    def _counts(self) -> tuple[int, int, int, int]:
        counters = self._counters
        # A break lands in one of two places by its kind; a limit hit, no break, is in `unimplemented` too.
        broken = sum(n for text, n in counters["unimplemented"].items() if not text.startswith(_LIMIT_TEXT))
        breaks = broken + sum(n for text, n in counters["graph_break"].items() if not text.startswith(_LIMIT_TEXT))
        inductor = counters["inductor"]
        return (
            counters["stats"]["unique_graphs"],
            breaks,
            inductor["fxgraph_cache_hit"],
            inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"],
        )


class StormRule:
    """Too many recompilations after warm-up mean that guards never settle: eager is cheaper."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, int]] = deque()  # (step, recompilations in it)
        self._seen = 0

    def settle(self, facts: CompileFacts) -> None:
        """Take what was compiled so far as warm-up."""
        self._seen = facts.recompiles
        self._recent.clear()

    def judge(self, step: int, facts: CompileFacts) -> str:
        """Return why compiled code must be given up, in one line; empty while all is well."""
        if facts.failures:
            return f"backend_failed: {facts.failure_reason}"
        if facts.limit_hits:
            return f"recompile_limit: {facts.recompile_reason}"
        if facts.recompiles > self._seen:
            self._recent.append((step, facts.recompiles - self._seen))
            self._seen = facts.recompiles
        while self._recent and self._recent[0][0] <= step - STORM_WINDOW_STEPS:
            self._recent.popleft()
        in_window = sum(count for _, count in self._recent)
        if in_window >= STORM_RECOMPILES:
            return f"recompile_storm: {in_window} in {STORM_WINDOW_STEPS} steps: {facts.recompile_reason}"
        return ""


_LIMIT_TEXT = "Dynamo recompile limit exceeded"


def _since(records: list[Any], last: Any) -> list[Any]:
    """Return the records after `last`; found from the end, so that a full ring of records does not stall the count."""
    for index in range(len(records) - 1, -1, -1):
        if records[index] is last:
            return records[index + 1 :]
    return records


def _is_limit_hit(record: Any) -> bool:
    return bool(record.fail_reason) and record.fail_reason.startswith(_LIMIT_TEXT)


def _recompile_reason(record: Any) -> str:
    return one_line(f"{record.co_name or 'function'}: {record.recompile_reason}")


def _failure_reason(record: Any) -> str:
    return one_line(f"{record.fail_type}: {record.fail_reason}")


def _first(reasons: Any) -> str:
    return next(iter(reasons), "")


def one_line(text: str) -> str:
    """Collapse white space and cut, for reports and labels."""
    return " ".join(text.split())[:_REASON_LENGTH]
