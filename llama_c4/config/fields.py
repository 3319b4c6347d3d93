"""The schema read as data: every dotted key with its kind, its type in words and the variants that have it."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated, Any, Literal, Union, final, get_args, get_origin

from pydantic.fields import FieldInfo

from llama_c4.config.schema import RunConfig

# What a pattern of the schema asks for, in words.
PATTERNS = {r"^[^/\x00]+$": "and has no slash", r"^[0-9a-f]{40}$": "of 40 hexadecimal digits (a commit)"}
BOUNDS = {"gt": "above {}", "ge": "of at least {}", "lt": "below {}", "le": "of at most {}"}


@final
@dataclasses.dataclass(frozen=True)
class Leaf:
    """One setting of one variant.

    Attributes:
        key: Dotted key, such as `optim.lr`.
        variant: The `name` of the variant that has it; None in a group without variants.
        kind: recipe, machine or observation.
        types: Members of the type; a plain type has one, `int | None` has two.
        rule: What a valid value is, in words.
        doc: The docstring under the field.
    """

    key: str
    variant: str | None
    kind: str
    types: tuple[Any, ...]
    rule: str
    doc: str

    @property
    def is_text(self) -> bool:
        """Whether the value is free text (or a list of it), so that a number-like word must stay as it was typed."""
        plain = [t for t in self.types if t is not type(None)]
        return all(t is str or (get_origin(t) is tuple and get_args(t)[0] is str) for t in plain)

    @property
    def is_list(self) -> bool:
        return any(get_origin(t) is tuple for t in self.types)

    @property
    def choices(self) -> list[str]:
        """The values that can be listed: of literals, of switches, and null where it is allowed."""
        words: list[str] = []
        for t in self.types:
            if get_origin(t) is Literal:
                words += [str(value) for value in get_args(t)]
            elif t is bool:
                words += ["true", "false"]
            elif t is type(None):
                words.append("null")
        return words


def members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the type alone."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def fields_of(cls: Any) -> dict[str, FieldInfo]:
    """Fields of a dataclass of the schema, with annotations resolved."""
    return cls.__pydantic_fields__


def variants_of(info: FieldInfo) -> dict[str | None, Any]:
    """`name` → dataclass for every variant of a group; {None: class} for a group without a name; {} for a value."""
    classes = [t for t in members(info.annotation) if dataclasses.is_dataclass(t)]
    return {_tag(cls): cls for cls in classes}


def _tag(cls: Any) -> str | None:
    name = fields_of(cls).get("name")
    return get_args(name.annotation)[0] if name is not None and get_origin(name.annotation) is Literal else None


@lru_cache(maxsize=1)
def leaves() -> dict[str, tuple[Leaf, ...]]:
    """Every dotted key of the schema with the leaves that bear it, one a variant."""
    table: dict[str, tuple[Leaf, ...]] = {}
    for leaf in _walk(RunConfig, "", None):
        table[leaf.key] = (*table.get(leaf.key, ()), leaf)
    return table


@lru_cache(maxsize=1)
def branches() -> frozenset[str]:
    """Dotted keys that hold other keys, such as `optim` or `training.rescue`."""
    return frozenset(key.rsplit(".", depth)[0] for key in leaves() for depth in range(1, key.count(".") + 1))


def leaf_of(key: str, variant: str | None) -> Leaf | None:
    """The leaf of a key in a variant of its group; None where that variant has no such key."""
    return next((leaf for leaf in leaves().get(key, ()) if leaf.variant in (None, variant)), None)


def is_text_key(key: str) -> bool:
    """Whether every variant takes free text at this key."""
    return key in leaves() and all(leaf.is_text for leaf in leaves()[key])


def _walk(cls: Any, prefix: str, variant: str | None) -> Iterator[Leaf]:
    for name, info in fields_of(cls).items():
        inner = variants_of(info)
        for tag, branch in inner.items():
            yield from _walk(branch, f"{prefix}{name}.", tag if tag is not None else variant)
        if not inner:
            extra = info.json_schema_extra
            kind = str(extra.get("kind", "")) if isinstance(extra, dict) else ""
            rule = _rule(info.annotation, info.metadata)
            yield Leaf(prefix + name, variant, kind, members(info.annotation), rule, info.description or "")


def _rule(annotation: Any, metadata: list[Any]) -> str:
    types_of_value = members(annotation)
    joint = ", or " if any(get_origin(t) is tuple for t in types_of_value) else " or "
    return joint.join(_type_in_words(t, metadata) for t in types_of_value)


def _type_in_words(t: Any, metadata: list[Any]) -> str:
    if t is type(None):
        return "null"
    if t is bool:
        return "true or false"
    if get_origin(t) is Annotated:
        inner, *extra = get_args(t)
        found = [m for e in extra for m in (e.metadata if isinstance(e, FieldInfo) else [e])]
        return _type_in_words(inner, found)
    if get_origin(t) is Literal:
        values = [str(v) for v in get_args(t)]
        return values[0] if len(values) == 1 else "one of " + ", ".join(values)
    if get_origin(t) is tuple:
        return f"a list with every entry {_type_in_words(get_args(t)[0], metadata)}"
    return {int: "a whole number", float: "a finite number", str: "text"}[t] + _bounds_in_words(t, metadata)


def _bounds_in_words(t: Any, metadata: list[Any]) -> str:
    if t is str:
        pattern = next((m.pattern for m in metadata if getattr(m, "pattern", None)), None)
        filled = " that is not empty" if any(getattr(m, "min_length", 0) for m in metadata) else ""
        return filled + (" " + PATTERNS.get(pattern, f"that matches {pattern}") if pattern else "")
    words = [text.format(getattr(m, name)) for m in metadata for name, text in BOUNDS.items() if hasattr(m, name)]
    return " " + " and ".join(words) if words else ""
