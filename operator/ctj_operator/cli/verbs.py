"""Verbs on a local job: a token on the document, or one field of its spec. Its runner acts within a second.

What would do nothing, now or ever, is refused with the reason before anything is stored.
"""

import uuid

from ctj_api import names
from ctj_operator.cli.places import going_on, typed_name
from ctj_operator.core import verbs
from ctj_operator.local.lock import holder_of
from ctj_operator.local.refusal import Refusal
from ctj_operator.local.store import Store

_ANNOTATIONS = {
    "approve": names.VERB_APPROVE,
    "eager": names.VERB_FORCE_EAGER,
    "retry-compile": names.VERB_RETRY_COMPILE,
    "rollback": names.VERB_ROLLBACK,
}


def ask(store: Store, verb: str) -> str:
    """Store the wish and say who will act on it.

    Raises:
        Refusal: it would do nothing; the message says why.
    """
    obstacle = _obstacle(store, verb)
    if obstacle:
        raise Refusal(f"{verb}: {obstacle} (`ctj explain {typed_name(store)}` shows where it stands)")
    if verb in _ANNOTATIONS:
        store.annotate(_ANNOTATIONS[verb], uuid.uuid4().hex[:8])
    elif verb == "retry":
        store.edit_spec(retryToken=uuid.uuid4().hex[:8])
    else:
        store.edit_spec(suspend={"pause": True, "resume": False}[verb])
    holder = holder_of(store.folder)
    if holder is not None:
        return f"{verb}: asked; {holder} acts on it"
    if verb == "pause":
        return f"{verb}: nothing runs this job now; it stays stopped until `ctj resume {typed_name(store)}`"
    return f"{verb}: noted; nothing runs this job now, go on with: {going_on(store)}"


def _obstacle(store: Store, verb: str) -> str:
    """Say why the verb would do nothing; a retry that was asked for and not seen yet opens the way for the others."""
    spec, status = store.read_job().parsed_spec(), store.read_status().status
    if verb == "retry":
        return verbs.why_no_retry(spec, status)
    if verb not in _ANNOTATIONS:
        return "" if verb == "resume" and spec.suspend else verbs.over(spec, status)
    return verbs.why_not(_ANNOTATIONS[verb], spec, status)
