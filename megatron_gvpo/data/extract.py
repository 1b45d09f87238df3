"""The part of a response that is its answer. Each takes time linear in the text: it is a model's, and may be anything."""

from __future__ import annotations

import re
from typing import Literal

Extraction = Literal["all", "last_number", "boxed", "answer_tag"]

# A minus is a sign only where no number, word or bracket stands before it: "12-34" ends in 34, "= -34" in -34.
_NUMBER = re.compile(r"(?<![\w)\]}])-?\d+(?:,\d{3})*(?:\.\d+)?(?![\w])|\d+(?:,\d{3})*(?:\.\d+)?")


def extract(text: str, mode: Extraction) -> str | None:
    """The answer in a response, or None where there is none.

    all: the whole text. last_number: the last number, without thousands separators. boxed: the inside of the last complete
    \\boxed{...}. answer_tag: the inside of the last <answer>...</answer>. Blanks around it are cut off.
    """
    if mode == "all":
        return text.strip()
    if mode == "last_number":
        numbers = _NUMBER.findall(text)
        return numbers[-1].replace(",", "") if numbers else None
    return _last_boxed(text) if mode == "boxed" else _last_tag(text)


def _last_boxed(text: str) -> str | None:
    found: str | None = None
    opener = "\\boxed{"
    start = text.find(opener)
    while start >= 0:
        depth, at = 1, start + len(opener)
        while at < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            at += 1
        if depth:  # never closed, so none that starts inside it is a whole answer either
            return found
        found = text[start + len(opener) : at - 1].strip()
        start = text.find(opener, at)
    return found


def _last_tag(text: str) -> str | None:
    stop = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(stop, 0))
    return text[start + len("<answer>") : stop].strip() if start >= 0 else None
