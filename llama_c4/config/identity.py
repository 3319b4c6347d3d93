"""What a configuration is the same as: recipe identity, differences by kind of setting, and the name of the run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from pathlib import Path
from typing import Any, Literal, cast

from llama_c4.config.conf_files import SHAPE, model_names
from llama_c4.config.dotted import flat
from llama_c4.config.fields import leaf_of
from llama_c4.config.schema import AccumAdamWConfig, LlamaConfig, RunConfig
from llama_c4.config.validate import show

Kind = Literal["recipe", "machine", "observation"]


def settings_of_kind(config: RunConfig, kind: Kind) -> dict[str, Any]:
    """Dotted key → value of all settings of one kind, sorted by key; of a variant, only its own."""
    found: dict[str, Any] = {}
    for group, branch in dataclasses.asdict(cast("Any", config)).items():
        for key, value in flat(branch, f"{group}.").items():
            leaf = leaf_of(key, branch.get("name"))
            if leaf is not None and leaf.kind == kind:
                found[key] = list(value) if isinstance(value, tuple) else value
    return dict(sorted(found.items()))


def recipe_identity(config: RunConfig) -> str:
    """SHA-256 (hex) of the recipe settings as canonical JSON: sorted keys, shortest exact decimals.

    Neither machine nor observation settings nor the order of keys enter, nor do keys of variants that were not chosen.
    """
    text = json.dumps(settings_of_kind(config, "recipe"), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def recipe_differences(a: RunConfig, b: RunConfig) -> list[str]:
    """The recipe settings in which two configurations differ, as `optim.lr: 0.001 → 0.003`."""
    return _differences(a, b, "recipe")


def machine_differences(a: RunConfig, b: RunConfig) -> list[str]:
    """The machine settings in which two configurations differ, as `runtime.threads: null → 8`."""
    return _differences(a, b, "machine")


def run_label(config: RunConfig) -> str:
    """A readable name from the recipe, such as `20m-adamw-lr0.0056-b2_0.98-wd0.1-s42-1a2b3c4d`.

    It ends in the first eight digits of the recipe identity, so that other recipes get other names and the same command
    finds its run again. Letters, digits and `-._` only.
    """
    optim, seed = config.optim, config.runtime.seed
    window = f"-w{optim.window}" if isinstance(optim, AccumAdamWConfig) else ""
    words = f"{optim.name}{window}-lr{optim.lr:.6g}-b2_{optim.beta2:.6g}-wd{optim.weight_decay:.6g}-s{seed}"
    label = f"{_size(config.model)}-{words}-{recipe_identity(config)[:8]}"
    return re.sub(r"[^A-Za-z0-9._-]", "", label)


def run_folder(config: RunConfig) -> Path:
    """Where the run lives: `run.output_dir`, and in it `run.name` or, where that is null, the run's label."""
    return Path(config.run.output_dir) / (config.run.name or run_label(config))


def _size(model: LlamaConfig) -> str:
    shape = tuple(getattr(model, field) for field in SHAPE)
    return model_names().get(shape, f"{model.name}-L{model.num_layers}-C{model.hidden_size}")


def _differences(a: RunConfig, b: RunConfig, kind: Kind) -> list[str]:
    old, new = settings_of_kind(a, kind), settings_of_kind(b, kind)
    absent = object()
    keys = [key for key in sorted({*old, *new}) if _differ(old.get(key, absent), new.get(key, absent))]
    return [f"{key}: {_shown(old, key)} → {_shown(new, key)}" for key in keys]


def _differ(x: Any, y: Any) -> bool:
    # True equals 1 for Python, and `compile: true` is not `compile: 1` for a reader.
    return type(x) is not type(y) or x != y


def _shown(settings: dict[str, Any], key: str) -> str:
    return show(settings[key]) if key in settings else "absent"
