"""The text of single tokens, as people read them: special ones by name, the bytes of one character together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rollout.episodes.tokenizer import AgentTokenizer

_BROKEN = "\ufffd"
"""How a decoder writes bytes that are no whole character."""
_MOST_PIECES = 8
"""So many tokens are one character at most: one of four bytes, and more where a decoder writes each byte twice."""


class Pieces:
    """The texts of the tokens of one vocabulary; each token is decoded once."""

    def __init__(self, tokenizer: AgentTokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def text(self, id: int) -> str:
        """Its text within a line, for decoders drop the space before a first word; its number, if it has no text."""
        if id not in self._texts:
            once = self._tokenizer.raw([id])
            twice = self._tokenizer.raw([id, id])
            self._texts[id] = (twice[len(once) :] if twice.startswith(once) else once) or f"⟨{id}⟩"
        return self._texts[id]

    def joined(self, ids: Sequence[int]) -> Iterator[tuple[int, str]]:
        """Where several tokens make up characters: their text at the first of them, none at the others."""
        place = 0
        while place < len(ids):
            count, text = self._character(ids[place : place + _MOST_PIECES])
            if count > 1:
                yield place, text
                yield from ((other, "") for other in range(place + 1, place + count))
            place += count

    def _character(self, ids: Sequence[int]) -> tuple[int, str]:
        """How many of the first ids are whole characters together, and their text."""
        first = self.text(ids[0])
        for count in range(2, len(ids) + 1 if _BROKEN in first else 0):
            text = self._tokenizer.raw(ids[:count])
            if _BROKEN not in text:
                return count, text
        return 1, first

    def of(self, ids: Sequence[int]) -> list[str]:
        """The text of each token; one after another they are the whole text."""
        joined = dict(self.joined(ids))
        return [joined.get(place, self.text(id)) for place, id in enumerate(ids)]
