"""Where a model's answer stands in what it wrote: behind its thought, between the last pair of tags of one name."""

from __future__ import annotations

import re
from functools import cache

from rollout.episodes.parsing import answer_of as answer_of


@cache
def _pattern(tag: str) -> re.Pattern[str]:
    return re.compile(rf"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>", re.DOTALL | re.IGNORECASE)


def tagged(text: str, tag: str) -> str | None:
    """What stands in the last closed `<tag>...</tag>`, without the white space around it; None: there is none.

    A tag inside the thought of a turn is a draft and does not count.
    """
    text = answer_of(text)
    if f"</{tag}>" not in text.lower():  # a pattern that searches a long text for an end that is not there is slow
        return None
    found = _pattern(tag).findall(text)
    return found[-1].strip() if found else None
