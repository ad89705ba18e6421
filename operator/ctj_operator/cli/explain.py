"""`ctj explain`: why a job is not running, stopped, or slow, and what to do next. Read from its folder only."""

import time
from collections.abc import Iterator

from ctj_api.attempt import Mode
from ctj_api.exit_codes import ExitCode, RunExit
from ctj_api.names import (
    EXPORT_FOLDER,
    MANIFEST_FILE,
    REPORT_FILE,
    VERB_RETRY_COMPILE,
    VERB_ROLLBACK,
    attempt_folder,
)
from ctj_api.report import Report
from ctj_api.status import ConditionStatus, GateVerdict, Phase, Status
from ctj_operator.cli import words
from ctj_operator.cli.places import going_on, typed_name
from ctj_operator.cli.view import build_view
from ctj_operator.core import verbs
from ctj_operator.core.progress import told_step
from ctj_operator.local.lock import holder_of
from ctj_operator.local.refusal import Refusal
from ctj_operator.local.runner import snapshot
from ctj_operator.local.store import Store
from ctj_operator.page.gather import read_report
from ctj_operator.page.tables import comparison_text, limits_text


def explain(store: Store) -> str:
    """Return the whole explanation as plain text."""
    status = store.read_status().status
    sections = (
        _where(store, status),
        _conditions(status),
        _attempt(store, status),
        _gates(status),
        _modes(store, status),
        _remedies(status),
        _first_failure(status),
        _notices(store, status),
        _section("What to do next", _advice(store, status)),
    )
    return "\n".join(line for section in sections for line in section)


def next_steps(store: Store, status: Status, outcome: RunExit, *, command: str) -> Iterator[str]:
    """Yield the closing lines of `ctj run`: the cause where there is one, and the commands that go on."""
    name = typed_name(store)
    if outcome is RunExit.SUCCEEDED:
        return
    if outcome is RunExit.STOPPED:
        step = _newest_checkpoint(store, status)
        yield (
            "No checkpoint was written yet: it starts anew."
            if step is None
            else f"The checkpoint of step {step} is kept."
        )
        yield f"Go on with: {command}"
        return
    yield from _why(status)
    yield from _first_failure(status)
    if outcome is RunExit.HELD:
        yield f"Evidence: ctj explain {name}"
        yield f"To go on although the gate failed: ctj approve {name} && {command}"
        if _is_taken(VERB_ROLLBACK, store, status):
            yield f"To go back to the last good stage instead: ctj rollback {name} && {command}"
    else:
        yield f"Logs: ctj logs {name}"
        yield f"When the cause is removed, go on from the last checkpoint with: ctj retry {name} && {command}"


def _where(store: Store, status: Status) -> Iterator[str]:
    place = f" in stage {status.stage}" if status.stage else ""
    try:
        view = build_view(snapshot(store, status))
        step, problem = f"{view.step} of {view.steps}", ""
    except Refusal as refusal:  # broken by hand: what was done so far is known all the same
        step, problem = f"{status.step}", str(refusal)
    yield f"{store.folder.name}: {status.phase}{place}, step {step}, attempt {status.attempt}"
    if problem:
        yield problem
    holder = holder_of(store.folder)
    yield f"Run by {holder}" if holder else "Not being run by any process"
    yield from _why(status)


def _why(status: Status) -> Iterator[str]:
    if status.hold is not None:
        held = status.hold
        yield f"Held: {held.reason}: {held.message} (since {held.since}, until {held.deadline})"
        return
    wanted = {Phase.FAILED: "Failed", Phase.SUSPENDED: "Suspended", Phase.SUCCEEDED: "Succeeded"}.get(status.phase)
    for condition in status.conditions:
        if condition.type == wanted:
            yield f"{condition.type}: {condition.reason}: {condition.message}"


def _section(title: str, lines: Iterator[str]) -> Iterator[str]:
    body = list(lines)
    if body:
        yield ""
        yield title
        yield from (f"  {line}" for line in body)


def _conditions(status: Status) -> Iterator[str]:
    known = [condition for condition in status.conditions if condition.status is not ConditionStatus.UNKNOWN]
    rows = [(item.type, item.status, item.reason, item.message) for item in known]
    return _section("Conditions", iter(words.aligned(rows) if rows else ()))


def _attempt(store: Store, status: Status) -> Iterator[str]:
    current = status.current
    if current is None:
        return iter(())
    lines = [
        f"stage {current.stage}, {current.mode.lower()}, micro batch {current.micro_batch_size}",
        f"recorded {current.recorded_at}",
    ]
    if current.lineage:
        sources = ", ".join(f"attempt {entry.attempt} up to step {entry.max_step}" for entry in current.lineage)
        lines.append(f"may resume from {sources}; not below step {current.floor_step}")
    if current.replay is not None:
        replay = current.replay
        lines.append(
            f"repeats steps {replay.from_step + 1}-{replay.to_step} and compares with attempt {replay.attempt}"
        )
    if current.stopping:
        lines.append(f"is being stopped: {current.stopping}")
    progress = snapshot(store, status).progress
    if progress is not None:
        silence = words.duration(time.time() - progress.updated_at)
        lines.append(f"the trainer: {progress.phase}, step {told_step(status, progress)}, {silence} ago")
    return _section(f"Attempt {current.attempt}", iter(lines))


def _gates(status: Status) -> Iterator[str]:
    rows = [
        (
            stage.name,
            gate.name,
            item.measurement,
            _value(item.value),
            limits_text(item.min, item.max) or "-",
            _verdict(gate, item.verdict),
        )
        for stage in status.ladder
        for gate in stage.gates
        for item in gate.evidence
    ]
    header = ("stage", "gate", "measurement", "value", "limit", "verdict")
    if not rows:
        return iter(())
    return _section("Gates", iter(words.aligned([header, *rows])))


def _value(value: str | None) -> str:
    return "no data" if value is None else words.figure(float(value))


def _verdict(gate: GateVerdict, verdict: str) -> str:
    return verdict if gate.mode == "Enforce" else f"{verdict} (dry run)"


def _modes(store: Store, status: Status) -> Iterator[str]:
    measured = {
        report.stage: f" ({comparison_text(report.compile)})"
        for report in _reports(store, status)
        if report.compile is not None and comparison_text(report.compile)
    }
    lines = (
        f"{stage.name}: {stage.mode}: {stage.compile_reason}{measured.get(stage.name, '')}"
        for stage in status.ladder
        if stage.mode and stage.compile_reason
    )
    return _section("Compiled or eager", lines)


def _remedies(status: Status) -> Iterator[str]:
    lines = (
        f"{remedy.at}  {remedy.what} (attempt {remedy.attempt}, step {remedy.step}): {remedy.reason}: {remedy.evidence}"
        for remedy in status.remedies
    )
    return _section("Remedies", lines)


def _first_failure(status: Status) -> Iterator[str]:
    failure = status.first_failure
    if failure is None:
        return iter(())
    rank = "" if failure.rank is None else f", rank {failure.rank}"
    code = "" if failure.exit_code is None else f", exit code {failure.exit_code} ({_code_name(failure.exit_code)})"
    lines = [f"{failure.reason}: attempt {failure.attempt}, {failure.pod}{rank}{code}"]
    lines += [f"| {words.shortened(line)}" for line in failure.last_lines.splitlines()]
    return _section("First failure", iter(lines))


def _code_name(code: int) -> str:
    try:
        return ExitCode(code).name.replace("_", " ").lower()
    except ValueError:
        return "not one of the trainer's"


def _notices(store: Store, status: Status) -> Iterator[str]:
    notices = dict.fromkeys(notice for report in _reports(store, status) for notice in report.notices)
    return _section("The trainer noticed", iter(notices))


def _reports(store: Store, status: Status) -> Iterator[Report]:
    """Yield what each ended attempt reported, oldest first."""
    for number in range(1, status.attempt + 1):
        report = read_report(store.checkpoints / attempt_folder(number) / REPORT_FILE)
        if report is not None:
            yield report


def _advice(store: Store, status: Status) -> Iterator[str]:
    name = typed_name(store)
    if status.phase is Phase.SUCCEEDED:
        export = store.checkpoints / EXPORT_FOLDER
        model = f", the model is {export}" if export.exists() else ""
        yield f"nothing: it is done; `ctj report {name}` writes the page{model}"
    elif status.phase is Phase.HELD:
        yield f"`ctj approve {name}` goes on although the gate failed"
        if _is_taken(VERB_ROLLBACK, store, status):
            yield f"or `ctj rollback {name}` goes back to the last good stage"
        yield f"then `{going_on(store)}` goes on"
    elif status.phase is Phase.FAILED:
        yield f"`ctj logs {name}` shows the trainer's words"
        yield f"when the cause is removed: `ctj retry {name}`, then `{going_on(store)}`"
    elif holder_of(store.folder) is None:
        yield f"`{going_on(store)}` goes on from the last checkpoint"
    else:
        yield f"`ctj watch {name}` follows it"
    if any(stage.mode is Mode.EAGER for stage in status.ladder) and _is_taken(VERB_RETRY_COMPILE, store, status):
        yield f"a stage runs eager, for the reason above; `ctj retry-compile {name}` asks it to compile again"


def _is_taken(verb: str, store: Store, status: Status) -> bool:
    """Tell whether the verb would have an effect: what `ctj` refuses is no advice."""
    try:
        return not verbs.why_not(verb, store.read_job().parsed_spec(), status)
    except Refusal:  # a spec broken by hand
        return False


def _newest_checkpoint(store: Store, status: Status) -> int | None:
    steps = [
        int(manifest.parent.name.removeprefix("step-"))
        for number in range(1, status.attempt + 1)
        for manifest in (store.checkpoints / attempt_folder(number)).glob(f"step-*/{MANIFEST_FILE}")
    ]
    return max(steps, default=None)
