"""Is the audit part of continuous integration? Looked for in the files that CI runs."""

from pathlib import Path

from ctj_trainer.checks.finding import Finding, Rule

GUARD_IN_CI = Rule(check="offload", name="the hook audit is part of CI")
_PLACES = (".github/workflows/*.y*ml", ".gitlab-ci.yml", ".circleci/config.yml", "Jenkinsfile", "azure-pipelines.yml")
_TESTS = ("tests/**/*.py", "test/**/*.py", "Makefile", "tox.ini", "noxfile.py", ".pre-commit-config.yaml")
_MARKS = ("ctj check", "assert_all_disabled", "ctj_trainer.checks")


def check_ci(root: Path) -> list[Finding]:
    """Judge the project in `root`: CI calls the audit, or tests that CI runs do."""
    pipelines = _files(root, _PLACES)
    if not pipelines:
        return [GUARD_IN_CI.does_not_apply(evidence="no CI configuration in this folder")]
    for file in [*pipelines, *_files(root, _TESTS)]:
        if any(mark in file.read_text(encoding="utf-8", errors="replace") for mark in _MARKS):
            return [GUARD_IN_CI.holds(str(file.relative_to(root)), evidence="it runs the audit")]
    return [
        GUARD_IN_CI.fails(
            str(pipelines[0].relative_to(root)),
            evidence="neither it nor a test runs the audit",
            remedy="add a step",
            rewrite="ctj check RECIPE",
        )
    ]


def _files(root: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted(path for pattern in patterns for path in root.glob(pattern) if path.is_file())
