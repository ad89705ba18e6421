"""A pod whose metrics port is taken trains on and says so."""

import socket
from pathlib import Path

from tests.unit.supervised import an_attempt, environment_of

from ctj_api import names
from ctj_trainer.supervisor.endpoint import serve
from ctj_trainer.supervisor.settings import read_settings


def test_a_port_in_use_is_a_notice(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = str(other.getsockname()[1])
        notice = serve(read_settings({**environment_of(an_attempt(), tmp_path), names.ENV_METRICS_PORT: port}))
    assert notice is not None
    assert f"port {port} cannot be served" in notice


def test_without_a_port_nothing_is_served(tmp_path: Path) -> None:
    assert serve(read_settings(environment_of(an_attempt(), tmp_path))) is None
