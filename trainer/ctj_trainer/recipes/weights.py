"""A Llama's folder as transformers writes it, read and written: `config.json`, `model.safetensors` or its shards."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ctj_trainer.recipe import DataError, RecipeError
from ctj_trainer.recipes.llama import Llama, LlamaShape

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
ROPE_TYPES = ("default", "linear", "llama3")
# Settings of transformers' Llama that change the outputs and that our Llama does not have.
_UNSUPPORTED = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "attention_dropout": 0.0}


def read_shape(folder: Path) -> LlamaShape:
    """Read `config.json`.

    Raises:
        DataError: the folder or file is missing.
        RecipeError: it describes a model that ours cannot be.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise DataError(f"config.model.path is {str(folder)!r}: {path} cannot be read ({error.strerror})") from error
    _refuse_unsupported(config, path)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    rope = config.get("rope_parameters") or {}
    return LlamaShape(
        vocabulary_size=config["vocab_size"],
        hidden_size=hidden,
        intermediate_size=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        key_value_heads=config.get("num_key_value_heads") or heads,
        head_size=config.get("head_dim") or hidden // heads,
        tie_embeddings=config.get("tie_word_embeddings", False),
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
        max_positions=config.get("max_position_embeddings", 2048),
        rope_theta=rope.get("rope_theta") or config.get("rope_theta") or 10_000.0,
        rope_scaling=_rope_scaling(rope or config.get("rope_scaling") or {}),
        initial_deviation=config.get("initializer_range", 0.02),
    )


def _refuse_unsupported(config: dict[str, Any], path: Path) -> None:
    problems = [
        f"{path}: {key} is {config[key]!r}; this Llama supports {allowed!r}"
        for key, allowed in _UNSUPPORTED.items()
        if config.get(key, allowed) != allowed
    ]
    if config.get("model_type", "llama") != "llama":
        problems.append(f"{path}: model_type is {config['model_type']!r}; causal_lm reads 'llama'")
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ROPE_TYPES:
        problems.append(f"{path}: rope_type is {kind!r}; supported: {', '.join(ROPE_TYPES)}")
    if problems:
        raise RecipeError("\n".join([*problems, "use a recipe of your own (module:function) for such a model"]))


def _rope_scaling(parameters: dict[str, Any]) -> dict[str, Any] | None:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    return None if kind == "default" else {**parameters, "rope_type": kind}


def config_document(shape: LlamaShape) -> dict[str, Any]:
    """Describe the model as transformers' `config.json`."""
    rope = {"rope_type": "default", "rope_theta": shape.rope_theta}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_value_heads,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_epsilon,
        "initializer_range": shape.initial_deviation,
        "tie_word_embeddings": shape.tie_embeddings,
        "rope_parameters": {**rope, **(shape.rope_scaling or {})},
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "float32",
    }


def export(shape: LlamaShape, weights: dict[str, Tensor], folder: Path) -> None:
    """Write a folder that `transformers.LlamaForCausalLM.from_pretrained` loads with strict keys."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_document(shape), indent=2) + "\n")
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    if shape.tie_embeddings:
        contiguous.pop(OUTPUT, None)  # one tensor, one name: safetensors refuses to store it twice
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def load_into(model: Llama, folder: Path) -> None:
    """Copy the folder's weights into the model, tensor by tensor, with strict names and shapes.

    Raises:
        DataError: no weights there.
        RecipeError: names or shapes differ from what `config.json` says, or tied weights are two different tensors.
    """
    wanted = dict(model.named_parameters())
    missing, problems, tied_copies = set(wanted), [], {}
    for name, tensor in _tensors(folder):
        if name == OUTPUT and model.shape.tie_embeddings:
            tied_copies[name] = tensor
        elif name not in wanted:
            problems.append(f"{name} is in the file, but no parameter of the model")
        elif tensor.shape != wanted[name].shape:
            problems.append(
                f"{name} is {list(tensor.shape)} in the file; config.json makes it {list(wanted[name].shape)}"
            )
        else:
            wanted[name].copy_(tensor)
            missing.discard(name)
    problems += [f"{name} is not in the file" for name in sorted(missing)]
    if OUTPUT in missing and not model.shape.tie_embeddings:
        problems.append(f"if {OUTPUT} is {EMBEDDING}, set tie_word_embeddings to true in config.json")
    if tied_copies and not torch.equal(tied_copies[OUTPUT].to(wanted[EMBEDDING]), wanted[EMBEDDING]):
        problems.append(
            f"config.json says tie_word_embeddings, but {OUTPUT} and {EMBEDDING} are two different tensors; "
            "set tie_word_embeddings to false to train both, or remove one of them from the file"
        )
    if problems:
        raise RecipeError("\n".join(f"config.model.path is {str(folder)!r}: {problem}" for problem in problems))


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Read one tensor at a time: a large model never lies in memory twice."""
    for path in _weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # safe_open is not a mapping
                yield name, file.get_tensor(name)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files = [folder / name for name in names]
    else:
        files = [folder / "model.safetensors"]
    absent = [path for path in files if not path.exists()]
    if absent:
        raise DataError(
            f"config.model.path is {str(folder)!r}: {', '.join(str(path) for path in absent)} is missing; "
            "needed: model.safetensors, or model.safetensors.index.json with all its shards"
        )
    return files
