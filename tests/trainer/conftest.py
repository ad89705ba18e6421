"""A pair of gloo ranks shared by every test of the trainer tier."""

import inspect
import os
import pickle
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

WORLD_SIZE = 2
CASE_SECONDS = 300.0  # imports alone take a minute on a busy machine


class Ranks:
    """Runs a function of the calling test file in every rank at once and returns what each rank returned."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def __call__(self, case: Callable[..., Any], **keywords: Any) -> list[Any]:
        if not self._processes:
            self._start()
        # Test modules are loaded by path in the ranks: a class of theirs would be another class there.
        request = pickle.dumps((inspect.getfile(case), case.__name__, keywords))
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(request)
            process.stdin.flush()
        answers = self._collect(case.__name__)
        failures = [f"rank {rank}:\n{value}" for rank, (ok, value) in enumerate(answers) if not ok]
        if failures:
            self.stop()  # the ranks may stand in different collectives now
            pytest.fail("\n".join(failures))
        return [value for _, value in answers]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
        self._processes = []

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        self._processes = [
            subprocess.Popen(
                [sys.executable, Path(__file__).with_name("rank_pair.py"), str(rank), str(WORLD_SIZE), str(port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
            for rank in range(WORLD_SIZE)
        ]

    def _collect(self, name: str) -> list[tuple[bool, Any]]:
        deadline = time.monotonic() + CASE_SECONDS
        answers: list[tuple[bool, Any]] = []
        for rank, process in enumerate(self._processes):
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                self.stop()
                pytest.fail(f"{name}: rank {rank} gave no answer in {CASE_SECONDS:g} s")
            try:
                answers.append(pickle.load(process.stdout))
            except EOFError:
                code = process.wait(timeout=10)
                self.stop()
                pytest.fail(f"{name}: rank {rank} died with exit code {code}")
        return answers


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    pair = Ranks()
    yield pair
    pair.stop()
