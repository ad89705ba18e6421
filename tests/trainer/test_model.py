"""Our Llama is transformers' Llama: same names, same outputs, and its export loads there with strict keys."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ctj_trainer.recipe import DataError, Recipe, RecipeContext, RecipeError, load_recipe
from ctj_trainer.recipes.llama import Llama
from ctj_trainer.recipes.weights import config_document, read_shape

CONTEXT = RecipeContext(device=torch.device("cpu"), seed=0)
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped keys and values": {"num_key_value_heads": 2},
    "one key and value head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "own head size": {"head_dim": 16},
    "rope base": {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
    "rope linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "rope llama3": {"rope_parameters": LLAMA3_ROPE},
    "epsilon": {"rms_norm_eps": 1e-2},
}


def from_folder(folder: Path) -> Recipe:
    data = {"builtin": "python-stdlib", "sequenceLength": 64}
    return load_recipe("causal_lm", {"model": {"path": str(folder)}, "data": data}, CONTEXT)


def saved(folder: Path, *, shard_size: str = "5GB", **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(1)
    theirs = LlamaForCausalLM(LlamaConfig(**SIZES, **changes))
    for parameter in theirs.parameters():  # norms are 1 at first: a norm applied twice would not show
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.15)
    theirs.save_pretrained(folder, max_shard_size=shard_size)
    return theirs


@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_equal_transformers(tmp_path: Path, variant: str) -> None:
    theirs = saved(tmp_path, **VARIANTS[variant])
    ours = from_folder(tmp_path).build_model()
    tokens = torch.randint(0, 256, (2, 96), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(ours(tokens), expected, rtol=1e-5, atol=1e-5)
    assert expected.std() > 0.5


def test_gradients_equal_transformers(tmp_path: Path) -> None:
    theirs = saved(tmp_path, num_key_value_heads=2)
    recipe = from_folder(tmp_path)
    ours = recipe.build_model()
    tokens = torch.randint(0, 256, (2, 65), generator=torch.Generator().manual_seed(0))
    total, count = recipe.loss(ours, {"tokens": tokens})
    loss = total / count
    expected = theirs(tokens, labels=tokens).loss
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    expected.backward()
    wanted = {name: p.grad for name, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_export_loads_in_transformers_with_strict_keys(tmp_path: Path, variant: str) -> None:
    theirs = saved(tmp_path / "in", **VARIANTS[variant])
    recipe = from_folder(tmp_path / "in")
    weights = {name: p.detach() for name, p in recipe.build_model().named_parameters()}
    assert recipe.export is not None
    recipe.export(weights, tmp_path / "out")
    back, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    wanted = theirs.state_dict()
    for name, tensor in back.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name
    tokens = torch.arange(64).reshape(1, 64)
    with torch.no_grad():
        torch.testing.assert_close(back(tokens).logits, theirs(tokens).logits, rtol=1e-6, atol=1e-6)


def test_names_are_transformers_names_from_scratch() -> None:
    model = {"hiddenSize": 48, "layers": 2, "heads": 4, "keyValueHeads": 2, "intermediateSize": 96}
    config = {"model": model, "data": {"builtin": "python-stdlib", "sequenceLength": 64}}
    ours = load_recipe("causal_lm", config, CONTEXT).build_model()
    theirs = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2))
    shapes = {name: p.shape for name, p in theirs.named_parameters()}
    assert {name: p.shape for name, p in ours.named_parameters()} == shapes
    assert list(ours.state_dict()) == list(theirs.state_dict())
    deviation = ours.get_parameter("model.layers.0.mlp.up_proj.weight").std()
    assert deviation.item() == pytest.approx(0.02, rel=0.1)


def test_sharded_weights_are_read(tmp_path: Path) -> None:
    theirs = saved(tmp_path, shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    ours = from_folder(tmp_path).build_model()
    for name, parameter in theirs.named_parameters():
        assert torch.equal(ours.get_parameter(name), parameter), name


def test_the_model_on_meta_costs_no_memory_and_stays_tied() -> None:
    model = {"hiddenSize": 8192, "layers": 80, "heads": 64, "vocabularySize": 128_000, "tieEmbeddings": True}
    config = {"model": model, "data": {"builtin": "python-stdlib", "sequenceLength": 64}}
    with torch.device("meta"):
        ours = load_recipe("causal_lm", config, CONTEXT).build_model()
    assert isinstance(ours, Llama)
    assert {p.device.type for p in ours.parameters()} == {"meta"}
    assert sum(p.numel() for p in ours.parameters()) > 60e9
    assert ours.lm_head.weight is ours.model.embed_tokens.weight


def test_tied_weights_stay_one_tensor_after_loading(tmp_path: Path) -> None:
    saved(tmp_path, tie_word_embeddings=True)
    ours = from_folder(tmp_path).build_model()
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    assert sum(p.numel() for p in ours.parameters()) == sum(
        t.numel() for t in load_file(tmp_path / "model.safetensors").values()
    )


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_config_that_ties_two_different_tensors_names_both_and_the_flag(tmp_path: Path) -> None:
    """huggingface/accelerate#4171, third variant: it was a bare KeyError."""
    saved(tmp_path)
    edit(tmp_path / "config.json", tie_word_embeddings=True)
    with pytest.raises(RecipeError) as caught:
        from_folder(tmp_path).build_model()
    for part in ("lm_head.weight", "model.embed_tokens.weight", "tie_word_embeddings"):
        assert part in str(caught.value)


def test_every_wrong_tensor_is_named_at_once(tmp_path: Path) -> None:
    saved(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    tensors["model.norm.weight"] = torch.ones(3)
    tensors["model.extra"] = torch.ones(3)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(RecipeError) as caught:
        from_folder(tmp_path).build_model()
    message = str(caught.value)
    assert "model.extra is in the file, but no parameter of the model" in message
    assert "model.norm.weight is [3] in the file; config.json makes it [48]" in message
    assert "lm_head.weight is not in the file" in message
    assert "set tie_word_embeddings to true" in message


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"attention_bias": True}, "attention_bias is True; this Llama supports False"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; this Llama supports 'silu'"),
        ({"model_type": "mistral"}, "model_type is 'mistral'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type is 'yarn'; supported: default"),
    ],
)
def test_a_model_that_ours_cannot_be_is_refused(tmp_path: Path, change: dict[str, Any], part: str) -> None:
    saved(tmp_path)
    edit(tmp_path / "config.json", **change)
    with pytest.raises(RecipeError, match=r"module:function") as caught:
        from_folder(tmp_path)
    assert part in str(caught.value)


def test_missing_weights_name_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such folder"):
        from_folder(tmp_path / "nowhere")
    saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"model\.safetensors is missing"):
        from_folder(tmp_path).build_model()


def test_the_config_document_survives_its_own_reading(tmp_path: Path) -> None:
    saved(tmp_path, rope_parameters=LLAMA3_ROPE, num_key_value_heads=2)
    shape = read_shape(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_document(shape)))
    assert read_shape(tmp_path) == shape
