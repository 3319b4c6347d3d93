"""SVG files as elements of an HTML page, many on one page, in the page's own colours and letters."""

from __future__ import annotations

import re
from collections.abc import Mapping

from llama_c4.report.markup import Markup


def inline_svg(file: str, *, colours: Mapping[str, str], prefix: str) -> Markup:
    """An SVG file of matplotlib as an element: no prologue, no style sheet, no font, no size of its own.

    Args:
        file: The text of the file; it holds no text from outside.
        colours: Name of a variable of the page → colour in the file that stands for it.
        prefix: Put before every identifier, since identifiers are per page.
    """
    drawing = file[file.index("<svg") :]
    drawing = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", drawing, flags=re.DOTALL)
    drawing = re.sub(r"font-family: [^;\"]*;?\s*", "", drawing)
    drawing = re.sub(r'(\bid="|xlink:href="#|url\(#)', rf"\g<1>{prefix}", drawing)
    for name, colour in colours.items():
        drawing = drawing.replace(colour, f"var(--{name})")
    return Markup(
        re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', drawing, count=1)
    )
