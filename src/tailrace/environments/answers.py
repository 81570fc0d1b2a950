"""The answer in a reply, and how far it agrees with the expected one. Linear in the reply's length."""

from __future__ import annotations

import re
from difflib import SequenceMatcher

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def extract_answer(reply: str) -> str:
    """What stands in the last `<answer>` tag, or on the last line that is not empty where there is none.

    >>> extract_answer("Six times seven. <answer> 42 </answer>"), extract_answer("Let me see.\\n42\\n")
    ('42', '42')
    """
    start = reply.rfind("<answer>")
    if start >= 0:
        body, closed, _ = reply[start + len("<answer>") :].partition("</answer>")
        if closed:
            return body.strip()
    return reply.rstrip().rpartition("\n")[2].strip()


def extract_number(reply: str) -> float | None:
    """The last number of the answer, thousands separators allowed; None where there is none.

    >>> extract_number("12 + 30 = 42."), extract_number("1,024"), extract_number("no idea")
    (42.0, 1024.0, None)
    """
    numbers = _NUMBER.findall(re.sub(r"(?<=\d),(?=\d{3})", "", extract_answer(reply)))
    return float(numbers[-1]) if numbers else None


def text_similarity(produced: str, expected: str) -> float:
    """The ratio 2·matched / (both lengths) of `difflib`, from 0 to 1, on characters.

    Only the first part of a much too long text is compared, but all of it counts as length.

    >>> text_similarity("abc", "abc"), text_similarity("", "abc")
    (1.0, 0.0)
    """
    if not expected:
        return float(not produced)
    matcher = SequenceMatcher(None, produced[: 2 * len(expected)], expected, autojunk=False)
    matched = sum(block.size for block in matcher.get_matching_blocks())
    return 2.0 * matched / (len(produced) + len(expected))
