"""The entry of one rank: from the attempt message to a trained stage, and in any case a mark that says how it ended.

Started by torchrun (through the supervisor) once per process; `python -m ctj_trainer.worker` alone trains with one.
"""

import logging
import os
import sys
import traceback
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from ctj_api import names
from ctj_api.attempt import Attempt
from ctj_api.exit_codes import ExitCode
from ctj_trainer.marks import write_mark
from ctj_trainer.messages import MessageError, read_attempt

log = logging.getLogger("ctj")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where this process finds and leaves things."""

    root: Path
    run_dir: Path
    control_file: Path | None
    rank: int

    @classmethod
    def from_environment(cls) -> "Place":
        """Read the names both sides agreed on."""
        control = os.environ.get(names.ENV_CONTROL_FILE)
        run_dir = Path(os.environ.get(names.ENV_RUN_DIR, "."))
        run_dir.mkdir(parents=True, exist_ok=True)
        return cls(
            root=Path(os.environ.get(names.ENV_CHECKPOINT_ROOT, "checkpoints")),
            run_dir=run_dir,
            control_file=Path(control) if control else None,
            rank=int(os.environ.get("RANK", "0")),
        )


def main() -> int:
    """Run this rank; the exit code is the mark's kind."""
    place = Place.from_environment()
    logging.basicConfig(
        stream=sys.stdout, format="%(message)s", level=logging.INFO if place.rank == 0 else logging.WARNING
    )
    try:
        attempt = read_attempt(os.environ)
    except MessageError as error:
        return _end(place, ExitCode.CONFIGURATION, str(error))
    try:
        return _train(attempt, place)
    except (Exception, SystemExit) as error:  # a recipe may call sys.exit: without a mark its peers would be blamed
        from ctj_trainer.failures import kind_of

        kind = kind_of(error)
        detail = traceback.format_exc() if kind in (ExitCode.USER_CODE, ExitCode.USER_CODE_OR_IMAGE) else ""
        text = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        code = _end(place, kind, text, last_lines=detail)
        # Peers may be waiting in a collective: leaving at once tells them, a tidy shutdown would wait for them.
        with suppress(OSError, ValueError):  # a full disk, or closed by the recipe
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _train(attempt: Attempt, place: Place) -> int:
    # Late, so that a bad message ends within a second.
    from ctj_trainer.compile.board import mirrored
    from ctj_trainer.ranks import joined
    from ctj_trainer.requests import Requests
    from ctj_trainer.scene import Scene
    from ctj_trainer.stage import run_stage
    from ctj_trainer.telemetry import telling

    requests = Requests(attempt=attempt.attempt, control_file=place.control_file, run_dir=place.run_dir)
    with ExitStack() as stack:
        ranks = stack.enter_context(joined(timeout_seconds=attempt.compile.timeout_seconds))
        folder = place.root / names.attempt_folder(attempt.attempt)
        telemetry = stack.enter_context(telling(attempt, run_dir=place.run_dir, folder=folder, ranks=ranks))
        if ranks.local_rank == 0 and ranks.world_size > ranks.local_world_size:
            stack.enter_context(mirrored(ranks.board, place.run_dir))
        scene = Scene(
            attempt=attempt,
            root=place.root,
            run_dir=place.run_dir,
            ranks=ranks,
            telemetry=telemetry,
            requests=requests,
        )
        stopped = run_stage(scene)
    return _end(place, ExitCode.STOPPED if stopped else ExitCode.DONE, stopped)


def _end(place: Place, kind: ExitCode, message: str, *, last_lines: str = "") -> int:
    mark = write_mark(place.run_dir, rank=place.rank, kind=kind, message=message, last_lines=last_lines)
    if kind is not ExitCode.DONE:
        log.warning("rank %d: %s: %s", place.rank, kind.name, mark.message)
    if last_lines:
        with suppress(OSError, ValueError):
            print(last_lines, file=sys.stderr)
    return int(kind)


if __name__ == "__main__":
    sys.exit(main())
