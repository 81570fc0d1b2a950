"""Text of models, tasks and users' code, without what a terminal would obey and a page would not show."""

from __future__ import annotations

import re
import unicodedata

_UNUSUAL = re.compile(r"[^\n\t -~]")
_JOINS = "\u200c\u200d"
"""Which spelling needs, and emoji."""


def visible(text: str) -> str:
    """Its controls, marks of formatting, halves of characters and other separators of lines written out.

    Ends of lines and tabs stay, and so does what joins letters or emoji.

    >>> visible("a\\x1b[2Jb\\r\\n\\u202ec é 中")
    'a\\\\x1b[2Jb\\\\x0d\\n\\\\u202ec é 中'
    >>> visible("a\\u2028b\\u2029\\U000e00411")
    'a\\\\u2028b\\\\u2029\\\\u{e0041}1'
    """
    return _UNUSUAL.sub(_shown, text)


def _shown(found: re.Match[str]) -> str:
    character = found[0]
    if character in _JOINS or unicodedata.category(character) not in ("Cc", "Cs", "Cf", "Zl", "Zp"):
        return character
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\u{{{code:x}}}"
