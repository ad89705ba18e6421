"""A checkpoint of any strategy resumes under any other, and the next losses are those of the run that went on."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.trainer.conftest import Ranks
from tests.trainer.small import EVERY_STRATEGY, checkpoints, description, trained

from ctj_api.attempt import LineageEntry
from ctj_api.spec import Strategy

BEFORE, AFTER = range(1, 4), range(4, 7)


def source(strategy: Strategy, root: Path) -> list[float]:
    """Train, save, go on; rank 0 alone under single."""
    with trained(strategy) as run:
        run.run(BEFORE)
        if strategy is not Strategy.SINGLE or dist.get_rank() == 0:
            site = checkpoints(root / strategy.value, strategy=strategy)
            site.save(run.prepared, description(BEFORE[-1], strategy))
        return run.run(AFTER)


def target(strategy: Strategy, root: Path) -> dict[str, list[float]]:
    """Read each source's checkpoint into one model that started from other weights; go on."""
    resumed = {}
    with trained(strategy, seed=99) as run:
        run.run(range(1, 2))  # moments and step counts of its own, all to be replaced
        for origin in EVERY_STRATEGY:
            dist.barrier()
            site = checkpoints(root / origin.value, strategy=strategy, lineage=[LineageEntry(attempt=1, max_step=3)])
            assert site.load(run.prepared) is not None
            resumed[origin.value] = run.run(AFTER)
    return resumed


def state_of_each(root: Path) -> dict[str, dict[str, float]]:
    """Sum of every tensor, by its name in the file."""
    from torch.distributed.checkpoint import FileSystemReader, load

    with trained(Strategy.SINGLE) as run:
        shapes = {name: value.shape for name, value in run.prepared.state().items()}
    states = {}
    for origin in EVERY_STRATEGY:
        folder = root / origin.value / "attempt-00001" / "step-00000003"
        found = {name: torch.empty(shape) for name, shape in shapes.items()}
        assert FileSystemReader(folder).read_metadata().state_dict_metadata.keys() == found.keys()
        load(found, storage_reader=FileSystemReader(folder), no_dist=True)
        states[origin.value] = {name: value.double().sum().item() for name, value in found.items()}
    return states


def all_pairs(root: Path) -> dict[str, Any]:
    went_on = {origin.value: source(origin, root) for origin in EVERY_STRATEGY}
    dist.barrier()
    resumed = {strategy.value: target(strategy, root) for strategy in EVERY_STRATEGY}
    return {"went on": went_on, "resumed": resumed, "states": state_of_each(root)}


@pytest.fixture(scope="module")
def answers(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks(all_pairs, root=tmp_path_factory.mktemp("pairs"))


def test_sixteen_pairs_resume_with_the_next_losses_equal(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        for strategy, resumed in answer["resumed"].items():
            for origin, losses in resumed.items():
                assert losses == pytest.approx(answer["went on"][origin], rel=1e-6), f"{origin} -> {strategy}"


def test_every_strategy_writes_the_same_names_and_values(answers: list[dict[str, Any]]) -> None:
    """C31: names in a file are those of the model as it was built."""
    states = dict(answers[0]["states"])
    single = states.pop("single")
    assert single["optimizer.model.norm.weight.step"] == 3.0
    for strategy, state in states.items():
        assert state == pytest.approx(single, rel=1e-4, abs=1e-5), strategy
