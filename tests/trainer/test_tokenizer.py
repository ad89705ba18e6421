"""Text becomes tokens by a local tokenizer file: once per content, checked against the model, and exported with it."""

import json
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from ctj_trainer.recipe import DataError, Recipe, RecipeContext, RecipeError, load_recipe

TEXT = "the cat sat on the mat\nthe dog sat on the log\n" * 40


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CTJ_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokens"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    made = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.train_from_iterator([TEXT], trainers.WordLevelTrainer(special_tokens=["[UNK]", "[END]"]))
    end = made.token_to_id("[END]")
    made.post_processor = processors.TemplateProcessing(single="$A [END]", special_tokens=[("[END]", end)])
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return folder


def build(tokenizer: Path | str, *files: Path, model: dict[str, Any] | None = None) -> Recipe:
    config = {
        "model": {"hiddenSize": 32, "layers": 1, "heads": 4} | (model or {}),
        "data": {"files": [str(path) for path in files], "tokenizer": str(tokenizer), "sequenceLength": 8},
    }
    return load_recipe("causal_lm", config, RecipeContext(device=torch.device("cpu"), seed=0))


def all_tokens(recipe: Recipe) -> list[int]:
    return torch.cat([recipe.samples[i]["tokens"][:-1] for i in range(len(recipe.samples))]).tolist()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text(TEXT)
    return path


def test_a_text_file_becomes_the_tokenizers_ids_however_it_is_cut(
    tokenizer: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctj_trainer.recipes.tokenizer._PIECE_CHARACTERS", 100)
    expected = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode(TEXT, add_special_tokens=False).ids
    found = all_tokens(build(tokenizer, text))
    assert found == expected[: len(found)]
    assert len(expected) - len(found) <= 8


def test_each_line_of_a_jsonl_is_a_document_with_the_tokenizers_own_special_tokens(
    tokenizer: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "the cat", "id": n}) + "\n" for n in range(9)) + "\n")
    the, cat, end = (
        Tokenizer.from_file(str(tokenizer / "tokenizer.json")).token_to_id(t) for t in ("the", "cat", "[END]")
    )
    assert all_tokens(build(tokenizer, path)) == ([the, cat, end] * 9)[:24]


def test_the_vocabulary_is_the_tokenizers_unless_the_model_says_more(tokenizer: Path, text: Path) -> None:
    file = tokenizer / "tokenizer.json"
    size = Tokenizer.from_file(str(file)).get_vocab_size()
    assert build(file, text).build_model().model.embed_tokens.weight.shape[0] == size
    assert build(file, text, model={"vocabularySize": 64}).build_model().model.embed_tokens.weight.shape[0] == 64


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(tokenizer: Path, text: Path) -> None:
    with pytest.raises(RecipeError, match=r"vocabularySize is 4; .*tokenizer\.json has 9 tokens; use 9 or more"):
        build(tokenizer, text, model={"vocabularySize": 4})


def test_text_is_tokenized_once_per_content(
    tokenizer: Path, text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = all_tokens(build(tokenizer, text))
    made = {path: path.stat().st_mtime_ns for path in cache.glob("*.uint16")}
    assert len(made) == 1
    text.touch()
    assert all_tokens(build(tokenizer, text)) == first
    assert {path: path.stat().st_mtime_ns for path in cache.glob("*.uint16")} == made
    text.write_text("the log sat on the cat\n" * 40)
    assert all_tokens(build(tokenizer, text))[:6] != first[:6]
    assert len(list(cache.glob("*.uint16"))) == 2
    assert not list(cache.glob("*.partial"))


def test_processes_that_start_together_tokenize_once_and_read_the_same(
    tokenizer: Path, text: Path, cache: Path
) -> None:
    context = multiprocessing.get_context("forkserver")
    with context.Pool(2) as pool:
        results = pool.starmap(_rows, [(str(tokenizer), str(text))] * 2)
    assert results[0] == results[1]
    assert len(list(cache.glob("*.uint16"))) == 1


def _rows(tokenizer: str, text: str) -> list[int]:
    from ctj_trainer.recipes.tokenizer import Tokenizer as Ours

    row = Ours(Path(tokenizer)).row([Path(text)])
    return np.asarray(row.read(0, len(row))).tolist()


@pytest.mark.parametrize("content", ['{"txt": "a"}\n', "not json\n", '{"text": 3}\n', '["text"]\n'])
def test_a_line_that_holds_no_text_names_the_file_and_leaves_nothing(
    tokenizer: Path, tmp_path: Path, cache: Path, content: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "the cat"}\n' * 20 + content)
    with pytest.raises(DataError, match=r'bad\.jsonl cannot be tokenized .*JSON object with a "text"'):
        build(tokenizer, path)
    assert not [found for found in cache.iterdir() if found.suffix != ".lock"]


def test_a_tokenizer_that_is_missing_or_broken_says_what_is_needed(tmp_path: Path, text: Path) -> None:
    with pytest.raises(DataError, match=r"no such file .*give a tokenizer\.json"):
        build(tmp_path / "nowhere", text)
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    with pytest.raises(DataError, match=r"cannot read it"):
        build(broken, text)


def test_a_tokenizer_for_token_files_is_refused(tokenizer: Path, text: Path) -> None:
    data = {"files": [str(text)], "format": "tokens", "tokenizer": str(tokenizer), "sequenceLength": 8}
    model = {"hiddenSize": 32, "layers": 1, "heads": 4, "vocabularySize": 9}
    with pytest.raises(RecipeError, match=r"data\.tokenizer is .*it reads text files"):
        load_recipe("causal_lm", {"model": model, "data": data}, RecipeContext(device=torch.device("cpu"), seed=0))


def test_transformers_loads_the_exported_tokenizer_beside_the_weights(
    tokenizer: Path, text: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer, LlamaForCausalLM

    recipe = build(tokenizer, text)
    assert recipe.export is not None
    recipe.export(dict(recipe.build_model().state_dict()), tmp_path / "export")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "export")
    ids = loaded("the cat sat", add_special_tokens=False)["input_ids"]
    assert (
        ids
        == Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode("the cat sat", add_special_tokens=False).ids
    )
    model = LlamaForCausalLM.from_pretrained(tmp_path / "export")
    assert model(torch.tensor([ids])).logits.shape == (1, 3, loaded.vocab_size)
