"""The supervisor's life: prepare, start the agent, look ten times a second, judge, report, leave nothing behind."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import FrameType

from ctj_api import names
from ctj_api.control import StopControl
from ctj_api.exit_codes import ExitCode, reason_of
from ctj_api.report import Failure, Report
from ctj_trainer.compile.archive import ArchiveError, fetch_once
from ctj_trainer.compile.cache_folder import cache_key, prepare_compile_cache
from ctj_trainer.controls import ControlFile
from ctj_trainer.marks import clear_marks, ended_well, read_marks, request_stop, root_cause
from ctj_trainer.memory import oom_kills
from ctj_trainer.metrics import clear_metrics
from ctj_trainer.progress import clear_progress, read_progress, who_compiles
from ctj_trainer.supervisor import ending, launch, processes
from ctj_trainer.supervisor.endpoint import serve
from ctj_trainer.supervisor.logs import WorkerLogs, tail, write_out
from ctj_trainer.supervisor.outcome import Facts, PodOutcome, judge, read_agent_record
from ctj_trainer.supervisor.settings import Settings, SettingsError, read_settings
from ctj_trainer.supervisor.stacks import dump_stacks, where
from ctj_trainer.supervisor.watch import MARGIN_SECONDS, End, Patience, Stop, Watch, stop_seconds

LOOK_SECONDS = 0.1
_AGENT_PATIENCE_SECONDS = 5.0


def main() -> int:
    """Run this pod; return its exit code."""
    processes.die_with_parent()
    try:
        settings = read_settings(os.environ)
    except SettingsError as error:
        return _refuse(error)
    try:
        _prepare(settings.run_dir)
    except OSError as error:
        text = f"{names.ENV_RUN_DIR} {settings.run_dir} cannot be written: {error.strerror}"
        return _end_early(settings, ExitCode.DATA_OR_STORAGE, text)
    missing = launch.missing_package(settings)
    if missing is not None:
        return _end_early(settings, ExitCode.USER_CODE_OR_IMAGE, missing)
    if os.getpid() != os.getpgid(0):
        os.setpgid(0, 0)
    processes.adopt_orphans()
    try:
        return Supervisor(settings).run()
    except OSError as error:  # a full or vanished disk below us, not the user's code
        processes.end_descendants()
        text = f"{error.filename or settings.run_dir}: {error.strerror}; free the disk, or give the run another place"
        return _end_early(settings, ExitCode.DATA_OR_STORAGE, text)


class Supervisor:
    """One pod of one attempt, from the agent's start to the exit code."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._control = ControlFile(settings.control_file, attempt=settings.attempt.attempt)
        self._logs = WorkerLogs(
            settings.run_dir / launch.LOGS, processes=settings.local_processes, global_rank=settings.global_rank
        )
        self._notices: list[str] = []
        self._stop: Stop | None = None
        self._ended_well = False
        patience = Patience(
            heartbeat=settings.heartbeat_seconds,
            step=settings.hang_seconds,
            # The ranks notice first, and name the late one.
            compile=settings.attempt.compile.timeout_seconds + MARGIN_SECONDS,
        )
        self._watch = Watch(patience, now=time.monotonic())
        self._oom_kills = oom_kills()

    def run(self) -> int:
        """Run to the end and return the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        # Held back since the first line; children would inherit the block.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
        compile_cache = self._prepare_compile_cache()
        text = serve(self._settings)
        if text is not None:
            self._notify(text)
        agent = launch.start_agent(self._settings, compile_cache=compile_cache)
        end = self._watch_over(agent)
        if end is not None:
            end = self._end_workers(agent, end)
        code = agent.wait()
        processes.end_descendants()
        self._logs.finish()
        outcome = self._hold(self._judge(code, end))
        self._report(outcome)
        return int(outcome.code)

    def _prepare_compile_cache(self) -> Path:
        """Choose this node's folder, and bring in what an earlier attempt compiled."""
        folder, notice = prepare_compile_cache(self._settings.cache_dir)
        if notice is not None:
            self._notify(notice)
        archive = self._settings.attempt.compile_cache
        if archive is None:
            return folder
        if archive.key != cache_key():
            _say(f"compiled code is at hand for {archive.key}, not for {cache_key()}: compiled again")
            return folder
        try:
            count = fetch_once(archive, self._settings.checkpoint_root, folder)
            _say(f"compiled code of an earlier attempt: {count} files fetched")
        except ArchiveError as error:
            self._notify(str(error))
        return folder

    def _watch_over(self, agent: "subprocess.Popen[bytes]") -> End | None:
        """Look until the agent has ended, or until it must be ended."""
        while agent.poll() is None:
            self._logs.pump()
            self._follow_control()
            end = self._look()
            if end is not None:
                return end
            if self._has_left(agent):
                agent.kill()
                break
            time.sleep(LOOK_SECONDS)
        return None

    def _has_left(self, agent: "subprocess.Popen[bytes]") -> bool:
        """Tell whether the only pod's workers all ended well: then the agent's own tidying is a second for nothing."""
        if self._settings.nodes > 1 or not self._ended_well:
            return False
        return not processes.workers_of(agent.pid)

    def _look(self) -> End | None:
        run_dir = self._settings.run_dir
        marks = read_marks(run_dir)
        self._ended_well = ended_well(marks, ranks=self._settings.local_processes) is not None
        return self._watch.look(
            now=time.monotonic(),
            progress=read_progress(run_dir),
            compiling=who_compiles(run_dir),
            settled=self._ended_well or root_cause(marks) is not None,
            stop=self._stop,
        )

    def _follow_control(self) -> None:
        control = self._control.read()
        if control.stop is StopControl.CHECKPOINT and self._stop is None:
            self._begin_stop(control.reason or "asked to", seconds=self._settings.grace_seconds, hard=False)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        """A pod's deletion: the same as a stop by control, but somebody will kill us at the end of the grace period."""
        if self._stop is None or not self._stop.hard:
            seconds = stop_seconds(self._settings.grace_seconds)
            self._begin_stop(signal.Signals(number).name, seconds=seconds, hard=True)

    def _begin_stop(self, reason: str, *, seconds: float, hard: bool) -> None:
        self._stop = Stop(at=time.monotonic(), seconds=seconds, reason=reason, hard=hard)
        request_stop(self._settings.run_dir, reason)
        _say(f"stopping ({reason}): up to {seconds:.0f} s for a checkpoint")

    def _end_workers(self, agent: "subprocess.Popen[bytes]", end: End) -> End:
        """Kill the workers and then the agent; a hang's stacks are taken first and become part of the cause."""
        workers = processes.workers_of(agent.pid)
        if end.hung:
            _say(f"hang: {end.message}; reading stacks")
            ranked = {self._settings.global_rank(local): pid for local, pid in workers.items()}
            stacks = dump_stacks(ranked, self._settings.run_dir)
            end = End(code=end.code, message=f"{end.message}; {where(stacks)}"[:1000], hung=True)
        for pid in workers.values():
            processes.kill_group(pid)
        try:
            agent.wait(_AGENT_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()
        return end

    def _judge(self, agent_exit: int, end: End | None) -> PodOutcome:
        run_dir = self._settings.run_dir
        facts = Facts(
            marks=read_marks(run_dir),
            ranks=self._settings.local_processes,
            agent=read_agent_record(run_dir / launch.RECORD, exit_code=agent_exit),
            end=end,
            oom_kills=oom_kills() - self._oom_kills,
            last_lines=self._logs.last_lines,
            agent_log=tail(run_dir / "agent.log"),
        )
        return judge(facts)

    def _hold(self, outcome: PodOutcome) -> PodOutcome:
        """Stay a while after a lost peer, so that the pod with the cause is seen to fail first."""
        if outcome.code is not ExitCode.PEER_LOST or self._settings.nodes == 1:
            return outcome
        until = time.monotonic() + self._settings.hold_seconds
        while time.monotonic() < until and self._stop is None:
            self._follow_control()
            time.sleep(LOOK_SECONDS)
        if self._stop is not None and self._watch.nothing_to_lose:
            return PodOutcome(code=ExitCode.STOPPED)  # the peer obeyed the same stop a moment earlier
        return outcome

    def _report(self, outcome: PodOutcome) -> None:
        settings = self._settings
        draft, notice = ending.read_draft(settings.run_dir, settings.attempt)
        if notice is not None:
            self._notify(notice)
        report = ending.complete(
            draft,
            attempt=settings.attempt,
            outcome=outcome,
            progress=read_progress(settings.run_dir),
            notices=self._notices,
        )
        if settings.node_rank == 0:
            try:
                ending.write_report(report, settings.attempt_dir / names.REPORT_FILE)
            except OSError as error:
                _say(f"the report could not be kept in {settings.attempt_dir}: {error.strerror}")
        _write_termination(settings.termination_file, report)
        cause = f": {outcome.failure.message}" if outcome.failure is not None else ""
        _say(f"exit code {int(outcome.code)} ({reason_of(outcome.code)}){cause}")

    def _notify(self, text: str) -> None:
        self._notices.append(text[:512])
        _say(text)


def _prepare(run_dir: Path) -> None:
    """Make the run folder ours: nothing of an earlier process in the same folder may speak for this one."""
    run_dir.mkdir(parents=True, exist_ok=True)
    clear_marks(run_dir)
    clear_progress(run_dir)
    clear_metrics(run_dir)
    for name in (names.REPORT_FILE, launch.RECORD):
        (run_dir / name).unlink(missing_ok=True)
    shutil.rmtree(run_dir / launch.LOGS, ignore_errors=True)
    probe = run_dir / f".probe.{os.getpid()}"
    probe.write_text("room for a few files")
    probe.unlink()


def _refuse(error: SettingsError) -> int:
    """End with one line where not even the attempt is known."""
    _say(f"configuration: {error}")
    report = Report(
        attempt=error.attempt,
        stage=error.stage,
        exit_code=ExitCode.CONFIGURATION,
        failure=Failure(reason=reason_of(ExitCode.CONFIGURATION), message=str(error)[:1024]),
    )
    path = os.environ.get(names.ENV_TERMINATION_FILE)
    _write_termination(Path(path) if path else None, report)
    return ExitCode.CONFIGURATION


def _end_early(settings: Settings, code: ExitCode, message: str) -> int:
    """End before anything was started."""
    _say(message)
    outcome = PodOutcome(code=code, failure=Failure(reason=reason_of(code), message=message[:1024]))
    report = ending.complete(None, attempt=settings.attempt, outcome=outcome, progress=None, notices=[])
    _write_termination(settings.termination_file, report)
    return int(code)


def _write_termination(path: Path | None, report: Report) -> None:
    """Write in place: in a pod the file is a mount and cannot be replaced."""
    if path is None:
        return
    try:
        path.write_bytes(ending.fit(report))
    except OSError as error:
        _say(f"the termination message could not be written to {path}: {error.strerror}")


def _say(text: str) -> None:
    write_out(f"[supervisor] {text}\n")
