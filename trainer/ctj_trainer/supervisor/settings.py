"""What does the environment of this pod say? Everything is read and checked here, once, before anything starts."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctj_api import names
from ctj_api.attempt import Attempt
from ctj_trainer.messages import MessageError, read_attempt


class SettingsError(ValueError):
    """The environment is wrong; the message is the one line a person sees. `attempt` as far as it could be read."""

    def __init__(self, message: str, *, attempt: int = 1, stage: str = "unknown") -> None:
        super().__init__(message)
        self.attempt = attempt
        self.stage = stage


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One pod of one attempt."""

    attempt: Attempt
    node_rank: int
    master_addr: str
    master_port: int
    run_dir: Path
    checkpoint_root: Path
    cache_dir: Path
    control_file: Path
    termination_file: Path | None
    metrics_port: int | None
    worker_module: str
    grace_seconds: float
    hold_seconds: float
    hang_seconds: float
    heartbeat_seconds: float

    @property
    def nodes(self) -> int:
        """Pods of the attempt."""
        return self.attempt.stage.nodes

    @property
    def local_processes(self) -> int:
        """Ranks of this pod."""
        return self.attempt.stage.local_processes

    @property
    def attempt_dir(self) -> Path:
        """Where this attempt's results go."""
        return self.checkpoint_root / names.attempt_folder(self.attempt.attempt)

    def global_rank(self, local_rank: int) -> int:
        """Rank in the whole attempt."""
        return self.node_rank * self.local_processes + local_rank


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Read the environment of the pod.

    Raises:
        SettingsError: something is missing or not understood.
    """
    attempt = _attempt(environment)
    number = _Numbers(environment, attempt)
    termination = environment.get(names.ENV_TERMINATION_FILE)
    settings = Settings(
        attempt=attempt,
        node_rank=int(number.read(names.ENV_NODE_RANK, 0)),
        master_addr=environment.get(names.ENV_MASTER_ADDR, "127.0.0.1"),
        master_port=int(number.read(names.ENV_MASTER_PORT, names.MASTER_PORT)),
        run_dir=number.path(names.ENV_RUN_DIR),
        checkpoint_root=number.path(names.ENV_CHECKPOINT_ROOT),
        cache_dir=number.path(names.ENV_CACHE_DIR),
        control_file=number.path(names.ENV_CONTROL_FILE),
        termination_file=Path(termination) if termination else None,
        metrics_port=int(number.read(names.ENV_METRICS_PORT, -1)) if names.ENV_METRICS_PORT in environment else None,
        worker_module=environment.get(names.ENV_WORKER_MODULE, "ctj_trainer.worker"),
        grace_seconds=number.read(names.ENV_GRACE_SECONDS, names.GRACE_SECONDS),
        hold_seconds=number.read(names.ENV_HOLD_SECONDS, names.HOLD_SECONDS),
        hang_seconds=number.read(names.ENV_HANG_SECONDS, names.HANG_SECONDS),
        heartbeat_seconds=number.read(names.ENV_HEARTBEAT_SECONDS, names.HEARTBEAT_SECONDS),
    )
    if not 0 <= settings.node_rank < settings.nodes:
        raise number.wrong(names.ENV_NODE_RANK, str(settings.node_rank), f"below stage.nodes = {settings.nodes}")
    return settings


def _attempt(environment: Mapping[str, str]) -> Attempt:
    try:
        return read_attempt(environment)
    except MessageError as error:
        raise SettingsError(str(error), **_identity(environment.get(names.ENV_ATTEMPT, ""))) from error


def _identity(text: str) -> dict[str, Any]:
    """What a report needs, as far as a broken message tells."""
    try:
        document = json.loads(text)
        attempt, stage = int(document["attempt"]), str(document["stage"]["name"])
    except (ValueError, KeyError, TypeError):
        return {}
    return {"attempt": max(attempt, 1), "stage": stage}


@dataclass(frozen=True)
class _Numbers:
    environment: Mapping[str, str]
    attempt: Attempt

    def read(self, name: str, default: float) -> float:
        text = self.environment.get(name, "")
        if not text:
            return default
        try:
            value = float(text)
        except ValueError:
            raise self.wrong(name, text, "a number") from None
        if not 0 <= value < float("inf"):
            raise self.wrong(name, text, "a number from 0")
        return value

    def path(self, name: str) -> Path:
        text = self.environment.get(name)
        if not text:
            raise SettingsError(
                f"{name} is not set: it names a file or folder of this pod",
                attempt=self.attempt.attempt,
                stage=self.attempt.stage.name,
            )
        return Path(text)

    def wrong(self, name: str, value: str, rule: str) -> SettingsError:
        return SettingsError(
            f"{name} is {value!r}, expected {rule}", attempt=self.attempt.attempt, stage=self.attempt.stage.name
        )
