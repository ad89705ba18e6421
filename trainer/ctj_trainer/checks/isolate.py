"""Which combination breaks: compiling alone, preparing and offloading alone, or only both together?

Each form runs in a process of its own, two steps on the same batch, so that one form's failure (a crash, too) says
nothing about another. This file imports no torch: the forms do.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ctj_trainer.checks.finding import Finding, Rule

ISOLATION = Rule(check="isolate", name="compiling and preparing work alone and together")
_SECONDS = 600
_TOLERANCE = 1e-5


class Form(StrEnum):
    """One way to run a model."""

    EAGER = "eager"
    COMPILED = "compile alone"
    PREPARED = "prepare and offload alone"
    BOTH = "both, as usual"
    APART = "both, hooks kept out of graphs"


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What one form did; `error` is empty where it ran."""

    error: str = ""
    loss: float = 0.0
    gradient: float = 0.0
    graphs: int = 0
    breaks: int = 0


def isolate(question: Mapping[str, Any]) -> list[Finding]:
    """Run every form and say which combination breaks."""
    return judge({form: _in_a_process(question, form) for form in Form})


def judge(tried: Mapping[Form, Tried]) -> list[Finding]:
    """Judge each form against eager, and both together against compiling alone."""
    reference = tried[Form.EAGER]
    findings = [_form(form, tried[form], reference, tried[Form.COMPILED]) for form in Form]
    return [*findings, *_conclusion({f.subject for f in findings if f.remedy})]


def _form(form: Form, tried: Tried, reference: Tried, compiled: Tried) -> Finding:
    trouble = _trouble(form, tried, reference, compiled)
    if trouble:
        return ISOLATION.fails(str(form), evidence=trouble, remedy="see the conclusion")
    graphs = f", {tried.graphs} graphs, {tried.breaks} breaks" if form not in (Form.EAGER, Form.PREPARED) else ""
    return ISOLATION.holds(str(form), evidence=f"loss {tried.loss:.6g}, gradient norm {tried.gradient:.6g}{graphs}")


def _trouble(form: Form, tried: Tried, reference: Tried, compiled: Tried) -> str:
    if tried.error:
        return tried.error
    if not reference.error:
        for what, value, expected in (
            ("loss", tried.loss, reference.loss),
            ("gradient norm", tried.gradient, reference.gradient),
        ):
            if abs(value - expected) > _TOLERANCE * max(abs(expected), 1e-12):
                return f"{what} {value:.6g} where eager has {expected:.6g}"
    if form in (Form.BOTH, Form.APART) and not compiled.error:
        if compiled.graphs and not tried.graphs:
            return f"0 graphs, where compiling alone makes {compiled.graphs}: nothing is compiled, without an error"
        if tried.breaks > compiled.breaks:
            return f"{tried.breaks} graph breaks, where compiling alone has {compiled.breaks}"
    return ""


def _conclusion(broken: set[str]) -> list[Finding]:
    if str(Form.EAGER) in broken:
        return [_says("the model itself", "it fails without compiling or preparing", "fix the model first")]
    if str(Form.COMPILED) in broken:
        return [_says("compile", "it breaks compiled, without hook or wrapper", "ctj check says where the graph ends")]
    if str(Form.PREPARED) in broken:
        return [_says("prepare and offload", "it breaks eager, with hooks and wrapper", "the compiler is not why")]
    if str(Form.BOTH) not in broken:
        return []
    cured = str(Form.APART) not in broken
    return [
        _says(
            "both together",
            "each works alone: a hook is traced" + (", and keeping hooks out of graphs cures it" if cured else ""),
            "wrap every hook in no_compile, and compile around them: OffloadHooks.of(model).exclude_all(), "
            "compile_around_hooks(block, ...)",
        )
    ]


def _says(subject: str, evidence: str, remedy: str) -> Finding:
    return ISOLATION.fails(f"conclusion: {subject}", evidence=evidence, remedy=remedy)


def _in_a_process(question: Mapping[str, Any], form: Form) -> Tried:
    command = [sys.executable, "-m", "ctj_trainer.checks", "isolate-form", "--form", form.name]
    asked = json.dumps(dict(question))
    try:
        done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Tried(error=f"no end after {_SECONDS} s")
    try:
        return Tried(**json.loads(done.stdout.splitlines()[-1]))
    except (ValueError, IndexError, TypeError):
        last = [line for line in done.stderr.splitlines() if line.strip()]
        return Tried(error=f"exit code {done.returncode}: {last[-1][:300] if last else 'nothing was said'}")
