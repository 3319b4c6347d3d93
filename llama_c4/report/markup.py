"""HTML that is escaped by construction: text becomes markup only through `element`, which escapes it."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from typing import final

_VOID = ("meta", "link")


@final
class Markup(str):
    """A piece of HTML that is safe as it stands. Any other string is text."""

    __slots__ = ()


NOTHING = Markup("")


def element(tag: str, *children: str | Iterable[str], attributes: Mapping[str, str] | None = None) -> Markup:
    """An HTML element; children that are not Markup are text, and attribute values always are.

    Args:
        tag: Name of the element, optionally with a class: `td.number`.
        children: Texts, Markup, or iterables of them.
        attributes: Other attributes.
    """
    name, _, css_class = tag.partition(".")
    given = ({"class": css_class} if css_class else {}) | dict(attributes or {})
    words = "".join(f' {key}="{html.escape(value, quote=True)}"' for key, value in given.items())
    if name in _VOID:
        return Markup(f"<{name}{words}>")
    return Markup(f"<{name}{words}>{together(*children)}</{name}>")


def together(*children: str | Iterable[str]) -> Markup:
    """Several pieces one after another."""
    return Markup("".join(_piece(child) for child in children))


def _piece(child: str | Iterable[str]) -> str:
    if isinstance(child, Markup):
        return child
    return html.escape(child, quote=False) if isinstance(child, str) else together(*child)
