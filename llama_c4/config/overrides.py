"""The text of command-line overrides: what kind each one is, and the form in which Hydra keeps it as it was meant.

An override is a choice of a group (`model=50m`) or a value of a key (`optim.lr=1e-3`). `+` and `++` before a key mean
the same as nothing: every key is checked against the schema, so none can be added. A value of a text field is put in
quotes before Hydra parses it, because its grammar would read a name such as `1E234` as a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import final

from llama_c4.config.conf_files import group_choices
from llama_c4.config.fields import branches, is_text_key, leaves

# Other spellings of a key, from the seed documents and the published commands.
ALIASES = {"training.tokens_per_parameters": "training.tokens_per_parameter"}
# What a size brings as its recipe, with the setting that a user changes instead.
PRESET_KEYS = {
    "lr": "optim.lr",
    "beta1": "optim.beta1",
    "beta2": "optim.beta2",
    "batch_tokens": "training.batch_tokens",
    "micro_batch_size": "training.micro_batch_size",
}
_TEXT_FUNCTIONS = re.compile(r"(choice|shuffle|sort|tag|str)\((.*)\)", re.DOTALL)
_KEY = re.compile(r"[A-Za-z_][\w-]*([./][\w-]+)*")


@final
@dataclass(frozen=True)
class Override:
    """One override: the canonical key, the value as it was typed, and the value in quotes where it is text."""

    text: str
    key: str
    value: str

    @property
    def is_group(self) -> bool:
        return self.key in group_choices()

    @property
    def is_hydra(self) -> bool:
        return self.key.startswith(("hydra.", "hydra/"))

    @property
    def for_hydra(self) -> str:
        """The override in Hydra's grammar: forced where it is a key, text in quotes."""
        if self.is_group or self.is_hydra:
            return f"{self.key}={self.value}"
        return f"++{self.key}={quote_text(self.value) if is_text_key(self.key) else self.value}"


@final
@dataclass
class Request:
    """What a list of overrides asks for, and what is wrong with it as text.

    Attributes:
        choices: Group → its override, the last one typed.
        values: Dotted key → its override, the last one typed.
        hydra: Overrides of Hydra's own settings.
        faults: One message for every override that cannot be used; it appears nowhere else.
    """

    choices: dict[str, Override] = field(default_factory=dict)
    values: dict[str, Override] = field(default_factory=dict)
    hydra: list[Override] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def for_hydra(self) -> list[str]:
        return [o.for_hydra for o in (*self.choices.values(), *self.values.values(), *self.hydra)]


def read_overrides(texts: Iterable[str]) -> Request:
    """Sort overrides into choices, values and Hydra's own; a repeated one replaces the former, as in Hydra."""
    request = Request()
    spellings: dict[str, str] = {}
    for text in texts:
        fault = _fault_of_text(text)
        if fault is not None:
            request.faults.append(fault)
            continue
        typed, value = text.lstrip("+").split("=", 1)
        override = Override(text, ALIASES.get(typed.strip(), typed.strip()), value)
        if spellings.setdefault(override.key, typed.strip()) != typed.strip():
            request.faults.append(
                f"{text}: {' and '.join(_spellings(override.key))} are the same key; leave one of them out"
            )
        elif override.is_hydra:
            request.hydra.append(override)
        else:
            (request.choices if override.is_group else request.values)[override.key] = override
    return request


def _spellings(key: str) -> list[str]:
    return [key, *(alias for alias, canonical in ALIASES.items() if canonical == key)]


def _fault_of_text(text: str) -> str | None:
    """Why an override cannot be used whatever the configuration says; None where it can."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return f"{text.encode('utf-8', 'backslashreplace').decode()}: is not UTF-8 text; type the value in UTF-8"
    if text.startswith("~"):
        return (
            f"{text}: no key can be taken away, a configuration has them all; set the key, to null where it allows that"
        )
    if "=" not in text:
        return f"{text}: is not KEY=VALUE; {_instead_of(text)}"
    key = text.lstrip("+").split("=", 1)[0].strip()
    if "@" in key:
        return f"{text}: the place of a group is fixed; type {key.split('@')[0]}={text.split('=', 1)[1]}"
    if not _KEY.fullmatch(key):
        return f"{text}: {key!r} is not a key; type GROUP=CHOICE or a dotted key such as optim.lr=0.001"
    return _fault_of_place(text, key)


def _fault_of_place(text: str, key: str) -> str | None:
    """Why no value can be put at a key; unknown keys are left to the schema, which knows the variant."""
    if key.startswith(("hydra.", "hydra/")) or key in group_choices():
        return None
    head, _, tail = key.partition(".")
    if head == "preset":
        ways = [PRESET_KEYS[tail]] if tail in PRESET_KEYS else list(PRESET_KEYS.values())
        return f"{text}: preset is what a size brings and cannot be set; set {' or '.join(ways)} itself"
    if "/" in key:
        return (
            f"{text}: no group is called {key.rsplit('/', 1)[0]}; the groups are {', '.join(sorted(group_choices()))}"
        )
    if key in branches():
        inner = [k for k in leaves() if k.startswith(f"{key}.")]
        return f"{text}: {key} holds keys and is no value; set them one by one: {', '.join(inner)}"
    leaf = next((k for k in leaves() if key.startswith(f"{k}.")), None)
    return None if leaf is None else f"{text}: {leaf} is a single value and holds no keys; type {leaf}=VALUE"


def _instead_of(word: str) -> str:
    for group, names in group_choices().items():
        if word in (group, *names):
            return f"type {group}={word if word in names else '|'.join(names)}"
    return f"type {suggest_keys(word) or 'GROUP=CHOICE or a dotted key such as optim.lr'}=VALUE"


def suggest_keys(key: str) -> str:
    """Keys that a mistyped one may have meant, joined by `or`; empty where nothing is near."""
    known = [*leaves(), *group_choices()]
    last = key.rsplit(".", 1)[-1]
    same_end = [k for k in known if k.rsplit(".", 1)[-1] == last]
    ends = {k.rsplit(".", 1)[-1]: k for k in known}
    near_end = [ends[e] for e in get_close_matches(last, ends, n=2, cutoff=0.75)]
    return " or ".join(same_end[:3] or get_close_matches(key, known, n=2, cutoff=0.75) or near_end)


def fault_of_choice(choice: Override) -> str | None:
    """Why a group has no such choice, with those it has; None where it has it."""
    names = group_choices()[choice.key]
    value = choice.value.strip().strip("'\"")
    if value in names:
        return None
    if len(split_top_level(choice.value)) > 1 or re.match(r"(choice|glob|range|sort|shuffle)\(", value):
        return sweep_fault(choice)
    near = get_close_matches(value, names, n=1)
    meant = f"; did you mean {choice.key}={near[0]}?" if near else ""
    return f"{choice.key}={value} is not a choice of {choice.key}; it has {', '.join(names)}{meant}"


def sweep_fault(override: Override) -> str:
    """The message for several values where one run was asked for."""
    listed = [leaf for leaf in leaves().get(override.key, ()) if leaf.is_list]
    ways = ["add -m to run one job a value"]
    if listed:
        ways.append(f"or put a list in brackets: {override.key}=[{override.value}]")
    if is_text_key(override.key):
        ways.append(f"or put a text with commas in quotes: {override.key}='\"{override.value}\"'")
    return f"{override.key}={override.value} is several values and this is one run; {', '.join(ways)}"


def quote_text(raw: str) -> str:
    """A value of a text field with every bare word in quotes, also inside sweeps, lists and `choice(…)`.

    `null`, quoted words, interpolations (`${…}`) and words with Hydra's backslash escapes stay as they are.
    """
    parts = split_top_level(raw)
    if len(parts) > 1:
        return ",".join(quote_text(part) for part in parts)
    word = raw.strip()
    call = _TEXT_FUNCTIONS.fullmatch(word)
    if call:
        return f"{call[1]}({quote_text(call[2])})"
    if word.startswith("[") and word.endswith("]"):
        return f"[{quote_text(word[1:-1])}]"
    if not word or word[0] in "'\"" or word.lower() == "null" or "${" in word or "\\" in word:
        return word
    mark = '"' if "'" in word else "'"
    return mark + (word.replace(mark, "\\" + mark) if mark in word else word) + mark


def split_top_level(raw: str) -> Sequence[str]:
    """Split at commas that stand outside of quotes and brackets. A quote opens only at the start of a word."""
    parts, start, depth, quote, fresh, skip = [], 0, 0, "", True, False
    for i, char in enumerate(raw):
        if skip:
            skip = False
        elif char == "\\":
            skip, fresh = True, False
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"" and fresh:
            quote, fresh = char, False
        elif char in "([{":
            depth, fresh = depth + 1, True
        elif char in ")]}":
            depth, fresh = depth - 1, False
        elif char == "," and depth <= 0:
            parts.append(raw[start:i])
            start, fresh = i + 1, True
        elif not char.isspace():
            fresh = char in ",:"
    return [*parts, raw[start:]]
