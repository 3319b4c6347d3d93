"""What a shell offers for a half-typed override: groups and their choices, dotted keys, values that can be listed."""

from __future__ import annotations

from llama_c4.config.conf_files import group_choices
from llama_c4.config.fields import branches, leaves


def complete_override(prefix: str) -> list[str]:
    """All continuations of a half-typed override, whole words.

    `mo` → `model=`, `model.`; `model=5` → `model=50m`, `model=500m`; `lr_schedule.w` → its keys with `=`;
    `runtime.compile=` → the values it takes.
    """
    plus = prefix[: len(prefix) - len(prefix.lstrip("+"))]
    word = prefix.removeprefix(plus)
    key, equals, _ = word.partition("=")
    words = [f"{key}={value}" for value in _values(key)] if equals else _keys(key)
    return [plus + w for w in words if w.startswith(word)]


def _values(key: str) -> list[str]:
    if key in group_choices():
        return list(group_choices()[key])
    return list(dict.fromkeys(choice for leaf in leaves().get(key, ()) for choice in leaf.choices))


def _keys(word: str) -> list[str]:
    if "." in word:
        return [f"{key}=" for key in leaves()]
    return [f"{group}=" for group in group_choices()] + [
        f"{branch}." for branch in sorted(branches()) if "." not in branch
    ]
