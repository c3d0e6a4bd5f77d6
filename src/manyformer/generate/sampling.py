"""Token by token: greedy decoding and sampling, with as little as possible around each call of the model."""

import math
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.errors import UserError
from manyformer.generate.logits_processors import LogitsFn, LogitsProcessor
from manyformer.generate.next_token import LogitsFeed
from manyformer.generate.protocol import TokenizerProtocol
from manyformer.generate.result import FinishReason, Hypothesis, StreamPiece
from manyformer.generate.text_stream import StopStringStream
from manyformer.generate.token_choice import StepChoice

GLANCE = 16
"""On an accelerator, reading tokens back waits for it: so it is done only every so many steps."""

CROWDED = 0.75
"""Rows that have ended are dropped from the batch once no more than this share of it still grows."""


class DecodeBatch(NamedTuple):
    """One batch, ready to be decoded: the model, the beginning of each row, and how many tokens each may get."""

    feed: LogitsFeed
    tokens: Int[Tensor, "b p"]
    limits: list[int]
    ends: tuple[int, ...]
    shape: tuple[LogitsProcessor, ...]


class TextReading(NamedTuple):
    """Who reads the text while it is written: stop strings need it, and so does streaming."""

    words: TokenizerProtocol | None = None
    stops: tuple[str, ...] = ()
    streaming: bool = False


@final
class DecodedRow:
    """One row as Python sees it: its tokens so far, and whether and why it has ended."""

    def __init__(self, row: int, copy: int, limit: int, reading: TextReading) -> None:
        self.row, self.copy, self.limit = row, copy, limit
        self.tokens: list[int] = []
        self.finish: FinishReason | None = None
        watched = reading.words is not None and (reading.streaming or reading.stops)
        self.text = StopStringStream(reading.words, reading.stops) if reading.words is not None and watched else None

    def add(self, token: int, ends: frozenset[int]) -> StreamPiece:
        """Take in one more token."""
        text, end = "", token in ends
        if end:
            self.finish = "end"
        else:
            self.tokens.append(token)
            text = "" if self.text is None else self.text.add(token)
            if self.text is not None and self.text.stopped:
                self.finish = "stop"
            elif len(self.tokens) == self.limit:
                self.finish = "limit"
        if self.finish and self.text is not None:
            text += self.text.close()
        return StreamPiece(self.row, None if end else token, text, self.copy, self.finish)

    def result(self, words: TokenizerProtocol | None) -> Hypothesis:
        """What has become of the row."""
        text = self.text.text if self.text is not None else None if words is None else words.decode(self.tokens)
        return Hypothesis(self.tokens, text, None, self.finish or "limit")


@final
class StepwiseDecoder:
    """Decodes one batch with a `StepChoice`: call `advance` until `over`, under `torch.inference_mode()`."""

    def __init__(self, job: DecodeBatch, pick: StepChoice, reading: TextReading) -> None:
        self.job, self.reading, self.ends = job, reading, frozenset(job.ends)
        prompts, self.begin = job.tokens.shape
        self.seeds = pick.seeds(prompts)
        self.copies = len(self.seeds) // prompts
        room = max(job.limits)
        device = job.tokens.device
        self.chooser = pick.chooser(self.seeds, room, device)
        self.lines = [
            DecodedRow(r, c, limit, reading) for r, limit in enumerate(job.limits) for c in range(self.copies)
        ]
        self.live = list(self.lines)
        self.tokens = job.tokens.new_zeros(len(self.lines), self.begin + room)
        self.tokens[:, : self.begin] = job.tokens.repeat_interleave(self.copies, 0)
        # chosen but not yet read back: the tokens, and the numbers that tell whether there was a choice
        self.unread: list[tuple[Tensor, Tensor]] = []
        self.shape: list[LogitsFn] = []
        self.at = self.read = self.begin
        self.glance = 1 if device.type == "cpu" or reading.streaming or reading.stops else GLANCE
        self.nearest = min(job.limits)
        self.due = self._next_look()
        self.new_tokens = self.kept = 0

    @property
    def over(self) -> bool:
        """Whether every row has ended."""
        return not self.live

    def advance(self) -> list[StreamPiece]:
        """One more token for every row that has not ended."""
        at = self.at
        logits = self._first() if at == self.begin else self.job.feed(self.tokens, at)
        if self.shape:
            history = self.tokens[:, :at]
            for shape in self.shape:
                logits = shape(logits, history)
        chosen = self.chooser(logits, at - self.begin)
        self.tokens[:, at] = chosen[0]
        self.unread.append(chosen)
        self.at = at + 1
        return self._look() if self.at >= self.due else []

    def results(self) -> list[tuple[Hypothesis, ...]]:
        """For each prompt its answers."""
        found = [line.result(self.reading.words) for line in self.lines]
        return [tuple(found[i : i + self.copies]) for i in range(0, len(found), self.copies)]

    def _first(self) -> Float[Tensor, "r v"]:
        """Read the prompts, each once however many answers it gets."""
        logits = self.job.feed(self.job.tokens, self.begin)
        self.shape = [shaping.ready(logits.shape[-1], logits.device) for shaping in self.job.shape]
        if self.copies > 1:
            rows = torch.arange(logits.shape[0], device=logits.device).repeat_interleave(self.copies)
            self.job.feed.take(rows)
            logits = logits.index_select(0, rows)
        self.kept = self.job.feed.cache_bytes
        return logits

    def _look(self) -> list[StreamPiece]:
        """Read back what was chosen since the last time."""
        tokens, sure = zip(*self.unread)
        # one step is read as it is: stacking would cost more than all the rest of this function
        steps = [tokens[0].tolist()] if len(tokens) == 1 else torch.stack(tokens).tolist()
        certain = [sure[0].tolist()] if len(sure) == 1 else torch.stack(sure).tolist()
        self.unread, self.read = [], self.at
        pieces: list[StreamPiece] = []
        for new, numbers in zip(steps, certain):
            for line, token, number in zip(self.live, new, numbers):
                if line.finish:
                    continue
                if not math.isfinite(number):
                    raise UserError(self._no_choice(line))
                self.new_tokens += 1
                pieces.append(line.add(token, self.ends))
        growing = [number for number, line in enumerate(self.live) if not line.finish]
        # a row at its limit may be at the model's too: it must not be fed again
        full = any(line.finish == "limit" for line in self.live)
        if full or len(growing) <= CROWDED * len(self.live):
            self._keep(growing)
        self.due = self._next_look()
        return pieces

    def _next_look(self) -> int:
        """The column before which tokens must be read back: no row may grow beyond its limit unseen."""
        return min(self.read + self.glance, self.begin + self.nearest)

    def _keep(self, growing: list[int]) -> None:
        self.kept = max(self.kept, self.job.feed.cache_bytes)
        self.live = [self.live[number] for number in growing]
        if growing:
            self.nearest = min(line.limit for line in self.live)
            rows = torch.tensor(growing, device=self.tokens.device)
            self.job.feed.take(rows)
            self.chooser.take(rows)
            self.tokens = self.tokens.index_select(0, rows)

    def _no_choice(self, line: DecodedRow) -> str:
        where = f"prompt {line.row} after {len(line.tokens)} new tokens"
        return f"there is nothing to choose from for {where}: the logits are not finite, or every token is forbidden"
