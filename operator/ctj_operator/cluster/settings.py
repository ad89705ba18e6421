"""What an operator process was told at start: flags over environment over defaults, parsed once and printed once."""

import argparse
import os
import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from ctj_api import names

_SERVICE_ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Every knob of the operator; nothing below reads flags or the environment."""

    namespaces: tuple[str, ...] = ()
    """Namespaces to look after; empty means the whole cluster."""
    kubeconfig: str | None = None
    """Absent: the pod's service account, else kubectl's own choice."""
    default_image: str | None = None
    """Trainer image of jobs without spec.image."""
    checkpoint_claim: str | None = None
    """PersistentVolumeClaim, in the job's namespace, of jobs without spec.training.checkpoint.volume."""
    compile_cache_claim: str | None = None
    """PersistentVolumeClaim, in the job's namespace, of jobs without spec.compile.cache."""
    workers: int = 4
    """Jobs reconciled at the same time."""
    metrics_port: int = 8080
    """Serves /metrics, /healthz and /readyz; 0 picks a free port."""
    resync_seconds: float = 300.0
    """Every job is looked at again at least this often."""
    scrape_seconds: float = 30.0
    """Between two looks at a running attempt's progress."""
    lease_name: str = "ctj-operator"
    lease_namespace: str = "default"
    lease_seconds: float = 15.0
    """A dead leader is replaced after this long; a stopped one at once."""
    identity: str = ""
    """Unique per process; holder of the lease."""


def parse_settings(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> Settings:
    """Read the command line; a flag that is absent may come from CTJ_OPERATOR_<FLAG>."""
    parser = _build_parser(environment)
    chosen = parser.parse_args(arguments)
    if chosen.workers < 1:
        parser.error(f"--workers is {chosen.workers}; at least 1 is needed")
    if chosen.lease_seconds < 1:
        parser.error(f"--lease-seconds is {chosen.lease_seconds}; leases count in whole seconds, so at least 1")
    return Settings(
        namespaces=tuple(chosen.namespace),
        kubeconfig=chosen.kubeconfig,
        default_image=chosen.default_image,
        checkpoint_claim=chosen.checkpoint_claim,
        compile_cache_claim=chosen.compile_cache_claim,
        workers=chosen.workers,
        metrics_port=chosen.metrics_port,
        resync_seconds=chosen.resync_seconds,
        scrape_seconds=chosen.scrape_seconds,
        lease_name=chosen.lease_name,
        lease_namespace=chosen.lease_namespace,
        lease_seconds=chosen.lease_seconds,
        identity=f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}",
    )


def describe(settings: Settings) -> str:
    """All settings on one line, for the first line of the log."""
    return " ".join(f"{field.name}={getattr(settings, field.name)!r}" for field in fields(settings))


def _build_parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ctj_operator.cluster", description=__doc__)

    def add(flag: str, default: str | int | float | None, explanation: str) -> None:
        kind = str if default is None else type(default)
        inherited = environment.get(f"{names.ENV_OPERATOR_PREFIX}{flag.upper().replace('-', '_')}", default)
        parser.add_argument(f"--{flag}", type=kind, default=inherited, help=f"{explanation} (default: {inherited})")

    explanation = "namespace to look after; repeatable; absent: the whole cluster"
    parser.add_argument("--namespace", action="append", default=[], help=explanation)
    add("kubeconfig", None, "file to log in with; absent: the pod's service account, else kubectl's choice")
    add("default-image", None, "trainer image of jobs without spec.image")
    add("checkpoint-claim", None, "PersistentVolumeClaim of jobs without spec.training.checkpoint.volume")
    add("compile-cache-claim", None, "PersistentVolumeClaim of jobs without spec.compile.cache; absent: cold pods")
    add("workers", Settings.workers, "jobs reconciled at the same time")
    add("metrics-port", Settings.metrics_port, "port of /metrics, /healthz and /readyz; 0 picks a free one")
    add("resync-seconds", Settings.resync_seconds, "every job is looked at again at least this often")
    add("scrape-seconds", Settings.scrape_seconds, "between two looks at a running attempt's progress")
    add("lease-name", Settings.lease_name, "name of the leadership lease")
    add("lease-namespace", _own_namespace(environment), "namespace of the leadership lease")
    add("lease-seconds", Settings.lease_seconds, "a dead leader is replaced after this long")
    return parser


def _own_namespace(environment: Mapping[str, str]) -> str:
    if "POD_NAMESPACE" in environment:
        return environment["POD_NAMESPACE"]
    try:
        return _SERVICE_ACCOUNT_NAMESPACE.read_text(encoding="utf-8").strip()
    except OSError:
        return Settings.lease_namespace
