"""Incremental conversion of tokens to text, with stop strings that may span tokens."""

from typing import final

from manyformer.generate.protocol import TokenizerProtocol


@final
class StopStringStream:
    """The text of one row, token by token; `stopped` once it contains a stop string, in front of which it ends."""

    def __init__(self, tokenizer: TokenizerProtocol, stop_strings: tuple[str, ...]) -> None:
        self.decoder = tokenizer.stream()
        self.stop_strings = stop_strings
        self.text = ""
        self.emitted = 0
        self.stopped = False

    def push(self, token: int) -> str:
        """Append one token and return the text that can no longer be part of a stop string."""
        return self._append(self.decoder.push(token))

    def finish(self) -> str:
        """Return the text that was held back, after the last token."""
        return self._append(self.decoder.finish()) + self._emit(len(self.text))

    def _append(self, new_text: str) -> str:
        if self.stopped:
            return ""
        old_length = len(self.text)
        self.text += new_text
        starts = {stop: self.text.find(stop, max(0, old_length - len(stop) + 1)) for stop in self.stop_strings}
        # the stop string that is complete first, so that the result does not depend on token boundaries
        if matches := [(start + len(stop), start) for stop, start in starts.items() if start >= 0]:
            self.text = self.text[: min(matches)[1]]
            self.stopped = True
            return self._emit(len(self.text))
        held_back = max((_partial_stop_length(self.text, stop) for stop in self.stop_strings), default=0)
        return self._emit(len(self.text) - held_back)

    def _emit(self, end: int) -> str:
        start = self.emitted
        self.emitted = max(self.emitted, end)
        return self.text[start : self.emitted]


def _partial_stop_length(text: str, stop: str) -> int:
    """The length of the longest proper prefix of `stop` that `text` ends with."""
    return next((length for length in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:length])), 0)
