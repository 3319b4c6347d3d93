"""Overrides → `RunConfig`: the only place that speaks to Hydra and OmegaConf.

Hydra composes the groups of `conf/`; the keys from the command line are set over the result before interpolations are
resolved, so that a choice of the user always wins. The plain tree is then checked against schema and rules, all faults
at once. After that a configuration is a frozen tree of dataclasses, and nobody sees OmegaConf again.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override as ParsedOverride
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llama_c4.config.conf_files import conf_dir
from llama_c4.config.errors import ConfigError
from llama_c4.config.fields import is_text_key, leaves
from llama_c4.config.overrides import Override, Request, fault_of_choice, read_overrides, sweep_fault
from llama_c4.config.schema import RunConfig
from llama_c4.config.validate import Tree, TreeCheck
from llama_c4.config.yaml_text import parse_tree, read_tree, write_tree

HYDRA_VERSION_BASE = "1.3"
# Settings in which a leading `~` means the home folder: the shell does not expand it behind `=`.
PATH_KEYS = ("data.cache_dir", "data.files", "data.validation_files", "data.tokenizer", "run.output_dir")


def compose_config(overrides: Sequence[str]) -> RunConfig:
    """The configuration of one run.

    Args:
        overrides: Choices of groups (`model=50m`) and values of keys (`optim.lr=1e-3`), as typed.
    Raises:
        ConfigError: With every fault: of the overrides, of the schema, of the rules.
    """
    request = read_overrides(overrides)
    faults = list(request.faults)
    faults += [
        f"{o.text}: Hydra's own settings have no effect on a single run; add -m, or leave it out" for o in request.hydra
    ]
    faults += filter(None, map(fault_of_choice, request.choices.values()))
    choices = [o.for_hydra for o in request.choices.values() if fault_of_choice(o) is None]
    values, more = _parse_values(request.values.values())
    return _check(tuple(choices), values, request, faults + more)


def defaults_of(choices: Sequence[str]) -> Tree:
    """The nested settings that choices of groups bring, resolved and unchecked; those without a value are left out.

    Args:
        choices: Such as `model=50m`; each must be one that the group has.
    """
    return copy.deepcopy(_composed(tuple(choices))[1])


def to_yaml(config: RunConfig) -> str:
    """The whole configuration, resolved; `load_config` reads back exactly the same."""
    return write_tree(dataclasses.asdict(cast("Any", config)))


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """A saved configuration (a file, or the run folder that holds config.yaml), with single keys changed.

    Raises:
        ConfigError: No such file, or any fault in it or in the overrides.
    """
    path = Path(path).expanduser()
    return _changed(read_tree(path / "config.yaml" if path.is_dir() else path), overrides)


def parse_config(text: str, overrides: Sequence[str] = (), *, source: Path) -> RunConfig:
    """The same from text, such as a checkpoint holds; errors name the file that it comes from.

    Raises:
        ConfigError: As `load_config`.
    """
    return _changed(parse_tree(text, source=source), overrides)


def _changed(saved: Tree, overrides: Sequence[str]) -> RunConfig:
    request = read_overrides(overrides)
    faults = list(request.faults)
    for choice in (*request.choices.values(), *request.hydra):
        faults.append(f"{choice.text}: a saved configuration takes values of keys alone; set the keys one by one")
    values, more = _parse_values(request.values.values())
    tree = copy.deepcopy(saved)
    for key, value in values.items():
        resolved, open_keys = _resolve(OmegaConf.create({"value": value}))
        faults += [f"{key}={request.values[key].value} has no value: {reason}" for reason in open_keys.values()]
        _set(tree, key, resolved.get("value"))
    _expand_home(tree)
    typed = _typed(request, values)
    unsure = {key for key in request.values if key not in values}
    return TreeCheck(tree, typed=typed, fallback=saved, faults=faults + more, unsure=unsure).finish()


def expand_sweep(overrides: Sequence[str]) -> list[list[str]]:
    """The jobs of a sweep: the product of all comma lists, `choice(…)`, `range(…)` and `glob(…)`, last varying fastest.

    Commas inside brackets or quotes do not sweep. Hydra's own settings belong to no job. Each override is in Hydra's
    grammar, the same text that Hydra's basic sweeper gives the job.
    Raises:
        ConfigError: An override that cannot be read, or a sweep that has no list of values.
    """
    request = read_overrides(overrides)
    faults: list[str] = list(request.faults)
    axes: list[list[str]] = []
    with initialize_config_dir(str(conf_dir()), version_base=HYDRA_VERSION_BASE):
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        for override in (*request.choices.values(), *request.values.values()):
            parsed = _parse(parser, override)
            axis = parsed if isinstance(parsed, str) else _axis(parsed, override)
            if isinstance(axis, str):
                faults.append(axis)
            else:
                axes.append(axis)
    if faults:
        raise ConfigError(*faults)
    return [list(job) for job in product(*axes)]


# --- Hydra's grammar --------------------------------------------------------------------------------------------------


def _parse(parser: OverridesParser, override: Override) -> ParsedOverride | str:
    """Hydra's reading of an override, or why there is none."""
    try:
        return parser.parse_overrides([override.for_hydra])[0]
    except (HydraException, ValueError, RecursionError) as error:
        return _unreadable(override, error)


def _unreadable(override: Override, error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if not line.startswith(("See ", "Error parsing"))]
    reason = (lines or [type(error).__name__])[0].split(" expecting ")[0][:200]  # without the parser's token names
    way = f"{override.key}='\"…\"' with both quotes" if is_text_key(override.key) else f"{override.key}=VALUE"
    return f"{override.text}: the value cannot be read ({reason}); type {way}"


def _axis(parsed: ParsedOverride, override: Override) -> list[str] | str:
    key = parsed.get_key_element()
    if not parsed.is_sweep_override():
        return [f"{key}={parsed.get_value_element_as_str()}"]
    if not parsed.is_discrete_sweep():
        return f"{override.text}: has no list of values; type them with commas: {override.key}=A,B"
    try:
        axis = [f"{key}={value}" for value in parsed.sweep_string_iterator()]
    except (HydraException, ValueError, TypeError) as error:
        return f"{override.text}: cannot be listed ({error}); type the values with commas: {override.key}=A,B"
    return axis or f"{override.text}: names no value; type one or more: {override.key}=A,B"


def _parse_values(overrides: Iterable[Override]) -> tuple[dict[str, Any], list[str]]:
    """Dotted key → typed value, and the faults of those that have none."""
    parser, values, faults = OverridesParser.create(), {}, []
    for override in overrides:
        parsed = _parse(parser, override)
        if isinstance(parsed, str):
            faults.append(parsed)
        elif parsed.is_sweep_override():
            faults.append(sweep_fault(override))
        else:
            try:
                OmegaConf.create({"value": parsed.value()})
            except (OmegaConfBaseException, ValueError, RecursionError) as error:
                faults.append(_unreadable(override, error))
            else:
                values[override.key] = parsed.value()
    return values, faults


# --- OmegaConf → plain tree -------------------------------------------------------------------------------------------


@lru_cache(maxsize=32)
def _composed(choices: tuple[str, ...]) -> tuple[DictConfig, Tree]:
    """The groups composed by Hydra: with open interpolations, and resolved. Kept for the next job; never changed."""
    try:
        with initialize_config_dir(str(conf_dir()), version_base=HYDRA_VERSION_BASE):
            config = compose("train", overrides=list(choices))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{' '.join(choices)}: cannot be composed from {conf_dir()}: {error}") from error
    OmegaConf.set_struct(config, False)
    return config, _resolve(config)[0]


def _check(choices: tuple[str, ...], values: dict[str, Any], request: Request, faults: list[str]) -> RunConfig:
    """Set the values over the composed groups, resolve, and check the plain tree; `faults` are listed with its own."""
    composed, fallback = _composed(choices)
    config = copy.deepcopy(composed)
    unsure = {key for key in request.values if key not in values} | _keys_of_missing_choices(request)
    for key, value in list(values.items()):
        try:
            OmegaConf.update(config, key, value, merge=False, force_add=True)
        except (OmegaConfBaseException, ValueError) as error:
            faults.append(_unreadable(request.values[key], error))
            unsure.add(key)
            del values[key]
    typed = _typed(request, values)
    tree, open_keys = _resolve(config)
    _expand_home(tree)
    for key, reason in open_keys.items():
        faults.append(f"{key}={typed[key]} has no value: {reason}" if key in typed else f"{key} has no value: {reason}")
    return TreeCheck(tree, typed=typed, fallback=fallback, faults=faults, unsure=unsure | set(open_keys)).finish()


def _typed(request: Request, values: Iterable[str]) -> dict[str, str]:
    return {key: request.values[key].value.strip() for key in values}


def _set(tree: Tree, key: str, value: Any) -> None:
    """Put a value at a dotted key; a place that holds no keys stays as it is, the check of shapes names it."""
    *path, name = key.split(".")
    for part in path:
        inner = tree.setdefault(part, {})
        if not isinstance(inner, dict):
            return
        tree = inner
    tree[name] = value


def _expand_home(tree: Tree) -> None:
    for group, name in (key.split(".") for key in PATH_KEYS):
        branch = tree.get(group)
        if isinstance(branch, dict) and isinstance(branch.get(name), str) and branch[name].startswith("~"):
            branch[name] = os.path.expanduser(branch[name])  # noqa: PTH111 - Path raises where there is no such user


def _keys_of_missing_choices(request: Request) -> set[str]:
    """The keys that a choice which does not exist would have set; nothing can be said about how they go together."""
    missing = [group for group, choice in request.choices.items() if fault_of_choice(choice) is not None]
    homes = tuple("data." if group == "loader" else "" if group == "experiment" else f"{group}." for group in missing)
    return {key for key in leaves() if homes and key.startswith(homes)}


def _resolve(config: DictConfig, prefix: str = "") -> tuple[Tree, dict[str, str]]:
    """The plain tree of a composed configuration without `preset`, and why keys that are not in it have no value."""
    tree: Tree = {}
    open_keys: dict[str, str] = {}
    for name in map(str, config):
        key = f"{prefix}{name}"
        if key == "preset":
            continue
        try:
            if OmegaConf.is_missing(config, name):
                open_keys[key] = f"the YAML leaves it open (???); set {key}=VALUE"
                continue
            value = config[name]
            if isinstance(value, DictConfig):
                tree[str(name)], inner = _resolve(value, f"{key}.")
                open_keys |= inner
            else:
                tree[str(name)] = (
                    OmegaConf.to_container(value, resolve=True) if isinstance(value, ListConfig) else value
                )
        except OmegaConfBaseException as error:
            open_keys[key] = _why_open(key, str(error).splitlines()[0])
    return tree, open_keys


def _why_open(key: str, reason: str) -> str:
    if "preset." in reason:
        return f"the chosen model brings no recipe of its own; choose model=SIZE, or set {key}=VALUE"
    return f"{reason}; set {key}=VALUE"
