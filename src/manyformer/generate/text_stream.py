"""From tokens to text while they arrive, and stop strings that span tokens."""

from typing import final

from manyformer.generate.protocol import TokenizerProtocol


@final
class StopStringStream:
    """Writes the text of one row; `stopped` says that one of the strings `stops` has come, where the text ends."""

    def __init__(self, words: TokenizerProtocol, stops: tuple[str, ...]) -> None:
        self.letters, self.stops = words.stream(), stops
        self.text, self.shown, self.stopped = "", 0, False

    def add(self, token: int) -> str:
        """The text that has become certain with one more token."""
        return self._show(self.letters.push(token))

    def close(self) -> str:
        """The text that was held back, now that no token follows."""
        return self._show(self.letters.finish()) + self._reveal(len(self.text))

    def _show(self, new: str) -> str:
        if self.stopped:
            return ""
        begin = len(self.text)
        self.text += new
        found = [(self.text.find(stop, max(0, begin - len(stop) + 1)), len(stop)) for stop in self.stops]
        # the one that is complete first, so that it does not matter how the text was cut into tokens
        if ends := [(at + length, at) for at, length in found if at >= 0]:
            self.text, self.stopped = self.text[: min(ends)[1]], True
            return self._reveal(len(self.text))
        held = max((_overlap(self.text, stop) for stop in self.stops), default=0)
        return self._reveal(len(self.text) - held)

    def _reveal(self, end: int) -> str:
        begin, self.shown = self.shown, max(self.shown, end)
        return self.text[begin : self.shown]


def _overlap(text: str, stop: str) -> int:
    """How many of the last letters of `text` may be the beginning of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
