"""Resolved settings as YAML text and back, exactly: every number and every text comes back as it was.

Reading knows null, true, false, JSON-like numbers (`1e-05` too) and text, and nothing else of YAML's implicit types:
`on`, `007` and `2024-01-01` are text. Writing quotes whatever this reader or another one might take for a number.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar, final

import yaml

from llama_c4.config.errors import ConfigError

_FLOAT = re.compile(
    r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_PLAIN_TEXT = re.compile(r"[A-Za-z/][^\n]*")
_TAGS = ("null", "bool", "int", "float", "str", "seq", "map")
_MAKERS = yaml.SafeLoader.yaml_constructors


@final
class _Reader(yaml.SafeLoader):
    """SafeLoader with the few types of a configuration; tags beyond them are errors."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]
    yaml_constructors: ClassVar[dict[Any, Any]] = {
        tag: make for tag, make in _MAKERS.items() if tag is None or tag.rsplit(":", 1)[-1] in _TAGS
    }


@final
class _Writer(yaml.SafeDumper):
    """SafeDumper that quotes every text which does not begin as a word or a path."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _write_text(writer: yaml.SafeDumper, text: str) -> yaml.Node:
    style = None if _PLAIN_TEXT.fullmatch(text) else '"'
    return writer.represent_scalar("tag:yaml.org,2002:str", text, style=style)


for _tag, _pattern, _first in (
    ("null", re.compile(r"(null|~|)$"), ["n", "~", ""]),
    ("bool", re.compile(r"(true|false|True|False)$"), list("tfTF")),
    ("int", re.compile(rf"({_INT.pattern})$"), list("-+0123456789")),
    ("float", re.compile(rf"({_FLOAT.pattern})$"), list("-+.0123456789")),
):
    _Reader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, _first)
_Writer.add_representer(str, _write_text)


def write_tree(tree: dict[str, Any]) -> str:
    """YAML text of nested plain settings, in their order; lists stand on one line."""
    return yaml.dump(tree, Dumper=_Writer, sort_keys=False, allow_unicode=True, default_flow_style=None, width=10_000)


def read_tree(path: Path) -> dict[str, Any]:
    """The nested settings of a YAML file.

    Raises:
        ConfigError: No such file, not UTF-8, no YAML, or no mapping at its top.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); name a config.yaml or a run folder") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: is no YAML of a configuration ({error}); take the config.yaml of a run folder"
        ) from error
    return parse_tree(text, source=path)


def parse_tree(text: str, *, source: Path) -> dict[str, Any]:
    """The nested settings of YAML text; errors name the file that it comes from.

    Raises:
        ConfigError: No YAML, or no mapping at its top.
    """
    try:
        tree = yaml.load(text, Loader=_Reader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{source}: is no YAML of a configuration ({reason}); take the config.yaml of a run folder"
        ) from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: holds no settings; take the config.yaml of a run folder")
    return {str(key): _with_text_keys(value) for key, value in tree.items()}


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _with_text_keys(inner) for key, inner in value.items()}
    return [_with_text_keys(inner) for inner in value] if isinstance(value, list) else value
