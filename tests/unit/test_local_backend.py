"""A job's folder as `decide` sees it."""

import json
import time
from pathlib import Path

from tests.unit.workplace import job_document

from ctj_api.status import ConditionType
from ctj_operator.core.decide import decide
from ctj_operator.local.backend import LocalBackend
from ctj_operator.local.processes import Launch, Processes
from ctj_operator.local.store import JOB_FILE, Store


def backend_of(store: Store) -> LocalBackend:
    launch = Launch(command=(), checkpoints=store.checkpoints, cache=store.folder, lock=0, grace_seconds=1.0)
    return LocalBackend(store, Processes(store.children, launch), announce=lambda _: None)


def test_a_spec_that_was_broken_by_hand_is_named_by_decide(tmp_path: Path) -> None:
    store = Store(tmp_path)
    document = store.submit(job_document()).document
    document["spec"]["ladder"][1]["strategy"] = "magic"
    (tmp_path / JOB_FILE).write_text(json.dumps(document))
    decision = decide(backend_of(store).observe("tiny"), now=time.time())
    (told,) = decision.events
    assert told.reason == "InvalidSpec"
    assert "spec.ladder.1.strategy is 'magic'" in told.message
    accepted = next(one for one in decision.status.conditions if one.type is ConditionType.ACCEPTED)
    assert (accepted.status, accepted.reason) == ("False", "InvalidSpec")
