"""Recipes are found, their config is checked all at once, and files become samples; what is wrong is said plainly."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ctj_trainer.recipe import DataError, Recipe, RecipeContext, RecipeError, blocks_of, collate, load_recipe, loss_of

CONTEXT = RecipeContext(device=torch.device("cpu"), seed=0)
MODEL = {"hiddenSize": 32, "layers": 2, "heads": 4}


def causal_lm(*, model: dict[str, Any] | None = None, **data: Any) -> Recipe:
    return load_recipe("causal_lm", {"model": model or MODEL, "data": {"sequenceLength": 8} | data}, CONTEXT)


def problems_of(config: dict[str, Any]) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe("causal_lm", config, CONTEXT)
    return str(caught.value).splitlines()


def test_text_files_are_read_as_bytes_in_sorted_order(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("89abcdefgh")
    (tmp_path / "a.txt").write_text("01234567")
    samples = causal_lm(files=[str(tmp_path / "*.txt")]).samples
    assert len(samples) == 2
    assert bytes(samples[0]["tokens"].tolist()) == b"012345678"  # the target of the last input lies in the next file
    assert bytes(samples[1]["tokens"].tolist()) == b"89abcdefg"


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_token_files_are_read_as_integers(tmp_path: Path, dtype: str) -> None:
    np.arange(1000, 1030, dtype=dtype).tofile(tmp_path / "tokens.bin")
    model = MODEL | {"vocabularySize": 2000}
    recipe = causal_lm(model=model, files=[str(tmp_path / "*.bin")], format="tokens", dtype=dtype)
    assert len(recipe.samples) == 3
    assert recipe.samples[2]["tokens"].tolist() == list(range(1016, 1025))
    assert collate(recipe.samples, [0, 2])["tokens"].shape == (2, 9)


def test_samples_cover_the_data_without_gap_or_overlap(tmp_path: Path) -> None:
    for index, size in enumerate([3, 17, 1, 40]):
        np.arange(size, dtype="uint8").tofile(tmp_path / f"{index}")
    whole = np.concatenate([np.fromfile(tmp_path / f"{index}", dtype="uint8") for index in range(4)])
    samples = causal_lm(files=[str(tmp_path / "?")]).samples
    inputs = np.concatenate([samples[i]["tokens"][:-1].numpy() for i in range(len(samples))])
    targets = np.concatenate([samples[i]["tokens"][1:].numpy() for i in range(len(samples))])
    assert inputs.tolist() == whole[: len(inputs)].tolist()
    assert targets.tolist() == whole[1 : len(targets) + 1].tolist()
    assert len(whole) - 1 - len(targets) < 8


def test_the_standard_library_is_text_of_bounded_size() -> None:
    samples = causal_lm(builtin="python-stdlib").samples
    assert 2**20 < len(samples) * 8 <= 8 * 2**20
    text = bytes(torch.cat([samples[i]["tokens"][:-1] for i in range(2000)]).tolist())
    assert b"import " in text
    again = causal_lm(builtin="python-stdlib").samples
    assert torch.equal(samples[12345]["tokens"], again[12345]["tokens"])


def test_the_loss_is_a_sum_that_any_split_adds_up_to() -> None:
    recipe = causal_lm(builtin="python-stdlib")
    torch.manual_seed(0)
    model = recipe.build_model()
    whole, count = recipe.loss(model, collate(recipe.samples, range(6)))
    parts = [recipe.loss(model, collate(recipe.samples, part)) for part in ([0], [1, 2, 3], [4, 5])]
    assert int(count) == sum(int(c) for _, c in parts) == 6 * 8
    assert whole.item() == pytest.approx(sum(loss.item() for loss, _ in parts), rel=1e-6)
    assert recipe.count_tokens is not None
    assert recipe.count_tokens(collate(recipe.samples, range(6))) == 48


def test_every_problem_of_a_config_is_reported_at_once() -> None:
    lines = problems_of(
        {
            "model": {"hiddenSize": "32", "layers": 0, "heads": 4, "keyValueHead": 2},
            "data": {"builtin": "shakespeare", "colour": 1},
        }
    )
    assert lines == [
        "spec.recipe.config.model.hiddenSize is '32'; input should be a valid integer",
        "spec.recipe.config.model.layers is 0; input should be greater than or equal to 1",
        "spec.recipe.config.model.keyValueHead is unknown; did you mean keyValueHeads?",
        "spec.recipe.config.data.builtin is 'shakespeare'; input should be 'python-stdlib'",
        "spec.recipe.config.data.sequenceLength is missing; add it",
        "spec.recipe.config.data.colour is unknown; allowed: builtin, files, format, dtype, tokenizer, sequenceLength",
    ]


def test_rules_over_several_fields_are_reported_at_once() -> None:
    model = {"hiddenSize": 36, "layers": 1, "heads": 4, "keyValueHeads": 3}
    data = {"builtin": "python-stdlib", "files": ["x"], "format": "tokens", "sequenceLength": 8}
    lines = problems_of({"model": model, "data": data})
    assert len(lines) == 4
    assert "hiddenSize is 36; it must be a multiple of 2 * heads = 8; for example 32, 40" in lines[0]
    assert "keyValueHeads is 3; it must divide heads = 4; one of 1, 2, 4" in lines[1]
    assert "both builtin and files given" in lines[2]
    assert "model.vocabularySize is missing" in lines[3]


def test_sizes_and_a_path_contradict_each_other() -> None:
    data = {"builtin": "python-stdlib", "sequenceLength": 8}
    assert (
        "path and heads, layers are both given"
        in problems_of({"model": {"path": "/w", "heads": 2, "layers": 1}, "data": data})[0]
    )
    assert "hiddenSize, layers missing" in problems_of({"model": {"heads": 2}, "data": data})[0]


def test_missing_files_name_pattern_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as caught:
        causal_lm(files=["data/*.txt"])
    assert "no file matches 'data/*.txt'" in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_files_that_cannot_be_tokens_are_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"123")
    model = MODEL | {"vocabularySize": 100}
    with pytest.raises(DataError, match=r"odd\.bin has 3 bytes; it must hold one or more tokens of 2 bytes"):
        causal_lm(model=model, files=[str(tmp_path / "odd.bin")], format="tokens")
    (tmp_path / "short.txt").write_text("hello")
    with pytest.raises(DataError, match=r"holds 5 tokens .*short\.txt.* needs 9"):
        causal_lm(files=[str(tmp_path / "short.txt")])


def test_a_token_outside_the_vocabulary_names_file_and_cure(tmp_path: Path) -> None:
    np.array([1] * 20 + [100] * 10, dtype="uint16").tofile(tmp_path / "t.bin")
    samples = causal_lm(model=MODEL | {"vocabularySize": 100}, files=[str(tmp_path / "t.bin")], format="tokens").samples
    assert samples[0]["tokens"].max() == 1
    with pytest.raises(DataError, match=r"token 100 in sample 2 \(.*t\.bin\).*model\.vocabularySize"):
        samples[2]


def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str) -> None:
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)


USER_RECIPE = """
import torch
from ctj_trainer.recipe import Recipe
def build(config, context):
    data = [{"x": torch.full((3,), float(i))} for i in range(config["items"])]
    def loss(model, batch):
        out = model(batch["x"])
        return out.pow(2).sum(), torch.tensor(len(out))
    return Recipe(build_model=lambda: torch.nn.Linear(3, 1), samples=data, loss=loss)
def other(config, context):
    return 3
"""


def test_a_function_of_the_users_is_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user_module(tmp_path, monkeypatch, "mine", USER_RECIPE)
    recipe = load_recipe("mine:build", {"items": 5}, CONTEXT)
    loss, count = recipe.loss(recipe.build_model(), collate(recipe.samples, [0, 4]))
    assert (len(recipe.samples), int(count), loss.ndim) == (5, 2, 0)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("causal_ml", ["'causal_ml'", "allowed: causal_lm", "module:function"]),
        ("nowhere:build", ["importing nowhere failed", "No module named", "PYTHONPATH", "put it into one of them"]),
        ("mine2:biuld", ["mine2 has no function biuld", "build, other"]),
        ("mine2:other", ["returned int", "return Recipe"]),
    ],
)
def test_a_recipe_that_cannot_be_loaded_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, parts: list[str]
) -> None:
    user_module(tmp_path, monkeypatch, "mine2", USER_RECIPE)
    with pytest.raises(RecipeError) as caught:
        load_recipe(name, {}, CONTEXT)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (None, "NoneType"),
        (torch.zeros(()), "a tensor of shape ()"),
        ((torch.zeros(3), torch.ones(3)), "(a tensor of shape (3,), a tensor of shape (3,))"),
        ((1.5, 2), "(float, int)"),
    ],
)
def test_a_loss_that_is_no_sum_and_count_is_refused_in_the_recipes_words(answer: Any, says: str) -> None:
    recipe = Recipe(build_model=nn.Identity, samples=[], loss=lambda *_: answer)
    with pytest.raises(RecipeError) as refused:
        loss_of(recipe, nn.Identity(), {})
    assert f"loss returned {says}; it must return (sum of token losses, number of tokens)" in str(refused.value)


def test_a_count_may_be_a_plain_number() -> None:
    recipe = Recipe(build_model=nn.Identity, samples=[], loss=lambda *_: (torch.ones(()), 3))
    assert loss_of(recipe, nn.Identity(), {})[1] == 3


def test_blocks_are_the_largest_repeated_list() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small = nn.ModuleList(nn.Linear(2, 2) for _ in range(5))
            self.large = nn.ModuleList(nn.Linear(9, 9) for _ in range(3))
            self.mixed = nn.Sequential(nn.Linear(50, 50), nn.ReLU())

    net = Net()
    recipe = Recipe(build_model=Net, samples=[], loss=lambda _model, _batch: (torch.zeros(()), torch.zeros(())))
    assert blocks_of(net, recipe) == list(net.large)
    assert blocks_of(nn.Linear(2, 2), recipe) == []
