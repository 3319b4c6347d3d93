"""What a state belongs to, and whether a run may continue from it. Pure: no torch, no files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from llama_c4.config.errors import CheckpointError
from llama_c4.config.validate import show

BUDGET_KEYS = ("training.tokens_per_parameter", "training.total_tokens")
"""The settings of the recipe that `training.extend` may change."""


@dataclass(frozen=True, kw_only=True)
class StateHeader:
    """What a state belongs to. Every value is plain JSON.

    Attributes:
        recipe_identity: SHA-256 over the recipe settings, hex.
        recipe: Dotted key → value of every recipe setting.
        machine: Dotted key → value of every machine setting.
        config: The resolved configuration, YAML that is loadable on its own.
        cache_identity: Identity of the token cache.
        loader: Which loader with what decides its order, in words, as in "v2, groups of 2 shards".
        precision: The arithmetic in use: float32, bfloat16 or float64 (never `auto`).
        total_targets: Prediction targets of the whole plan.
        code_version: Version of llama_c4, with the commit where it is known.
    """

    recipe_identity: str
    recipe: Mapping[str, Any]
    machine: Mapping[str, Any]
    config: str
    cache_identity: str
    loader: str
    precision: str
    total_targets: int
    code_version: str

    def to_json(self) -> dict[str, Any]:
        """The header as plain JSON values; tuples become lists."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], *, file: str) -> StateHeader:
        """Read a header from a file's index.

        Raises:
            CheckpointError: A field is missing or unknown.
        """
        expected, found = {field.name for field in dataclasses.fields(cls)}, set(value)
        if expected != found:
            raise CheckpointError(f"{file}: its header has the fields {sorted(found)} where {sorted(expected)} belong")
        return cls(**value)


@dataclass(frozen=True, kw_only=True, order=True)
class Position:
    """How far a state is; positions of one run are ordered by this alone.

    Attributes:
        update: Updates finished.
        sequences: Sequences consumed, those of the unfinished update among them.
        micro_step: Micro-steps of the unfinished update; their number depends on the micro-batch size, `sequences` does
            not.
    """

    update: int
    sequences: int
    micro_step: int

    @classmethod
    def from_json(cls, value: Mapping[str, Any], *, file: str) -> Position:
        """Read a position from a file's index.

        Raises:
            CheckpointError: A counter is missing, negative or not a whole number.
        """
        counts = {field.name: value.get(field.name) for field in dataclasses.fields(cls)}
        whole = {name: count for name, count in counts.items() if type(count) is int and count >= 0}
        if len(whole) < len(counts):
            raise CheckpointError(f"{file}: its progress is {dict(value)}; counts {', '.join(counts)} belong there")
        return cls(**whole)

    def __str__(self) -> str:
        inside = f" and {self.micro_step} micro-steps" if self.micro_step else ""
        return f"update {self.update}{inside}"


ExtensionRule = Callable[[StateHeader, Position], str | None]
"""Why a state may not be continued to the larger budget of today, or None where the schedule and the plan allow it."""


def check_header(
    found: StateHeader,
    expected: StateHeader,
    *,
    file: str,
    cache_ancestors: Collection[str] = (),
    extend: bool = False,
    refuse_extension: Callable[[], str | None] = lambda: None,
) -> bool:
    """Check that a run may continue from a state.

    Args:
        found: The state's header.
        expected: The run's own.
        file: The state's name, for the errors.
        cache_ancestors: Identities of the caches that the run's was extended from; they hold its first tokens.
        extend: Accept a larger budget (`training.extend`).
        refuse_extension: Asked only when the budget alone has grown: the reason why that is impossible, or None.
    Returns:
        Whether the budget grows.
    Raises:
        CheckpointError: Another recipe, cache, loader or precision, or a budget that may not change.
    """
    if found.loader != expected.loader:
        raise _mismatch(file, "loader", found.loader, expected.loader, "a state continues with its own loader only")
    differences = recipe_differences(found.recipe, expected.recipe)
    if [key for key in differences if key not in BUDGET_KEYS]:
        raise CheckpointError(_other_recipe(file, differences.values()))
    if found.cache_identity != expected.cache_identity and found.cache_identity not in cache_ancestors:
        way = "point data.cache_dir to the cache it was trained on"
        raise _mismatch(file, "token cache", found.cache_identity, expected.cache_identity, way)
    if found.precision != expected.precision:
        way = f"set runtime.precision={found.precision} in a run of its own, or continue on the same kind of device"
        raise _mismatch(file, "precision", found.precision, expected.precision, way)
    if differences:
        _check_extension(found, expected, file=file, differences=differences, extend=extend, refuse=refuse_extension)
    return bool(differences)


def _check_extension(
    found: StateHeader,
    expected: StateHeader,
    *,
    file: str,
    differences: Mapping[str, str],
    extend: bool,
    refuse: Callable[[], str | None],
) -> None:
    if not extend:
        hint = "; training.extend=true continues to a larger budget where the schedule allows it"
        raise CheckpointError(_other_recipe(file, differences.values()) + hint)
    if expected.total_targets <= found.total_targets:
        raise CheckpointError(
            f"{file}: was planned for {found.total_targets} targets and training.extend=true asks for "
            f"{expected.total_targets}; a budget can only grow"
        )
    if found.loader.startswith("v1"):
        raise CheckpointError(
            f"{file}: loader v1 orders the blocks by the whole budget, so the budget cannot grow; use v2"
        )
    if (reason := refuse()) is not None:
        raise CheckpointError(f"{file}: cannot be extended to {expected.total_targets} targets: {reason}")


def recipe_differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, str]:
    """Dotted key → "key: found → expected" for each setting that differs; a setting that one side lacks is "absent"."""
    found, expected = _plain(found), _plain(expected)
    keys = [key for key in sorted({*found, *expected}) if _differ(found.get(key, ...), expected.get(key, ...))]
    return {key: f"{key}: {_shown(found, key)} → {_shown(expected, key)}" for key in keys}


def machine_differences(found: StateHeader, expected: StateHeader) -> list[str]:
    """Machine settings that change on this resume, as "key: found → expected"; recorded, never refused."""
    return list(recipe_differences(found.machine, expected.machine).values())


def _other_recipe(file: str, differences: Collection[str]) -> str:
    listed = "".join(f"\n  {difference}" for difference in differences)
    return (
        f"{file}: belongs to another recipe; it differs (state → run) in{listed}\n"
        f"take these settings back, or choose another run.name"
    )


def _mismatch(file: str, what: str, found: str, expected: str, way_out: str) -> CheckpointError:
    return CheckpointError(f"{file}: its {what} is {found}, that of the run is {expected}; {way_out}")


def _differ(a: Any, b: Any) -> bool:
    # True equals 1 for Python; a setting that became the other has changed.
    return type(a) is not type(b) or a != b


def _shown(settings: Mapping[str, Any], key: str) -> str:
    return show(settings[key]) if key in settings else "absent"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
