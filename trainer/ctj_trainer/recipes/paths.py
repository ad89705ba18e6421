"""Which files does a recipe's config name, and are they here? `python -m ctj_trainer.recipes.paths` answers before
anything starts, and so without torch: config on stdin, problems on stdout.
"""

import glob
import json
import sys
from pathlib import Path
from typing import Any

_CONFIG = "spec.recipe.config"


def matching(pattern: str) -> list[Path]:
    """Return the files that a pattern of `data.files` stands for, sorted, so that every process sees the same row."""
    return sorted(path for path in map(Path, glob.glob(pattern, recursive=True)) if path.is_file())


def missing_paths(recipe: str, config: dict[str, Any]) -> list[dict[str, str]]:
    """Return field, value and remedy of everything that is not here; what is wrong otherwise the recipe says itself."""
    if recipe != "causal_lm":  # the config of somebody's own recipe is theirs to read
        return []
    data, model = _part(config, "data"), _part(config, "model")
    return [
        *_missing_files(data.get("files")),
        *_missing_tokenizer(data.get("tokenizer")),
        *_missing_model(model.get("path")),
    ]


def _part(config: Any, name: str) -> dict[str, Any]:
    part = config.get(name) if isinstance(config, dict) else None
    return part if isinstance(part, dict) else {}


def _missing_files(patterns: Any) -> list[dict[str, str]]:
    return [
        {
            "what": f"{_CONFIG}.data.files[{index}] is {pattern!r}: no file matches it (working folder: {Path.cwd()})",
            "remedy": "correct the path, or start from the folder it is relative to",
        }
        for index, pattern in enumerate(patterns if isinstance(patterns, list) else [])
        if isinstance(pattern, str) and not matching(pattern)
    ]


def _missing_tokenizer(path: Any) -> list[dict[str, str]]:
    if not isinstance(path, str) or Path(path).is_file() or (Path(path) / "tokenizer.json").is_file():
        return []
    return [
        {
            "what": f"{_CONFIG}.data.tokenizer is {path!r}: neither a file nor a folder with tokenizer.json",
            "remedy": "correct the path, or start from the folder it is relative to",
        }
    ]


def _missing_model(path: Any) -> list[dict[str, str]]:
    if not isinstance(path, str) or (Path(path) / "config.json").is_file():
        return []
    return [
        {
            "what": f"{_CONFIG}.model.path is {path!r}: there is no {Path(path) / 'config.json'}",
            "remedy": "name a folder as transformers writes it, or give hiddenSize, layers and heads instead",
        }
    ]


def main() -> None:
    """Answer one question."""
    asked = json.load(sys.stdin)
    print(json.dumps(missing_paths(asked["name"], asked["config"])))


if __name__ == "__main__":
    main()
