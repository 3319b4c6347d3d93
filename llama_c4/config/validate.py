"""A plain tree against the schema and the rules: every fault at once, each with its key, value, rule and way out."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, final

from pydantic import TypeAdapter, ValidationError

from llama_c4.config.errors import ConfigError
from llama_c4.config.fields import Leaf, fields_of, leaf_of, leaves, variants_of
from llama_c4.config.overrides import suggest_keys
from llama_c4.config.rules import broken_rules
from llama_c4.config.schema import RunConfig

Tree = dict[str, Any]

PARAMETERS = "parameters are float32 (float64 with runtime.precision=float64); runtime.precision=bfloat16 is autocast"
# Words of other systems, with what this one has instead.
ELSEWHERE = {
    "betas": "the two are optim.beta1 and optim.beta2",
    "learning_rate": "it is optim.lr",
    "max_norm": "it is optim.grad_clip",
    "param_dtype": PARAMETERS,
    "dtype": PARAMETERS,
    "grad_accum_steps": "it follows from training.batch_tokens and training.micro_batch_size",
    "dropout": "the model has none",
}


@lru_cache(maxsize=1)
def _adapter() -> TypeAdapter[RunConfig]:
    return TypeAdapter(RunConfig)


def show(value: Any) -> str:
    """A value as one types it."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


@final
@dataclass
class TreeCheck:
    """One pass over a tree, which is mended where it is faulty so that the remaining rules can be checked too.

    Attributes:
        tree: Nested settings; changed in place.
        typed: Dotted key → value as the user typed it, for the messages.
        fallback: The tree without the typed values; a faulty value is replaced from it. None where there is none.
        faults: The messages so far.
        unsure: Keys whose value here is not what the user meant; rules over them say nothing.
    """

    tree: Tree
    typed: Mapping[str, str] = field(default_factory=dict)
    fallback: Tree | None = None
    faults: list[str] = field(default_factory=list)
    unsure: set[str] = field(default_factory=set)

    def finish(self) -> RunConfig:
        """The configuration of the tree.

        Raises:
            ConfigError: With every fault of shape, type, bound and combination.
        """
        self._check_shape(RunConfig, self.tree, "", None)
        config = self._build()
        if config is not None:
            broken = broken_rules(config, typed=self.typed)
            self.faults += [b.message for b in broken if not self.unsure & set(b.keys)]
        if config is None or self.faults:
            raise ConfigError(*dict.fromkeys(self.faults))
        return config

    # --- shape: which keys there are ---------------------------------------------------------------------------------

    def _check_shape(self, cls: Any, tree: Tree, prefix: str, variant: str | None) -> None:
        for name in [n for n in tree if n not in fields_of(cls)]:
            for key in _keys_under(f"{prefix}{name}", tree.pop(name), self.typed):
                if key not in self.unsure:
                    self.faults.append(self._unknown(key, variant))
        for name, info in fields_of(cls).items():
            key, inner = prefix + name, variants_of(info)
            if name not in tree:
                self._missing(key, tree, name, bool(inner))
            if inner and name in tree:
                self._check_branch(key, inner, tree)

    def _check_branch(self, key: str, inner: dict[str | None, Any], tree: Tree) -> None:
        name = key.rsplit(".", 1)[-1]
        if not isinstance(tree[name], dict):
            self.faults.append(f"{key}={show(tree[name])} is not a group of keys; write {key}.KEY: VALUE")
            del tree[name]
            self._missing(key, tree, name, True)
            if name not in tree:
                return
        tag = None if None in inner else self._tag(key, inner, tree[name])
        if tag in inner:
            self._check_shape(inner[tag], tree[name], f"{key}.", tag)

    def _tag(self, key: str, inner: dict[str | None, Any], branch: Tree) -> str | None:
        """The variant of a group; a name that was not chosen through the group is a fault."""
        name, chosen = branch.get("name"), (self._from_fallback(f"{key}.name"))
        is_variant = isinstance(name, str) and name in inner
        if is_variant and (chosen is None or name == chosen):
            return name
        if is_variant:
            way = f"choose the variant with {key}={name}"
            self.faults.append(f"{key}.name={name} does not bring the keys of {name}, this is {chosen}; {way}")
        else:
            names = ", ".join(str(tag) for tag in inner)
            missing = f"{key}.name is missing" if name is None else f"{key}.name={show(name)} is no variant of {key}"
            self.faults.append(
                f"{missing}; it is one of {names}, chosen with {key}=CHOICE{_did_you_mean(key, name, names)}"
            )
        self.unsure.add(f"{key}.name")
        if chosen not in inner:
            return None
        branch["name"] = chosen
        return chosen

    def _missing(self, key: str, tree: Tree, name: str, is_branch: bool) -> None:
        value = self._from_fallback(key)
        if value is not None:
            tree[name] = value
        elif is_branch:
            self.faults.append(f"{key} is missing; choose it with {key}=CHOICE")
        elif key not in self.unsure:
            self.faults.append(f"{key} has no value; it is {leaves()[key][0].rule}: set {key}=VALUE")
        self.unsure.add(key)

    def _from_fallback(self, key: str) -> Any:
        value: Any = self.fallback
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return copy.deepcopy(value)

    def _unknown(self, key: str, variant: str | None) -> str:
        text = f"{key}={self.typed[key]}" if key in self.typed else key
        owners = [leaf.variant for leaf in leaves().get(key, ()) if leaf.variant is not None]
        group = key.split(".")[0]
        if owners and variant is not None:
            way = f"choose the variant with {' or '.join(f'{group}={owner}' for owner in owners)}, or leave the key out"
            return f"{text} belongs to {' and '.join(owners)}, and this is {group}.name={variant}; {way}"
        hint = ELSEWHERE.get(key.rsplit(".", 1)[-1])
        near = suggest_keys(key)
        way = f": {hint}" if hint else f"; did you mean {near}?" if near else "; leave it out"
        return f"{text}: there is no setting {key}{way}"

    # --- types and bounds: pydantic, one message a key ---------------------------------------------------------------

    def _build(self) -> RunConfig | None:
        """Validate; replace what is faulty from the fallback and validate once more. None where that is not enough."""
        for mended in (False, True):
            try:
                return _adapter().validate_json(json.dumps(self.tree))
            except ValidationError as error:
                wrong = dict.fromkeys(_dotted(e["loc"]) for e in error.errors(include_url=False, include_input=False))
            for key in () if mended else wrong:
                self._wrong_value(key)
        return None

    def _wrong_value(self, key: str) -> None:
        *path, name = key.split(".")
        branch = self.tree
        for part in path:
            branch = branch[part]
        if name not in branch:
            return
        leaf = leaf_of(key, self.tree[key.split(".")[0]].get("name"))
        typed = self.typed.get(key)
        if leaf is not None:
            default = "" if typed is None else f", or leave it out for {show(self._from_fallback(key))}"
            text = f"{key}={show(branch[name]) if typed is None else typed}"
            self.faults.append(f"{text} is not {leaf.rule}; {_way_out(leaf, branch[name], typed)}{default}")
        if typed is not None:
            branch[name] = self._from_fallback(key)
        self.unsure.add(key)


def _keys_under(key: str, value: Any, typed: Mapping[str, str]) -> Iterator[str]:
    """The dotted keys below an unknown one, those that the user typed alone where there are any."""
    inner = [k for k in typed if k == key or k.startswith(f"{key}.")]
    if inner:
        yield from inner
    elif isinstance(value, dict) and value:
        for name, below in value.items():
            yield from _keys_under(f"{key}.{name}", below, typed)
    else:
        yield key


def _dotted(location: tuple[int | str, ...]) -> str:
    """The dotted key of a pydantic location, without the tags of variants and the members of unions in it."""
    cls: Any = RunConfig
    parts: list[str] = []
    rest = list(location)
    while rest and cls is not None:
        name = str(rest.pop(0))
        parts.append(name)
        info = fields_of(cls).get(name)
        inner = variants_of(info) if info is not None else {}
        if not inner:
            break
        # Only a group with several variants has the tag of one in its locations.
        tag = str(rest.pop(0)) if rest and len(inner) > 1 else next(iter(inner))
        cls = inner.get(tag)
    return ".".join(parts)


def _way_out(leaf: Leaf, value: Any, typed: str | None) -> str:
    number = isinstance(value, float) and value.is_integer() and int in leaf.types
    if number and abs(value) < 1e18:
        return f"whole numbers have no point and no exponent: set {leaf.key}={int(value)}"
    if isinstance(value, str) and leaf.choices:
        near = get_close_matches(value, leaf.choices, n=1)
        if near:
            return f"set {leaf.key}={near[0]}"
    if leaf.is_list and isinstance(value, (str, int)) and not isinstance(value, bool):
        return f"a list stands in brackets: set {leaf.key}=[{value}]"
    if leaf.is_text and typed is None and isinstance(value, (int, float)):
        return "in a YAML file a text that looks like a number stands in quotes"
    return f"set {leaf.key} to such a value"


def _did_you_mean(key: str, name: Any, names: str) -> str:
    near = get_close_matches(str(name), names.split(", "), n=1)
    return f"; did you mean {key}={near[0]}?" if near else ""
