"""Verbs on a local job: a token on the document, or one field of its spec. Its runner acts within a second."""

import uuid

from ctj_api import names
from ctj_operator.cli.places import going_on, typed_name
from ctj_operator.local.lock import holder_of
from ctj_operator.local.store import Store

_ANNOTATIONS = {
    "approve": names.VERB_APPROVE,
    "eager": names.VERB_FORCE_EAGER,
    "retry-compile": names.VERB_RETRY_COMPILE,
    "rollback": names.VERB_ROLLBACK,
}


def ask(store: Store, verb: str) -> str:
    """Store the wish and say who will act on it."""
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
