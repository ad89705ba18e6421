"""Local validation of the shared table of documents; `tests/contract` puts the same table to a real API server."""

import time

import pytest
import yaml
from tests.contract.documents import CASES, Case

from ctj_api.validate import SpecError, override, validate_document

GATES_OF_ONE_STAGE = "[" + ",".join(f"{{name: g{index}, stages: [a]}}" for index in range(32)) + "]"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_document_has_exactly_its_problems(case: Case) -> None:
    stored = yaml.safe_load(case.old) if case.old else None
    if case.status:
        stored["status"] = case.status

    lines = [str(problem) for problem in validate_document(case.text, old=stored)]

    assert len(lines) == len(case.problems), lines
    for line, start in zip(lines, case.problems, strict=True):
        assert line.startswith(start)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "a batch that no stage divides",
            "spec.training.globalBatchSize is 17; must be a multiple of microBatchSize x processes (4) for stage "
            '"single"; use 16 or 24',
        ),
        (
            "a batch that one stage does not divide",
            "spec.training.globalBatchSize is 20; must be a multiple of microBatchSize x processes (8) for stage "
            '"ddp"; use 16 or 24',
        ),
        (
            "a batch smaller than one round",
            "spec.training.globalBatchSize is 4; must be a multiple of microBatchSize x processes (8) for stage "
            '"ddp"; use 8',
        ),
        (
            "worlds that do not divide each other",
            "spec.training.globalBatchSize is 16; must be a multiple of microBatchSize x processes (12) for stage "
            '"two"; use 24',
        ),
        (
            "an unknown field of spec",
            "spec.trainig is not a known field; must be one of activeDeadlineSeconds, compile, gates, image, ladder, "
            "pendingDeadlineSeconds, recipe, remedies, restart, retryToken, suspend, template, training, "
            "ttlSecondsAfterFinished; did you mean training?",
        ),
        (
            "no steps",
            "spec.training.steps is missing; must be set (optimizer steps of the whole ladder); add steps: 1",
        ),
        (
            "a last stage with steps",
            "spec.ladder: the last stage must not have steps, it runs to spec.training.steps; remove them from stage "
            '"ddp"',
        ),
        (
            "canaries as long as the training",
            "spec.training.steps is 20; must be more than the 20 steps of all canary stages together; use at least 21 "
            "or shorten them",
        ),
    ],
)
def test_line_names_path_value_rule_and_remedy(name: str, line: str) -> None:
    case = next(case for case in CASES if case.name == name)

    assert [str(problem) for problem in validate_document(case.text)] == [line]


def test_table_is_broad_and_its_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES) > 150


def test_every_document_of_a_file_is_judged() -> None:
    good, bad = (next(case.text for case in CASES if case.name == name) for name in ("the smallest job", "no steps"))

    problems = validate_document(f"{good}\n---\n# nothing here\n---\n{bad}\n")

    assert [problem.path for problem in problems] == ["document 2: spec.training.steps"]


def test_aliases_that_grow_without_end_are_refused_quickly() -> None:
    levels = "\n".join(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 12))
    started = time.process_time()

    problems = validate_document(f"a0: &a0 [x]\n{levels}\n")

    assert "each alias counted as what it repeats" in str(problems[0])
    assert time.process_time() - started < 10


STEPS = "spec.training.steps is"
LADDER = "spec.ladder is"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["spec.ladder=" + "x" * 5000], LADDER),
        (["spec.ladder={a: {}, b: {}}"], LADDER),
        (["spec.ladder=[" + "{name: s, strategy: ddp, steps: 2}," * 2000 + "]"], LADDER),
        (["spec.ladder=[" + "7," * 2000 + "]"], LADDER),
        (["spec.ladder=7", f"spec.gates={GATES_OF_ONE_STAGE}"], LADDER),
        (["spec.ladder=[{}, {}]", f"spec.gates={GATES_OF_ONE_STAGE}"], "spec.ladder[0].name is missing"),
        (["spec.gates=[" + "{name: g, stages: [" + "a," * 5000 + "]}]"], "spec.gates[0].stages is"),
        (["spec.training.steps=9223372036854775808"], STEPS),
        (["spec.training.steps=-99999999999999999999"], STEPS),
        (["spec.training.steps=" + "9" * 300], STEPS),
        (["spec.training.steps=" + "9" * 5000], STEPS),
        (["spec.training.steps=0x" + "f" * 5000], STEPS),
        (["spec.recipe.config.deep=" + "{a: " * 300 + "1" + "}" * 300], "--set spec.recipe.config.deep is"),
        (["spec.recipe.config.deep=" + "[" * 300 + "]" * 300], "--set spec.recipe.config.deep is"),
        (["spec.recipe.config.long=[" + "1," * 250_000 + "]"], "--set spec.recipe.config.long is"),
        (["spec.recipe.config.long=" + "x" * 4_000_000], "--set spec.recipe.config.long is"),
        (["spec.ladder[²].steps=3"], "--set spec.ladder[²] is not in the list"),
        (["spec.recipe." + ".".join("a" * 500) + "=1"], "spec.recipe.a"),
    ],
    ids=lambda value: str(value)[:48],
)
def test_hostile_values_get_a_plain_answer_soon(changes: list[str], expected: str) -> None:
    started = time.process_time()  # our own time: the machine may be busy
    good = yaml.safe_load(next(case.text for case in CASES if case.name == "the smallest job"))

    try:
        problems = validate_document(override(good, *changes))
    except SpecError as error:
        problems = error.problems

    assert any(str(problem).startswith(expected) for problem in problems), [str(problem)[:200] for problem in problems]
    assert all(len(str(problem)) < 2000 for problem in problems)
    assert time.process_time() - started < 10


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{a: " * 300 + "1" + "}" * 300, "line 1 is nested more than 64 deep"),
        ("[" * 300 + "]" * 300, "line 1 is nested more than 64 deep"),
        ("[" + "1," * 250_000 + "]", "line 1 is value 200001"),
        ("x" * 4_000_000, "the file is 4000000 characters"),
    ],
    ids=("deep maps", "deep lists", "many values", "long"),
)
def test_files_that_no_reader_could_take_are_refused(text: str, found: str) -> None:
    (problem,) = validate_document(text)

    assert str(problem).startswith(found)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 2**64, 10**30, 10**400])
def test_any_whole_number_anywhere_is_judged(value: int) -> None:
    good = yaml.safe_load(next(case.text for case in CASES if case.name == "the smallest job"))
    good["spec"]["recipe"]["config"] = {"free": [value]}

    assert validate_document(good) == []
