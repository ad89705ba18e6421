"""The one table of good and bad jobs: `ctj validate` and the API server must both take the good and refuse the bad.

A case is a small valid job with some fields changed, or YAML text where the writing itself matters. Read by
`test_same_verdict.py` (real API server) and `tests/unit/test_contract_validate.py`.
"""

from tests.contract.documents import rules, updates, values, whole, writing
from tests.contract.documents.case import Case

__all__ = ["CASES", "Case"]

CASES: tuple[Case, ...] = (*whole.CASES, *values.CASES, *rules.CASES, *writing.CASES, *updates.CASES)
