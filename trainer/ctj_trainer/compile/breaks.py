"""Where does a graph break? Torch counts breaks without a place; its log has both, so listen to that log.

The log is torch's own (`TORCH_LOGS=graph_breaks`); nothing of it is shown, and it is left as it was.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

from ctj_trainer.compile.causes import Event, EventKind, Place

_KEPT = 64
_LOGGER = "torch._dynamo.symbolic_convert.__graph_breaks"
_HEAD = re.compile(r"Graph break in user code at (?P<file>.+?):(?P<line>\d+)\n(?:Graph Break Reason: )?")
_LEAD = re.compile(r"^Encountered graph break when attempting to trace[^\n]*\n+")


class _Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.events: list[Event] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        head = _HEAD.match(message)
        if head is None or len(self.events) >= _KEPT:
            return
        place = Place(file=head["file"], line=int(head["line"]))
        text = _LEAD.sub("", message[head.end() :])
        self.events.append(Event(kind=EventKind.GRAPH_BREAK, text=text, place=place))


@contextmanager
def listening() -> Iterator[list[Event]]:
    """Collect breaks, the first of each line of source, into the list."""
    logger = logging.getLogger(_LOGGER)
    listener = _Listener()
    before = logger.level, logger.propagate
    if not logger.isEnabledFor(logging.DEBUG):
        logger.propagate = False  # else whoever listens above would print what nobody asked for
        logger.setLevel(logging.DEBUG)
    logger.addHandler(listener)
    try:
        yield listener.events
    finally:
        logger.removeHandler(listener)
        logger.level, logger.propagate = before
        logger.setLevel(before[0])
