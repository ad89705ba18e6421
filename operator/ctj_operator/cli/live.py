"""The view in a terminal: the ladder with bars, the running attempt's figures, the last events; four times a second."""

import time
from collections import deque
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from ctj_api.attempt import Mode
from ctj_api.status import StagePhase
from ctj_operator.cli import words
from ctj_operator.cli.view import StageRow, View, build_view
from ctj_operator.core.decision import Event, EventType
from ctj_operator.local.runner import Snapshot

_EVENTS = 6
_QUIET_SECONDS = 10.0  # heartbeats come every 2 s, also while compiling

_MARKS = {
    StagePhase.PENDING: ("·", "dim"),
    StagePhase.RUNNING: ("▶", "cyan"),
    StagePhase.PASSED: ("✓", "green"),
    StagePhase.FAILED: ("✗", "red"),
    StagePhase.SKIPPED: ("-", "dim"),
}
_MODES = {Mode.COMPILED: Text("compiled", style="green"), Mode.EAGER: Text("eager", style="yellow"), None: Text("")}


class LiveScreen:
    """Draws in place, from the runner's loop and not from a thread: children start from a one-threaded process."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._spinner = Spinner("dots")
        self._events: deque[Text] = deque(maxlen=_EVENTS)
        self._started = time.monotonic()
        self._activity = ("", 0)
        self._active_since = self._started

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def event(self, event: Event) -> None:
        """Add to the last events."""
        style = "yellow" if event.type is EventType.WARNING else ""
        self._add(Text.assemble((f"{event.reason} ", f"bold {style}"), (event.message, style)))

    def note(self, message: str) -> None:
        """Add a line of the runner's own."""
        self._add(Text(message, style="bold magenta"))

    def show(self, snapshot: Snapshot) -> None:
        """Redraw."""
        view = build_view(snapshot)
        if (view.activity, view.attempt) != self._activity:
            self._activity, self._active_since = (view.activity, view.attempt), time.monotonic()
        self._live.update(self._draw(view), refresh=True)

    def _add(self, text: Text) -> None:
        self._events.append(Text.assemble((time.strftime("%H:%M:%S "), "dim"), text))

    def _draw(self, view: View) -> RenderableType:
        head = Text.assemble(
            (view.name, "bold"),
            f"  {view.phase}",
            f"  step {view.step}/{view.steps}",
            (f"  attempt {view.attempt}", "dim"),
            (f"  {words.duration(time.monotonic() - self._started)}", "dim"),
        )
        return Group(head, self._ladder(view), figures(view), Text(""), *self._events)

    def _ladder(self, view: View) -> Table:
        table = Table.grid(padding=(0, 2))
        for stage in view.stages:
            mark, style = _MARKS[stage.phase]
            moving = stage.phase is StagePhase.RUNNING and view.activity
            table.add_row(
                self._spinner if moving else Text(mark, style=style),
                Text(stage.name, style=style),
                Text(f"{stage.strategy} x{stage.processes}", style="dim"),
                ProgressBar(total=max(1, stage.total), completed=stage.done, width=30),
                Text(f"{stage.done}/{stage.total}", justify="right"),
                _MODES[stage.mode],
                Text(self._remark(stage, view), style="dim", overflow="ellipsis", no_wrap=True),
            )
        return table

    def _remark(self, stage: StageRow, view: View) -> str:
        """Say what the running stage does, and for how long: compiling and starting take their time."""
        if stage.phase is not StagePhase.RUNNING or not view.activity:
            return stage.message
        return f"{view.activity} {words.duration(time.monotonic() - self._active_since)}"


def figures(view: View) -> Text:
    """Return the running attempt's numbers on one line, as far as they are known."""
    pairs = [
        ("loss", words.figure(view.loss)),
        ("grad norm", words.figure(view.grad_norm, 3)),
        ("samples/s", words.figure(view.samples_per_second, 3)),
        ("graphs", str(view.graphs or "-")),
        ("recompiles", str(view.recompiles) if view.graphs else "-"),
        ("compile", words.duration(view.compile_seconds or None)),
        ("memory", words.size(view.memory_used_bytes)),
        ("left", "about " + words.duration(view.remaining_seconds) if view.remaining_seconds is not None else "-"),
    ]
    text = Text("  ")
    for label, value in pairs:
        if value == "-":
            continue
        text.append(f"{label} ", style="dim").append(f"{value}   ")
    if view.silent_seconds is not None and view.silent_seconds > _QUIET_SECONDS:
        text.append(f"no word from the trainer for {words.duration(view.silent_seconds)}", style="yellow")
    return text
