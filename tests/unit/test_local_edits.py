"""What may be changed between two local runs is what the API server lets through.

tests/contract sends the same table of updates to the real API server.
"""

from pathlib import Path

import pytest
import yaml
from tests.contract.documents import CASES, Case

from ctj_api.status import Status
from ctj_api.validate import admit
from ctj_operator.cli.documents import admitted_update
from ctj_operator.local.refusal import Refusal
from ctj_operator.local.store import Store

UPDATES = [case for case in CASES if case.old]


@pytest.mark.parametrize("case", UPDATES, ids=lambda case: case.name)
def test_an_edit_is_taken_or_refused_as_on_the_api_server(case: Case, tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.submit(admit(yaml.safe_load(case.old)))
    if case.status:
        store.write_status(Status.from_document(case.status), over=0)
    document = yaml.safe_load(case.text)
    if case.is_good:
        admitted_update(document, store)
        return
    with pytest.raises(Refusal) as refused:
        admitted_update(document, store)
    for problem in case.problems:
        assert problem in str(refused.value)
    assert "--fresh" in str(refused.value)


def test_the_table_has_edits_before_and_after_a_stage_has_passed() -> None:
    verdicts = {case.is_good for case in UPDATES if case.status}
    assert verdicts == {True, False}
