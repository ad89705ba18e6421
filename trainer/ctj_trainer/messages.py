"""May this trainer read this attempt message? It accepts its own version and the one before. No torch."""

import json
from collections.abc import Mapping

from pydantic import ValidationError

from ctj_api import __version__
from ctj_api.attempt import MESSAGE_VERSION, Attempt
from ctj_api.names import ENV_ATTEMPT


class MessageError(ValueError):
    """The attempt message is absent, of another version, or wrong."""


def read_attempt(environment: Mapping[str, str]) -> Attempt:
    """Parse the attempt of this process.

    Raises:
        MessageError: in one line, what is wrong and what to do.
    """
    text = environment.get(ENV_ATTEMPT)
    if not text:
        raise MessageError(f"{ENV_ATTEMPT} is not set; a worker is started by the operator or `ctj run`, not by hand")
    try:
        document = json.loads(text)
        version = document["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise MessageError(f"{ENV_ATTEMPT} is no attempt message ({error!r})") from error
    accepted = range(max(MESSAGE_VERSION - 1, 1), MESSAGE_VERSION + 1)
    if version not in accepted:
        raise MessageError(
            f"{ENV_ATTEMPT} has version {version}; trainer {__version__} accepts {', '.join(map(str, accepted))}; "
            "use an image of the operator's release or of the one before"
        )
    try:
        return Attempt.from_document({**document, "version": MESSAGE_VERSION})
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise MessageError(f"{ENV_ATTEMPT} does not follow the contract: {problems}") from error
