"""Where the YAML files lie and which choices a group offers."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import yaml

from llama_c4.config.errors import ConfigError

SHAPE = ("num_layers", "hidden_size", "num_heads", "intermediate_size")


@lru_cache(maxsize=1)
def conf_dir() -> Path:
    """The folder of the YAML files: inside an installed package, or `conf/` of the checkout.

    Raises:
        ConfigError: Neither is there.
    """
    package = Path(__file__).resolve().parents[1]
    places = [package / "conf", package.parent / "conf"]
    for place in places:
        if (place / "train.yaml").is_file():
            return place
    raise ConfigError(
        f"no configuration files: neither {places[0]} nor {places[1]} has a train.yaml; install the project again"
    )


@lru_cache(maxsize=1)
def group_choices() -> dict[str, tuple[str, ...]]:
    """Every group with its choices; a file whose name begins with `_` is part of others and no choice by itself."""
    folders = sorted(folder for folder in conf_dir().iterdir() if folder.is_dir())
    return {f.name: tuple(sorted((p.stem for p in f.glob("[!_]*.yaml")), key=_natural)) for f in folders}


def _natural(name: str) -> tuple[int, str]:
    """Order in which `50m` stands before `250m`."""
    digits = re.match(r"\d+", name)
    return (int(digits[0]) if digits else 10**9, name)


@lru_cache(maxsize=1)
def model_names() -> dict[tuple[int, ...], str]:
    """Shape (layers, hidden, heads, intermediate) of every published size with its name."""
    names: dict[tuple[int, ...], str] = {}
    for choice in group_choices()["model"]:
        text = (conf_dir() / "model" / f"{choice}.yaml").read_text(encoding="utf-8")
        model = cast("dict[str, Any]", yaml.safe_load(text)).get("model", {})
        if all(field in model for field in SHAPE):
            names[tuple(model[field] for field in SHAPE)] = choice
    return names
