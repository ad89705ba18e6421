"""`ctj validate`: every problem of every file at once, exactly as the API server would judge it."""

import json
from collections.abc import Iterable
from pathlib import Path

from ctj_api.validate import load_job, validate_document

from ctj_api.exit_codes import RunExit


def validate(files: Iterable[Path], *, as_json: bool) -> RunExit:
    """Print the verdict on each file."""
    outcome = RunExit.SUCCEEDED
    for file in files:
        problems = _problems(file)
        if problems:
            outcome = RunExit.BAD_SPEC
        if as_json:
            print(json.dumps({"file": str(file), "valid": not problems, "problems": problems}))
        elif problems:
            print(f"{file}: {len(problems)} problem{'s' if len(problems) > 1 else ''}")
            print("\n".join(f"  {problem}" for problem in problems))
        else:
            print(f"{file}: valid")
    return outcome


def _problems(file: Path) -> list[str]:
    try:
        return [str(problem) for problem in validate_document(load_job(file))]
    except (ValueError, OSError) as error:
        return [str(error)]
