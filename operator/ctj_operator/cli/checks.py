"""`ctj check` and `ctj doctor`: findings of the trainer as tables, and their exit code."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ctj_api.exit_codes import RunExit
from ctj_operator.cli import documents, words
from ctj_operator.cli.trainer import ask_trainer
from ctj_operator.local.refusal import Refusal

_MODULE = "ctj_trainer.checks"
_CHECK_SECONDS = 900.0  # a model is built and traced some ten times
_ISOLATE_SECONDS = 3600.0  # five processes, each with its own import of torch
_STYLES = {"violating": "bold red", "compliant": "green", "not-applicable": "dim", "advice": "cyan"}

Finding = Mapping[str, Any]


def check(target: str, *, config: Path | None, job: Path | None) -> dict[str, Any]:
    """Return the findings on a recipe (a name, or module:function) or a script (a .py file).

    Raises:
        Refusal: a file is unreadable, the recipe cannot be used, or there is no trainer here.
    """
    return ask_trainer(_MODULE, ["check"], question=_question(target, config, job), seconds=_CHECK_SECONDS)


def doctor(target: str, *, job: Path | None, cache: Path) -> dict[str, Any]:
    """Return the findings on this machine, and on the job's recipe if there is one; and the lists' items.

    Raises:
        Refusal: as for `check`.
    """
    question = {**_question(target, None, job), "cache": str(cache)}
    return ask_trainer(_MODULE, ["doctor"], question=question, seconds=_CHECK_SECONDS)


def isolate(target: str, *, job: Path | None) -> dict[str, Any]:
    """Return which combination of compiling and preparing breaks.

    Raises:
        Refusal: as for `check`, or there is nothing to run.
    """
    question = _question(target, None, job)
    if "recipe" not in question:
        raise Refusal("--isolate runs a model: name a job (-f job.yaml) or a recipe; a script is only read")
    return ask_trainer(_MODULE, ["isolate"], question=question, seconds=_ISOLATE_SECONDS)


def exit_code(answer: Mapping[str, Any]) -> RunExit:
    """Return 1 if a rule is violated; 4 if all that is violated is of this machine."""
    violated = {finding["check"] for finding in answer["findings"] if finding["verdict"] == "violating"}
    if not violated:
        return RunExit.SUCCEEDED
    return RunExit.ENVIRONMENT if violated <= {"toolchain", "cache", "versions"} else RunExit.FAILED


def show(answer: Mapping[str, Any], console: Console) -> None:
    """Print violations with their remedies, then one line per rule that holds, then the lists' items."""
    findings = answer["findings"]
    violated = [finding for finding in findings if finding["verdict"] == "violating"]
    for finding in violated:
        console.print(_violation(finding), soft_wrap=True)
    if violated:
        console.print()
    console.print(_table([finding for finding in findings if finding not in violated]))
    for title, items in _by_list(answer.get("items", ())).items():
        console.print(_items(title, items))
    console.print(_sum(findings), soft_wrap=True)


def _question(target: str, config: Path | None, job: Path | None) -> dict[str, Any]:
    question: dict[str, Any] = {}
    if job is not None:
        spec = documents.admitted(documents.read(job, ()))["spec"]
        question = {"spec": spec, "recipe": spec["recipe"]}
    if target.endswith(".py"):
        if not Path(target).is_file():
            raise Refusal(f"no script {target}")
        question.pop("recipe", None)
        return {**question, "script": target}
    if target:
        given = _config(config) if config else question.get("recipe", {}).get("config", {})
        question["recipe"] = {"name": target, "config": given}
    elif config:
        question["recipe"] = {**question["recipe"], "config": _config(config)}
    return question


def _config(file: Path) -> dict[str, Any]:
    import yaml

    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise Refusal(f"--config {file}: {error}") from None
    if not isinstance(document, dict):
        raise Refusal(f"--config {file} holds {type(document).__name__}; it must be a mapping: the recipe's config")
    return document


def _violation(finding: Finding) -> RenderableType:
    where = " ".join(part for part in (finding.get("subject", ""), _located(finding)) if part)
    head = Text.assemble(("violating ", _STYLES["violating"]), f"{finding['check']}: {finding['rule']}")
    lines = [head, *(Text(f"  {line}") for line in (where, finding.get("evidence", "")) if line)]
    lines.append(Text(f"  remedy: {finding['remedy']}"))
    if finding.get("rewrite"):
        lines.append(Text(f"  write:  {finding['rewrite']}", style="cyan"))
    return Group(*lines)


def _located(finding: Finding) -> str:
    return f"({finding['location']})" if finding.get("location") else ""


def _table(findings: Sequence[Finding]) -> Table:
    table = Table("check", "rule", "verdict", "looked at")
    for finding in findings:
        seen = ": ".join(part for part in (finding.get("subject", ""), finding.get("evidence", "")) if part)
        table.add_row(finding["check"], finding["rule"], _verdict(finding["verdict"]), escape(seen))
    return table


def _by_list(items: Sequence[Finding]) -> dict[str, list[Finding]]:
    lists: dict[str, list[Finding]] = {}
    for item in items:
        lists.setdefault(item["list"], []).append(item)
    return lists


def _items(title: str, items: Sequence[Finding]) -> Table:
    table = Table("question", "verdict", "found, and what to know", title=title, title_justify="left")
    for item in items:
        found = item["found"] if item["verdict"] == "violating" else []
        table.add_row(escape(item["question"]), _verdict(item["verdict"]), escape("\n".join([*found, item["answer"]])))
    return table


def _verdict(verdict: str) -> Text:
    return Text(verdict, style=_STYLES[verdict])


def _sum(findings: Sequence[Finding]) -> str:
    violated = sum(finding["verdict"] == "violating" for finding in findings)
    if not violated:
        return f"{words.plural(len(findings), 'finding')}: nothing violated"
    return f"{words.plural(violated, 'violation')} in {words.plural(len(findings), 'finding')}; --json for programs"
