"""The config of `causal_lm`: its fields, and one message that names everything wrong with it."""

import difflib
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from ctj_api.model import Contract
from ctj_trainer.recipe import RecipeError

_PREFIX = "spec.recipe.config"


class ModelConfig(Contract):
    """Either `path`, or at least hiddenSize, layers and heads."""

    path: Annotated[str | None, Field(min_length=1, description="Folder with config.json and model.safetensors.")] = (
        None
    )
    hidden_size: Annotated[int | None, Field(ge=2, le=65_536)] = None
    layers: Annotated[int | None, Field(ge=1, le=1024)] = None
    heads: Annotated[int | None, Field(ge=1, le=1024)] = None
    key_value_heads: Annotated[int | None, Field(ge=1, le=1024, description="Default: heads.")] = None
    intermediate_size: Annotated[int | None, Field(ge=1, le=1_000_000, description="Default: 8/3 of hiddenSize.")] = (
        None
    )
    vocabulary_size: Annotated[
        int | None, Field(ge=2, le=10_000_000, description="Default: the tokenizer's size; without one 256, bytes.")
    ] = None
    tie_embeddings: bool = False
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0


class DataConfig(Contract):
    """Either `builtin` or `files`."""

    builtin: Literal["python-stdlib"] | None = None
    files: Annotated[list[str] | None, Field(min_length=1, description="Patterns; sorted, read as one row.")] = None
    format: Annotated[Literal["text", "tokens"], Field(description="text: UTF-8 bytes; tokens: binary integers.")] = (
        "text"
    )
    dtype: Annotated[Literal["uint16", "uint32"], Field(description="Of token files.")] = "uint16"
    tokenizer: Annotated[
        str | None, Field(min_length=1, description="tokenizer.json or its folder; text files become its tokens.")
    ] = None
    sequence_length: Annotated[int, Field(ge=1, le=10_000_000, description="Tokens of a sample.")]


class CausalLmConfig(Contract):
    """What a job may say to `causal_lm`."""

    model: ModelConfig
    data: DataConfig


def parse(config: dict[str, Any]) -> CausalLmConfig:
    """Check the config.

    Raises:
        RecipeError: with every problem, one line each.
    """
    try:
        checked = CausalLmConfig.model_validate(config, strict=True, by_name=False)
    except ValidationError as error:
        raise RecipeError("\n".join(_line(problem) for problem in error.errors())) from None
    problems = [*_model_problems(checked.model), *_data_problems(checked.data, checked.model)]
    if problems:
        raise RecipeError("\n".join(problems))
    return checked


def _model_problems(model: ModelConfig) -> list[str]:
    path = f"{_PREFIX}.model"
    needed = {"hiddenSize": model.hidden_size, "layers": model.layers, "heads": model.heads}
    given = [_camel(name) for name in model.model_fields_set - {"path"}]
    if model.path is not None:
        return [
            f"{path}: path and {', '.join(sorted(given))} are both given; the folder's config.json decides; remove them"
        ] * bool(given)
    missing = [name for name, value in needed.items() if value is None]
    if missing:
        return [
            f"{path}: {', '.join(missing)} missing; give hiddenSize, layers and heads, or path of a folder with weights"
        ]
    assert model.hidden_size is not None
    assert model.heads is not None
    problems = []
    if model.hidden_size % (2 * model.heads):
        lower = model.hidden_size // (2 * model.heads) * 2 * model.heads
        works = ", ".join(str(v) for v in (lower, lower + 2 * model.heads) if v)
        problems.append(
            f"{path}.hiddenSize is {model.hidden_size}; it must be a multiple of 2 * heads = {2 * model.heads}; "
            f"for example {works}"
        )
    if model.key_value_heads and model.heads % model.key_value_heads:
        divisors = [n for n in range(1, model.heads + 1) if model.heads % n == 0]
        problems.append(
            f"{path}.keyValueHeads is {model.key_value_heads}; it must divide heads = {model.heads}; "
            f"one of {', '.join(map(str, divisors))}"
        )
    return problems


def _data_problems(data: DataConfig, model: ModelConfig) -> list[str]:
    path = f"{_PREFIX}.data"
    problems = []
    if (data.builtin is None) == (data.files is None):
        problems.append(
            f"{path}: {'neither' if data.files is None else 'both'} builtin and files given; "
            "give one: `builtin: python-stdlib`, or `files: [patterns]`"
        )
    if data.tokenizer is not None and (data.files is None or data.format == "tokens"):
        problems.append(
            f"{path}.tokenizer is {data.tokenizer!r}; it reads text files; give files and format: text, or remove it"
        )
    if data.files is not None and data.format == "tokens" and model.path is None and model.vocabulary_size is None:
        problems.append(
            f"{_PREFIX}.model.vocabularySize is missing; token files need it; set it to your tokenizer's size"
        )
    return problems


def _line(problem: Any) -> str:
    """One pydantic problem as path, value, rule, remedy."""
    *parents, name = [str(part) for part in problem["loc"]]
    path = ".".join([_PREFIX, *parents, name])
    if problem["type"] == "extra_forbidden":
        allowed = _fields_below(parents)
        near = difflib.get_close_matches(name, allowed, n=1)
        hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(allowed)}"
        return f"{path} is unknown; {hint}"
    if problem["type"] == "missing":
        return f"{path} is missing; add it"
    return f"{path} is {problem['input']!r}; {problem['msg'][0].lower()}{problem['msg'][1:]}"


def _fields_below(parents: list[str]) -> list[str]:
    models: dict[str, type[Contract]] = {"": CausalLmConfig, "model": ModelConfig, "data": DataConfig}
    model = models[parents[0] if parents else ""]
    return [field.alias or name for name, field in model.model_fields.items()]


def _camel(name: str) -> str:
    return ModelConfig.model_fields[name].alias or name
