"""Text that can be encoded. JSON may name half of a surrogate pair (`"\\ud83d"`, half of an emoji), and Python reads it
into a text that no tokenizer takes and no message can carry."""

from __future__ import annotations

import json
from typing import Any

_ESCAPED = ("\\ud", "\\uD")  # as halves are written


def whole(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class Mender:
    """Makes texts whole, and counts those that were not."""

    def __init__(self) -> None:
        self.count = 0

    def text(self, text: str) -> str:
        found = whole(text)
        self.count += found != text
        return found

    def json(self, text: str) -> str:
        """JSON text, whose escapes may name a half as well; what is no JSON is a text like any other."""
        if any(escape in text for escape in _ESCAPED):
            try:
                value = json.loads(text)
            except (ValueError, RecursionError):
                return self.text(text)
            before = self.count
            found = self.value(value)
            return text if self.count == before else json.dumps(found, ensure_ascii=False)
        return self.text(text)

    def value(self, value: Any) -> Any:
        """Plain data, with all texts in it and the names of its fields."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(each) for each in value]
        if isinstance(value, dict):
            return {self.value(name): self.value(each) for name, each in value.items()}
        return value
