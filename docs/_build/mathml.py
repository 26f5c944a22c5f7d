"""MkDocs hook: formulas become MathML while the site is built, so that a page needs no script and no network.

`pymdownx.arithmatex` marks formulas in the rendered page; this hook converts each and fails the build on one that
cannot be converted.
"""

import html
import re

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)


def on_page_content(content, /, *, page, **_):
    """Replace every marked formula of one page."""

    def replace(match, display):
        source = html.unescape(match.group(1)).strip()
        try:
            converted = convert(source, display=display)
        except Exception as error:
            raise PluginError(f"{page.file.src_path}: cannot convert the formula {source!r}: {error}") from error
        # What the converter does not know comes through as text, with its backslash or ampersand.
        if "\\" in html.unescape(converted) or "<mi>&</mi>" in converted:
            raise PluginError(f"{page.file.src_path}: the formula {source!r} uses a command that MathML output lacks")
        return f'<div class="formula">{converted}</div>' if display == "block" else converted

    content = BLOCK.sub(lambda match: replace(match, "block"), content)
    return INLINE.sub(lambda match: replace(match, "inline"), content)
