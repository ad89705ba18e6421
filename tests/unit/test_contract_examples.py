"""Every example is a job that a cluster takes, and the README's is one of them."""

from pathlib import Path

import pytest

from ctj_api.generate import ROOT
from ctj_api.spec import Strategy
from ctj_api.validate import load_job, validate_document

EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example_is_valid_and_says_how_to_run_it(example: Path) -> None:
    text = example.read_text()

    assert [str(problem) for problem in validate_document(text)] == []
    assert f"examples/{example.name}" in text.split("apiVersion:")[0]


def test_quickstart_climbs_all_four_stages() -> None:
    _, spec = load_job(ROOT / "examples" / "quickstart.yaml")

    assert [stage.strategy for stage in spec.ladder] == list(Strategy)


@pytest.mark.parametrize("strategy", Strategy)
def test_each_strategy_has_an_example_of_its_own(strategy: Strategy) -> None:
    metadata, spec = load_job(ROOT / "examples" / f"{strategy}.yaml")

    assert metadata["name"] == strategy
    assert [stage.strategy for stage in spec.ladder] == [strategy]


def test_job_in_the_readme_is_valid() -> None:
    blocks = (ROOT / "README.md").read_text().split("```yaml\n")[1:]
    jobs = [block.split("```")[0] for block in blocks if "kind: CompiledTrainingJob" in block]

    assert jobs
    for job in jobs:
        assert [str(problem) for problem in validate_document(job)] == []
