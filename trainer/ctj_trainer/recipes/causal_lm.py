"""The built-in recipe: next-token prediction with a small Llama over text or token files."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ctj_trainer.recipe import Batch, DataError, Recipe, RecipeContext, RecipeError
from ctj_trainer.recipes.causal_lm_config import CausalLmConfig, DataConfig, ModelConfig, parse
from ctj_trainer.recipes.llama import Llama, LlamaShape
from ctj_trainer.recipes.tokenizer import Tokenizer
from ctj_trainer.recipes.tokens import BYTE_VOCABULARY, TokenRow, TokenSamples, find_files, standard_library
from ctj_trainer.recipes.weights import export, load_into, read_shape


def build(config: dict[str, Any], context: RecipeContext) -> Recipe:
    """Build the recipe; reads no weights and no data yet, only checks that they are there.

    Raises:
        RecipeError: the config is wrong; every problem is named.
        DataError: weights or data are missing.
    """
    del context  # neither the model nor the data depends on the device or the seed
    checked = parse(config)
    tokenizer = Tokenizer(Path(checked.data.tokenizer)) if checked.data.tokenizer else None
    shape = _shape(checked, tokenizer)
    _check_vocabulary(shape, tokenizer, checked)
    samples = TokenSamples(
        _row(checked.data, tokenizer),
        sequence_length=checked.data.sequence_length,
        vocabulary_size=shape.vocabulary_size,
    )
    return Recipe(
        build_model=partial(build_model, shape, Path(checked.model.path) if checked.model.path else None),
        samples=samples,
        loss=loss,
        count_tokens=count_tokens,
        export=partial(_export, shape, tokenizer),
        blocks=llama_blocks,
    )


def build_model(shape: LlamaShape, weights: Path | None) -> Llama:
    """Build on the default device: under `meta` empty, else from weights or from the current RNG."""
    model = Llama(shape)
    if torch.get_default_device().type == "meta":
        return model
    if weights is None:
        model.initialise()
    else:
        load_into(model, weights)
    return model


def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Sum of the tokens' cross entropy in fp32, and their number."""
    tokens = batch["tokens"]
    logits = model(tokens[:, :-1])
    targets = tokens[:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
    return total, torch.tensor(targets.numel(), device=tokens.device)


def count_tokens(batch: Batch) -> int:
    """Every token but the first of each sample is predicted."""
    return batch["tokens"][:, 1:].numel()


def llama_blocks(model: nn.Module) -> list[nn.Module]:
    """The layers."""
    assert isinstance(model, Llama)
    return list(model.model.layers)


def _export(shape: LlamaShape, tokenizer: Tokenizer | None, weights: dict[str, Tensor], folder: Path) -> None:
    export(shape, weights, folder)
    if tokenizer is not None:
        tokenizer.copy_to(folder)


def _check_vocabulary(shape: LlamaShape, tokenizer: Tokenizer | None, config: CausalLmConfig) -> None:
    if tokenizer is None or tokenizer.size <= shape.vocabulary_size:
        return
    where = "config.json of model.path has vocab_size" if config.model.path else "model.vocabularySize is"
    remedy = (
        "use the tokenizer of this model" if config.model.path else f"use {tokenizer.size} or more, or leave it out"
    )
    raise RecipeError(
        f"spec.recipe.config: {where} {shape.vocabulary_size}; {tokenizer.file} has {tokenizer.size} tokens; {remedy}"
    )


def _shape(config: CausalLmConfig, tokenizer: Tokenizer | None) -> LlamaShape:
    if config.model.path is not None:
        if not Path(config.model.path).is_dir():
            raise DataError(
                f"config.model.path is {config.model.path!r}: no such folder (working folder: {Path.cwd()}); "
                "it must hold config.json and model.safetensors"
            )
        return read_shape(Path(config.model.path))
    default_vocabulary = tokenizer.size if tokenizer is not None else BYTE_VOCABULARY
    return _scratch_shape(config.model, config.data, default_vocabulary)


def _scratch_shape(model: ModelConfig, data: DataConfig, default_vocabulary: int) -> LlamaShape:
    assert model.hidden_size is not None  # parse() refuses a config with neither path nor sizes
    assert model.layers is not None
    assert model.heads is not None
    return LlamaShape(
        vocabulary_size=model.vocabulary_size or default_vocabulary,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size or _default_intermediate(model.hidden_size),
        layers=model.layers,
        heads=model.heads,
        key_value_heads=model.key_value_heads or model.heads,
        head_size=model.hidden_size // model.heads,
        tie_embeddings=model.tie_embeddings,
        max_positions=max(data.sequence_length, 2048),
        rope_theta=model.rope_theta,
    )


def _default_intermediate(hidden_size: int) -> int:
    """Eight thirds, rounded up to a multiple of 32: Llama's ratio."""
    return -(-hidden_size * 8 // (3 * 32)) * 32


def _row(data: DataConfig, tokenizer: Tokenizer | None) -> TokenRow:
    if data.files is None:
        return standard_library()
    if tokenizer is not None:
        return tokenizer.row(find_files(data.files))
    return TokenRow(find_files(data.files), dtype="uint8" if data.format == "text" else data.dtype)
