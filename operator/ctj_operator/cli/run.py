"""`ctj run`: from a file to a trained model on this machine. Admission, lock, loop, closing words."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctj_api import names
from ctj_api.exit_codes import RunExit
from ctj_api.spec import Spec
from ctj_operator.cli import DEFAULT_WORK_DIR, summary
from ctj_operator.cli.documents import admitted, admitted_update, read, refuse_vain_change
from ctj_operator.cli.lines import JsonScreen
from ctj_operator.cli.pipes import said
from ctj_operator.cli.screens import screen_for_output
from ctj_operator.local import prerequisites, strays
from ctj_operator.local.lock import InUseError, hold
from ctj_operator.local.processes import Launch, trainer_command, trainer_python
from ctj_operator.local.refusal import Refusal
from ctj_operator.local.runner import Runner
from ctj_operator.local.store import JOB_FILE, Store


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was typed."""

    file: Path
    overrides: tuple[str, ...]
    work_dir: Path
    cache_dir: Path
    fresh: bool
    json: bool
    plain: bool

    @property
    def command(self) -> str:
        """The command that goes on with this job."""
        words = ["ctj", "run", str(self.file)]
        words += [word for override in self.overrides for word in ("--set", override)]
        if self.work_dir != DEFAULT_WORK_DIR:
            words += ["--work-dir", str(self.work_dir)]
        return shlex.join(words)


def run(request: Request) -> RunExit:
    """Run the job and return its exit code.

    Raises:
        Refusal: it could not be started, or its folder failed while it ran.
    """
    document = read(request.file, request.overrides)
    accepted = admitted(document)  # before anything is looked for on disk: the name becomes a folder
    folder = (request.work_dir / accepted["metadata"]["name"]).resolve()
    try:
        if request.fresh and (folder / JOB_FILE).exists():
            with hold(folder, command=request.command):
                print(f"The earlier run is kept in {Store(folder).move_aside()}", file=sys.stderr)
        folder.mkdir(parents=True, exist_ok=True)
        with hold(folder, command=request.command) as lock:
            store = Store(folder)
            if store.exists():
                accepted = admitted_update(document, store)
                refuse_vain_change(accepted, store)
            return _run_held(request, accepted, store, lock)
    except InUseError as error:
        raise Refusal(str(error)) from None
    except OSError as error:
        raise Refusal(_broken_folder(folder, error), exit_code=RunExit.ENVIRONMENT) from None


def _run_held(request: Request, document: dict[str, Any], store: Store, lock: int) -> RunExit:
    spec = Spec.from_document(document["spec"])
    missing = prerequisites.check(spec, folder=store.folder, cache=request.cache_dir, python=trainer_python())
    if missing:
        raise Refusal("\n".join(f"missing: {miss}" for miss in missing), exit_code=RunExit.ENVIRONMENT)
    store.submit(document)
    strays.end(names.ENV_CHECKPOINT_ROOT, store.checkpoints)
    launch = Launch(
        command=trainer_command(),
        checkpoints=store.checkpoints,
        cache=request.cache_dir.resolve(),
        lock=lock,
        grace_seconds=spec.template.grace_seconds,
    )
    with screen_for_output(json=request.json, plain=request.plain) as screen:
        outcome = Runner(store, launch, screen).run()
    _close(request, store, outcome)
    return outcome


def _close(request: Request, store: Store, outcome: RunExit) -> None:
    """Say how it ended, where everything is, and what to do next. Who stops a run wants to be out: no page then."""
    closing = summary.closing(store, outcome, command=request.command)
    if not request.json:
        said(lambda: summary.show(closing))
    report = None if outcome is RunExit.STOPPED else summary.write_report(store)
    if request.json:
        end = {"outcome": outcome.name, "exitCode": int(outcome), **closing.to_document()}
        said(lambda: JsonScreen().write("end", {**end, "report": None if report is None else str(report)}))
    elif report is not None:
        said(lambda: print(f"Report: {summary.relative(report)}"))


def _broken_folder(folder: Path, error: OSError) -> str:
    where = error.filename or folder
    return (
        f"{where}: {error.strerror}. Nothing more can be written there, so training was ended; what was saved before "
        "is intact. Free the disk or make it writable, or choose another place with --work-dir, then run again"
    )
