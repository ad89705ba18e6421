"""`ctj validate`: every problem of every file at once, exactly as the API server would judge it."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from ctj_api.exit_codes import RunExit
from ctj_api.validate import Problem, SpecError, read_text, validate_document


def validate(files: Iterable[Path], *, as_json: bool) -> RunExit:
    """Print the verdict on each file."""
    outcome = RunExit.SUCCEEDED
    for file in files:
        problems = _problems(file)
        if problems:
            outcome = RunExit.BAD_SPEC
        if as_json:
            listed = [asdict(problem) for problem in problems]
            print(json.dumps({"file": str(file), "valid": not problems, "problems": listed}))
        elif problems:
            print(f"{file}: {len(problems)} problem{'s' if len(problems) > 1 else ''}")
            print("\n".join(f"  {problem}" for problem in problems))
        else:
            print(f"{file}: valid")
    return outcome


def _problems(file: Path) -> list[Problem]:
    try:
        return validate_document(read_text(file))
    except SpecError as error:
        return error.problems
