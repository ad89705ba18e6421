"""`python -m ctj_trainer.checks ACTION`: answers `ctj check` and `ctj doctor` with one JSON object.

The question is JSON on stdin: `recipe` (name, config), or `script` (a path), `spec` (of a job), `cache` (a folder).
Exit codes: 0, whatever was found; 2 with one line on stderr if the recipe, the script or its data cannot be used.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctj_api.spec import Dynamic, Spec
from ctj_trainer.checks.finding import Finding
from ctj_trainer.checks.isolate import Form

if TYPE_CHECKING:
    from ctj_trainer.checks.model_checks import Setting
    from ctj_trainer.recipe import Recipe

Question = Mapping[str, Any]


def main() -> int:
    """Answer one question."""
    parser = argparse.ArgumentParser(prog="python -m ctj_trainer.checks", description=__doc__)
    parser.add_argument("action", choices=["check", "doctor", "isolate", "isolate-form"])
    parser.add_argument("--form", choices=[form.name for form in Form], default=Form.EAGER.name)
    asked = parser.parse_args()
    question = json.load(sys.stdin)
    from ctj_trainer.recipe import DataError, RecipeError

    try:
        answer = _answer(asked.action, question, form=Form[asked.form])
    except (RecipeError, DataError, SyntaxError, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    print(json.dumps(answer))
    return 0


def _answer(action: str, question: Question, *, form: Form) -> dict[str, Any]:
    if action == "isolate-form":
        from ctj_trainer.checks.forms import try_form
        from ctj_trainer.checks.trial import Trial

        return asdict(try_form(Trial.of_recipe(_recipe(question)), form))
    if action == "isolate":
        from ctj_trainer.checks.isolate import isolate

        _recipe(question)  # say now what is wrong with it, once
        return {"findings": _documents(isolate(question))}
    subject = _of_subject(question)
    if action == "check":
        return {"findings": _documents(subject)}
    return _doctor(question, subject)


def _doctor(question: Question, subject: list[Finding]) -> dict[str, Any]:
    from ctj_trainer.checks.articles import ITEMS
    from ctj_trainer.checks.ci import check_ci
    from ctj_trainer.checks.machine import check_machine
    from ctj_trainer.checks.order_test import order_test

    cache = Path(question.get("cache") or os.environ.get("TORCHINDUCTOR_CACHE_DIR") or "~/.cache/ctj/compile")
    findings = [*check_machine(os.environ, cache=cache.expanduser()), *order_test(), *check_ci(Path.cwd()), *subject]
    return {"findings": _documents(findings), "items": [item.judged(findings) for item in ITEMS]}


def _of_subject(question: Question) -> list[Finding]:
    from ctj_trainer.checks.model_checks import check_recipe, check_script

    if question.get("script"):
        return check_script(Path(question["script"]))
    if not question.get("recipe"):
        return []
    return check_recipe(_recipe(question), _setting(question))


def _recipe(question: Question) -> "Recipe":
    import torch

    from ctj_trainer.recipe import RecipeContext, load_recipe

    asked = question["recipe"]
    sys.path.insert(0, os.getcwd())  # as for a job: recipes lie beside its file
    context = RecipeContext(device=torch.device("cpu"), seed=0)
    return load_recipe(asked["name"], asked.get("config") or {}, context)


def _setting(question: Question) -> "Setting":
    from ctj_trainer.checks.model_checks import Setting

    if not question.get("spec"):
        return Setting()
    spec = Spec.from_document(question["spec"])
    return Setting(
        precision=spec.training.precision,
        dynamic=spec.compile.dynamic or Dynamic.AUTO,
        world_size=max(stage.world_size for stage in spec.ladder),
        micro_batch_size=spec.training.micro_batch_size,
        global_batch_size=spec.training.global_batch_size,
        seed=spec.training.seed,
        strategies=frozenset(stage.strategy for stage in spec.ladder),
    )


def _documents(findings: list[Finding]) -> list[dict[str, Any]]:
    return [finding.to_document() for finding in findings]


if __name__ == "__main__":
    sys.exit(main())
