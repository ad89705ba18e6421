"""Which view fits where the output goes; and a view that is gone must not end a training."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ctj_operator.cli.lines import JsonScreen, PlainScreen
from ctj_operator.core.decision import Event
from ctj_operator.local.refusal import Refusal
from ctj_operator.local.runner import Screen, Snapshot


@contextmanager
def screen_for_output(*, json: bool, plain: bool) -> Iterator[Screen]:
    """Open the live view in a terminal, lines elsewhere or if asked for."""
    if json:
        yield Forgiving(JsonScreen())
    elif plain or not sys.stdout.isatty():
        yield Forgiving(PlainScreen())
    else:
        from rich.console import Console

        from ctj_operator.cli.live import LiveScreen

        with LiveScreen(Console()) as screen:
            yield Forgiving(screen)


class Forgiving:
    """Goes quiet when its terminal was closed or its pipe was cut; the job goes on.

    A picture that cannot be drawn, since the stored spec was broken by hand, is one line; what happens is still shown.
    """

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._is_gone = False
        self._problem = ""

    def event(self, event: Event) -> None:
        """Pass it on."""
        self._try(lambda: self._screen.event(event))

    def note(self, message: str) -> None:
        """Pass it on."""
        self._try(lambda: self._screen.note(message))

    def show(self, snapshot: Snapshot) -> None:
        """Pass it on."""
        try:
            self._try(lambda: self._screen.show(snapshot))
            self._problem = ""
        except Refusal as problem:
            if str(problem) != self._problem:
                self._problem = str(problem)
                self.note(self._problem)

    def _try(self, show: Callable[[], None]) -> None:
        if self._is_gone:
            return
        try:
            show()
        except OSError:
            self._is_gone = True
