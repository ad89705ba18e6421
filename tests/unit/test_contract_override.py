"""`--set path=value` changes exactly what it names, or says why it cannot."""

from typing import Any

import pytest
from tests.contract.documents.case import BASE

from ctj_api.validate import SpecError, override, validate_document


@pytest.mark.parametrize(
    ("setting", "place", "value"),
    [
        ("spec.training.steps=20", ("training", "steps"), 20),
        ("spec.training.optimizer.learningRate=1e-3", ("training", "optimizer", "learningRate"), "1e-3"),
        ("spec.ladder[0].steps=5", ("ladder", 0, "steps"), 5),
        ("spec.ladder[ddp].processesPerNode=4", ("ladder", 1, "processesPerNode"), 4),
        ("spec.recipe.config.data.files=[a.txt, b.txt]", ("recipe", "config", "data", "files"), ["a.txt", "b.txt"]),
        ("spec.recipe.config.rate=1e-3", ("recipe", "config", "rate"), 0.001),
        ("spec.image=registry.example/a:b=c", ("image",), "registry.example/a:b=c"),
        ("spec.suspend=true", ("suspend",), True),
        ("spec.ladder[0]={name: first, strategy: single, steps: 9}", ("ladder", 0, "name"), "first"),
    ],
)
def test_setting_is_applied_and_the_original_kept(setting: str, place: tuple[Any, ...], value: Any) -> None:
    found: Any = override(BASE, setting)["spec"]
    for key in place:
        found = found[key]

    assert found == value
    assert override(BASE) == BASE


def test_empty_value_removes_the_field() -> None:
    document = override(BASE, "spec.ladder[single]=", "spec.training.seed=", "spec.ladder[0].steps=")

    assert [stage["name"] for stage in document["spec"]["ladder"]] == ["ddp"]
    assert validate_document(document) == []


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("steps", "--set steps is not a setting; must be path=value; write for example spec.training.steps=20"),
        ("training.steps=1", "--set training.steps is outside of the job; must start with spec or metadata; "),
        ("spec.ladder[fsdp].steps=1", "--set spec.ladder[fsdp] is not in the list; must be one of single, ddp; "),
        ("spec.ladder[7].steps=1", "--set spec.ladder[7] is not in the list; must be one of single, ddp; "),
        ("spec.training.steps.x=1", "--set spec.training.steps is 100; has no x inside; "),
        ("spec.recipe.config.a=[1", "--set spec.recipe.config.a is '[1'; "),
    ],
)
def test_impossible_setting_says_why(setting: str, line: str) -> None:
    with pytest.raises(SpecError) as refusal:
        override(BASE, setting)

    assert str(refusal.value).startswith(line)


def test_every_impossible_setting_is_named() -> None:
    with pytest.raises(SpecError) as refusal:
        override(BASE, "steps", "spec.training.steps=1", "training.steps=2")

    assert len(refusal.value.problems) == 2


def test_misspelt_path_is_refused_by_validation() -> None:
    problems = validate_document(override(BASE, "spec.training.step=20"))

    assert "did you mean steps?" in str(problems[0])
