"""The text of a turn while it is being sampled: what of its reasoning and its content is certain already.

Nothing is taken back: no half of a character, no beginning of a stop text or of a marker is told. The text that was put
together here, piece by piece, is the turn's text to the end.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollout.episodes.parsing import LiveParser, TurnReader, without_beginning

_HALF = "\ufffd"  # what decoding gives for a character whose last bytes are still to come


class LiveTurn:
    """`grew` at every piece; `text` is that of the whole turn once it has ended."""

    def __init__(self, reader: TurnReader, begun: str, stop: Sequence[str]) -> None:
        """begun: as `TurnReader.begun` says. stop: texts that end the turn."""
        self.reasoning = ""
        self.content = ""
        self._tokenizer = reader.tokenizer
        self._so_far = reader.parser.so_far if isinstance(reader.parser, LiveParser) else None
        self._begun = begun
        self._stop = stop

        self._ids: list[int] = []
        self._text = ""  # of the ids before `_next`
        self._last = 0  # where the piece before began: some decoders read a token by those before it
        self._next = 0

    def grew(self, ids: Sequence[int]) -> bool:
        """These ids follow. Whether there is more to tell."""
        self._ids += ids
        if self._so_far is None or not self._decode():
            return False

        text = min((self._text.partition(each)[0] for each in self._stop), key=len, default=self._text)
        if len(text) == len(self._text):
            text = without_beginning(text, self._stop)
        told = self._so_far(self._begun + text)
        before = len(self.reasoning) + len(self.content)
        self.reasoning = told.reasoning
        self.content = told.content
        return len(told.reasoning) + len(told.content) > before

    def text(self) -> str:
        """The text of the whole turn."""
        self._decode(ended=True)
        return self._text

    def _decode(self, ended: bool = False) -> bool:
        """Whether there is more text; a character that is not complete waits for its end."""
        known = self._tokenizer.turn_text(self._ids[self._last : self._next])
        text = self._tokenizer.turn_text(self._ids[self._last :])
        if len(text) <= len(known) or (text.endswith(_HALF) and not ended):
            return False
        self._text += text[len(known) :]
        self._last = self._next
        self._next = len(self._ids)
        return True
