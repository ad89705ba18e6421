"""The view for pipes and logs: one plain line per transition, one progress line every few seconds, no control codes."""

import json
import sys
import time
from typing import Any, TextIO

from ctj_api.attempt import Mode
from ctj_operator.cli import words
from ctj_operator.cli.view import View, build_view
from ctj_operator.core.decision import Event, EventType
from ctj_operator.local.runner import Snapshot

_EVERY_SECONDS = 5.0
_JSON_EVERY_SECONDS = 1.0


class PlainScreen:
    """Lines for people."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._next = 0.0
        self._last: tuple[str, int, str] | None = None

    def event(self, event: Event) -> None:
        """Print the event with its time."""
        mark = "WARNING " if event.type is EventType.WARNING else ""
        self._print(f"{mark}{event.reason}: {event.message}")

    def note(self, message: str) -> None:
        """Print a line of the runner's own."""
        self._print(message)

    def show(self, snapshot: Snapshot) -> None:
        """Print a progress line when there is news and the last line is old enough."""
        if snapshot.now < self._next or snapshot.progress is None:
            return
        view = build_view(snapshot)
        state = (view.stage, view.step, view.activity)
        if state != self._last:
            self._last = state
            self._print(progress_line(view))
        self._next = snapshot.now + _EVERY_SECONDS

    def _print(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", file=self._out, flush=True)


class JsonScreen:
    """One JSON object per line, for programs."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._next = 0.0
        self._last: tuple[int, int, str] | None = None

    def event(self, event: Event) -> None:
        """Write {"kind": "event", ...}."""
        self.write("event", {"type": event.type, "reason": event.reason, "message": event.message})

    def note(self, message: str) -> None:
        """Write {"kind": "note", ...}."""
        self.write("note", {"message": message})

    def show(self, snapshot: Snapshot) -> None:
        """Write {"kind": "progress", ...}: the trainer's own message, at most once a second."""
        progress = snapshot.progress
        if progress is None or snapshot.now < self._next:
            return
        state = (progress.attempt, progress.step, progress.phase)
        if state != self._last:
            self._last = state
            self._next = snapshot.now + _JSON_EVERY_SECONDS
            self.write("progress", {"stage": snapshot.status.stage, **progress.to_document()})

    def write(self, kind: str, document: dict[str, Any]) -> None:
        """Write one line."""
        print(json.dumps({"at": round(time.time(), 3), "kind": kind, **document}), file=self._out, flush=True)


def progress_line(view: View) -> str:
    """Say in one line where the job is."""
    parts = [f"loss {words.figure(view.loss)}"] if view.loss is not None else []
    if view.grad_norm is not None:
        parts.append(f"grad norm {words.figure(view.grad_norm, 3)}")
    if view.samples_per_second is not None:
        parts.append(f"{words.figure(view.samples_per_second, 3)} samples/s")
    if view.recompiles:
        parts.append(words.plural(view.recompiles, "recompile"))
    if view.compile_seconds:
        parts.append(f"compile {words.duration(view.compile_seconds)}")
    if view.memory_used_bytes is not None:
        parts.append(f"memory {words.size(view.memory_used_bytes)}")
    if view.remaining_seconds is not None:
        parts.append(f"about {words.duration(view.remaining_seconds)} left")
    mode = {Mode.COMPILED: "compiled", Mode.EAGER: "eager", None: "mode open"}[view.mode]
    head = f"{view.stage} step {view.step}/{view.steps} {view.activity} ({mode})"
    return head + (": " + ", ".join(parts) if parts else "")
