"""One folder, one run: told by a lock that outlives its taker as long as an heir of it lives."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ctj_operator.local import lock, strays
from ctj_operator.local.lock import InUseError, hold, holder_of

# A runner that dies at once while its "supervisor", which inherited the lock, lives on.
_DYING_RUNNER = """
import os, subprocess, sys
from pathlib import Path
from ctj_operator.local.lock import hold
with hold(Path(sys.argv[1]), command="ctj run old.yaml") as descriptor:
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    heir = subprocess.Popen(sleep, stdout=subprocess.DEVNULL, pass_fds=(descriptor,))
    print(heir.pid, flush=True)
    os._exit(1)
"""


def test_a_held_folder_is_refused_with_who_holds_it_and_what_to_do(tmp_path: Path) -> None:
    with hold(tmp_path, command="ctj run a.yaml"):
        with pytest.raises(InUseError) as raised, hold(tmp_path, command="ctj run b.yaml"):
            pass
        message = str(raised.value)
    for part in (str(tmp_path), f"pid {os.getpid()}", "ctj run a.yaml", "ctj watch", f"kill -INT {os.getpid()}"):
        assert part in message


def test_a_released_folder_can_be_held_again(tmp_path: Path) -> None:
    with hold(tmp_path, command="first"):
        assert "first" in str(holder_of(tmp_path))
    assert holder_of(tmp_path) is None
    with hold(tmp_path, command="second"):
        pass


def test_a_folder_never_run_is_held_by_nobody(tmp_path: Path) -> None:
    assert holder_of(tmp_path) is None


def test_the_lock_outlives_its_runner_while_a_trainer_has_inherited_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_HANDOVER_SECONDS", 0.2)
    runner = subprocess.run(
        [sys.executable, "-c", _DYING_RUNNER, str(tmp_path)], stdout=subprocess.PIPE, text=True, check=False
    )
    heir = int(runner.stdout)
    try:
        with pytest.raises(InUseError, match="which is gone"), hold(tmp_path, command="ctj run new.yaml"):
            pass
    finally:
        os.kill(heir, 9)
    monkeypatch.setattr(lock, "_HANDOVER_SECONDS", 5.0)  # as in life: the next run waits for the heir to be gone
    with hold(tmp_path, command="ctj run new.yaml"):
        assert "new.yaml" in str(holder_of(tmp_path))


def test_a_pid_used_again_is_not_taken_for_the_process_that_had_it(tmp_path: Path) -> None:
    mine = strays.started_at(os.getpid())
    assert mine is not None
    assert strays.is_alive(os.getpid(), mine)
    assert not strays.is_alive(os.getpid(), mine - 1)


def test_strays_are_found_by_their_folder_and_ended_and_others_are_left_alone(tmp_path: Path) -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    mine = subprocess.Popen(sleep, env={**os.environ, "CTJ_RUN_DIR": str(tmp_path)})
    other = subprocess.Popen(sleep, env={**os.environ, "CTJ_RUN_DIR": f"{tmp_path}-other"})
    try:
        deadline = time.monotonic() + 10
        while strays.find("CTJ_RUN_DIR", tmp_path) != [mine.pid]:  # until its exec has happened
            assert time.monotonic() < deadline
        assert strays.end("CTJ_RUN_DIR", tmp_path) == [mine.pid]
        assert mine.wait() == -9
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
