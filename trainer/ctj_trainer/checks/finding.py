"""What a check found: a rule, a verdict, where, why, and what to do. Printed as a table or as JSON."""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """Whether a rule holds. A rule that nothing here falls under is not applicable, never compliant."""

    COMPLIANT = "compliant"
    VIOLATING = "violating"
    NOT_APPLICABLE = "not-applicable"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One rule's verdict on one subject (a module, a parameter, a script, the machine)."""

    check: str
    rule: str
    verdict: Verdict
    subject: str = ""
    location: str = ""
    evidence: str = ""
    remedy: str = ""
    rewrite: str = ""
    """Suggested code, where there is one."""

    def to_document(self) -> dict[str, Any]:
        """Return it as JSON can hold it, without empty fields."""
        return {name: str(value) for name, value in asdict(self).items() if value}

    def __str__(self) -> str:
        where = f"{self.subject} ({self.location})" if self.location else self.subject
        return f"{self.check}: {self.rule}: {where}: {self.evidence}; {self.remedy}"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule under a check's name; makes its findings, so that each is spelled once."""

    check: str
    name: str

    def holds(self, subject: str = "", *, evidence: str = "") -> Finding:
        """Say that it holds, and what was looked at."""
        return self._finding(Verdict.COMPLIANT, subject=subject, evidence=evidence)

    def fails(self, subject: str = "", *, evidence: str, remedy: str, location: str = "", rewrite: str = "") -> Finding:
        """Say that it does not hold."""
        return self._finding(
            Verdict.VIOLATING, subject=subject, evidence=evidence, remedy=remedy, location=location, rewrite=rewrite
        )

    def does_not_apply(self, *, evidence: str) -> Finding:
        """Say that nothing here falls under it, and why."""
        return self._finding(Verdict.NOT_APPLICABLE, evidence=evidence)

    def judge(self, failures: list[Finding], *, looked_at: str) -> list[Finding]:
        """Return the failures, or one line that says it holds."""
        return failures or [self.holds(evidence=looked_at)]

    def _finding(self, verdict: Verdict, **facts: str) -> Finding:
        return Finding(check=self.check, rule=self.name, verdict=verdict, **facts)


def violations(findings: list[Finding]) -> list[Finding]:
    """Return those that must be acted on."""
    return [finding for finding in findings if finding.verdict is Verdict.VIOLATING]
