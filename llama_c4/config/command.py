"""A configuration as a short list of overrides that composes to it again."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, cast

from llama_c4.config.compose import compose_config, defaults_of
from llama_c4.config.conf_files import SHAPE, group_choices, model_names
from llama_c4.config.dotted import flat
from llama_c4.config.errors import ConfigError
from llama_c4.config.schema import RunConfig

_PLAIN = re.compile(r"[A-Za-z_./][\w./:@<>|-]*")
_FOLDER_KEYS = "run."


def overrides_of(config: RunConfig) -> list[str]:
    """Overrides that compose to a configuration, run folder and name apart: choices of groups, then what differs.

    Returns:
        Such as `["model=50m", "optim=adamw", …, "optim.lr=0.002"]`, to be quoted for a shell.
    Raises:
        ConfigError: The overrides would not compose to the same; a text of the configuration cannot be typed.
    """
    choices = _choices(config)
    usual, wanted = flat(defaults_of(choices)), flat(dataclasses.asdict(cast("Any", config)))
    changed = [key for key, value in wanted.items() if key not in usual or not _is_same(usual[key], value)]
    overrides = [*choices, *(override(key, wanted[key]) for key in changed if not key.startswith(_FOLDER_KEYS))]
    composed = flat(dataclasses.asdict(cast("Any", compose_config(overrides))))
    lost = [key for key, value in wanted.items() if not key.startswith(_FOLDER_KEYS) and composed.get(key) != value]
    if lost:
        raise ConfigError(f"{', '.join(lost)}: cannot be typed as an override; take the config.yaml of the run")
    return overrides


def override(key: str, value: Any) -> str:
    """One override of a key as Hydra reads it; a shell needs it quoted."""
    return f"{key}={_typed(value)}"


def _choices(config: RunConfig) -> list[str]:
    """The choice of each group that is nearest by name: the size of the model, the variant of the others."""
    shape = tuple(getattr(config.model, field) for field in SHAPE)
    wanted = {
        "model": model_names().get(shape, "llama"),
        "optim": config.optim.name,
        "lr_schedule": config.lr_schedule.name,
        "data": config.data.name,
        "loader": config.data.loader,
        "topology": config.topology.name,
    }
    return [f"{group}={choice}" for group, choice in wanted.items() if choice in group_choices()[group]]


def _is_same(a: Any, b: Any) -> bool:
    """Whether YAML's value is the schema's: 20 is 20.0 and a list is a tuple, but true is not 1."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return list(a) == list(b)
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _typed(value: Any) -> str:
    """A value in Hydra's grammar of overrides."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{','.join(_typed(item) for item in value)}]"
    if isinstance(value, str):
        is_plain = _PLAIN.fullmatch(value) and value.lower() not in ("null", "true", "false", "nan", "inf")
        return value if is_plain else "'" + value.replace("'", "\\'") + "'"
    return repr(value)
