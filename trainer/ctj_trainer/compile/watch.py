"""What has the compiler done so far? Read after every optimizer step, in microseconds where nothing happened.

Counts graphs, recompilations, breaks, failures, seconds and cache look-ups from torch's own records, each by its class,
and keeps what happened since it was last asked, for the rules that judge it.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from ctj_trainer.compile.causes import Event, EventKind, FaultClass, Place, count_by_class, diagnose

_RECORDS_KEPT = 4096  # torch keeps 64, too few for a storm over many regions
_LIMIT_TEXT = "Dynamo recompile limit exceeded"
_LIMIT_ERROR = "FailOnRecompileLimitHit"

ByClass = Mapping[FaultClass, int]


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
    recompiles_by: ByClass = field(default_factory=dict)
    breaks_by: ByClass = field(default_factory=dict)
    failures_by: ByClass = field(default_factory=dict)

    @property
    def cache_hit_ratio(self) -> float | None:
        """Hits per look-up in the compile cache; None without one."""
        total = self.cache_hits + self.cache_misses
        return self.cache_hits / total if total else None


class CompileWatch:
    """Follow torch's compile records of this process, from now on."""

    def __init__(self) -> None:
        from torch._dynamo import utils

        self._metrics = utils.get_compilation_metrics
        self._counters = utils.counters
        self._records_kept_before = utils._compilation_metrics.maxlen or _RECORDS_KEPT
        utils.set_compilation_metrics_limit(_RECORDS_KEPT)
        records = self._metrics()
        self._last = records[-1] if records else None
        self._begin = self._counts()
        self._breaks_at_begin = dict(self._breaks())
        self._frames: dict[str, Place] = {}
        self._events: list[Event] = []
        self._facts = CompileFacts()

    def close(self) -> None:
        """Keep as few records as before."""
        from torch._dynamo import utils

        utils.set_compilation_metrics_limit(self._records_kept_before)

    def read(self) -> CompileFacts:
        """Return the totals now."""
        records = self._metrics()
        graphs, breaks, hits, misses = self._counts()
        # Breaks alone make no record.
        if (not records or records[-1] is self._last) and breaks - self._begin[1] == self._facts.graph_breaks:
            return self._facts
        new = _since(records, self._last)
        self._last = records[-1] if records else None
        events = [event for record in new if (event := self._event(record)) is not None]
        self._events += events
        of = {kind: [event for event in events if event.kind is kind] for kind in EventKind}
        before = self._facts
        self._facts = CompileFacts(
            graphs=graphs - self._begin[0],
            graph_breaks=breaks - self._begin[1],
            cache_hits=hits - self._begin[2],
            cache_misses=misses - self._begin[3],
            recompiles=before.recompiles + len(of[EventKind.RECOMPILE]),
            failures=before.failures + len(of[EventKind.FAILURE]),
            limit_hits=before.limit_hits + len(of[EventKind.LIMIT]),
            compile_seconds=before.compile_seconds + sum((record.duration_us or 0) for record in new) / 1e6,
            recompiles_by=_added(before.recompiles_by, of[EventKind.RECOMPILE]),
            breaks_by=self._breaks_by_class() if breaks - self._begin[1] != before.graph_breaks else before.breaks_by,
            failures_by=_added(before.failures_by, of[EventKind.FAILURE]),
        )
        return self._facts

    def take(self, kinds: Container[EventKind] = tuple(EventKind)) -> list[Event]:
        """Return the events of these kinds that nobody took yet; the caller judges them once."""
        taken = [event for event in self._events if event.kind in kinds]
        self._events = [event for event in self._events if event.kind not in kinds]
        return taken

    def _event(self, record: Any) -> Event | None:
        """Translate a record of torch's; None where nothing but a first compilation happened."""
        place = self._place(record)
        reason = _without_id(record.recompile_reason or "")
        is_backward = record.is_forward is False
        if record.fail_type == _LIMIT_ERROR or (record.fail_reason or "").startswith(_LIMIT_TEXT):
            return Event(kind=EventKind.LIMIT, text=reason, place=place)
        if record.fail_type:
            return Event(
                kind=EventKind.FAILURE,
                text=record.fail_reason or "",
                error=record.fail_type,
                place=place,
                is_backward=is_backward,
            )
        if reason and not is_backward:
            return Event(kind=EventKind.RECOMPILE, text=reason, place=place)
        return None

    def _place(self, record: Any) -> Place | None:
        """The function a record is about. A limit hit and a backward name none, but share a frame number with it."""
        frame = str(record.compile_id).partition("/")[0].removeprefix("[").rpartition("!")[2]
        if record.co_filename:
            line = int(record.co_firstlineno or 0)
            self._frames[frame] = Place(file=record.co_filename, line=line, function=record.co_name or "")
        return self._frames.get(frame)

    def _breaks(self) -> Mapping[str, int]:
        """How often each text was the reason of a break. A limit hit, no break, is among torch's texts too."""
        texts: dict[str, int] = {}
        for counter in (self._counters["unimplemented"], self._counters["graph_break"]):
            for text, count in counter.items():
                if not text.startswith(_LIMIT_TEXT):
                    texts[text] = texts.get(text, 0) + count
        return texts

    def _breaks_by_class(self) -> ByClass:
        counts: dict[FaultClass, int] = {}
        for text, count in self._breaks().items():
            new = count - self._breaks_at_begin.get(text, 0)
            if new > 0:
                fault = diagnose(Event(kind=EventKind.GRAPH_BREAK, text=text)).fault
                counts[fault] = counts.get(fault, 0) + new
        return counts

    def _counts(self) -> tuple[int, int, int, int]:
        counters = self._counters
        broken = sum(n for text, n in counters["unimplemented"].items() if not text.startswith(_LIMIT_TEXT))
        breaks = broken + sum(n for text, n in counters["graph_break"].items() if not text.startswith(_LIMIT_TEXT))
        inductor = counters["inductor"]
        return (
            counters["stats"]["unique_graphs"],
            breaks,
            inductor["fxgraph_cache_hit"],
            inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"],
        )


def _since(records: list[Any], last: Any) -> list[Any]:
    """Return the records after `last`; found from the end, so that a full ring of records does not stall the count."""
    for index in range(len(records) - 1, -1, -1):
        if records[index] is last:
            return records[index + 1 :]
    return records


def _added(before: ByClass, events: list[Event]) -> ByClass:
    if not events:
        return before
    new = count_by_class(diagnose(event) for event in events)
    return {fault: before.get(fault, 0) + new.get(fault, 0) for fault in {**before, **new}}


def _without_id(reason: str) -> str:
    """Torch puts the number of the failed cache entry before a reason: "0/1: ..."."""
    number, colon, rest = reason.partition(": ")
    return rest if colon and "/" in number and " " not in number else reason
