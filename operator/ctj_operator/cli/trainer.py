"""Ask the trainer's Python: it has torch, this side does not. One JSON object comes back."""

import json
import subprocess
from collections.abc import Sequence
from typing import Any

from ctj_api.exit_codes import RunExit
from ctj_operator.local.processes import trainer_python
from ctj_operator.local.refusal import Refusal

_SECONDS = 300  # importing torch takes a minute on a busy machine
_BAD_USAGE = 2


def ask_trainer(
    module: str, arguments: Sequence[str] = (), *, question: object = None, seconds: float = _SECONDS
) -> dict[str, Any]:
    """Run `python -m module arguments` with `question` as JSON on its stdin; return its answer.

    Raises:
        Refusal: what was asked for is wrong (exit code 2 of the module), or there is no trainer here.
    """
    command = [trainer_python(), "-m", module, *arguments]
    said_to = json.dumps(question) if question is not None else ""
    try:
        done = subprocess.run(command, input=said_to, capture_output=True, text=True, timeout=seconds, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Refusal(_no_trainer(command[0], str(error)), exit_code=RunExit.ENVIRONMENT) from None
    said = done.stderr.strip()
    if done.returncode == _BAD_USAGE:
        raise Refusal(said.splitlines()[-1] if said else "the trainer refused")
    if done.returncode != 0:
        last = said.splitlines()[-1] if said else f"exit code {done.returncode}"
        raise Refusal(_no_trainer(command[0], last), exit_code=RunExit.ENVIRONMENT)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _no_trainer(python: str, why: str) -> str:
    return (
        f"the trainer could not be asked ({why}); {python} -m pip install 'ctj[trainer]', "
        "or set CTJ_TRAINER_PYTHON to a Python that has it"
    )
