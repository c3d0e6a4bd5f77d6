"""Greedy decoding and sampling, token by token, with little overhead around each call of the model.

The text of a row is read as its tokens come, because stop strings may span tokens."""

import math
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.base.errors import UserError
from manyformer.inference.generate.decoding import StepChoice
from manyformer.inference.generate.logits_processors import ForcedTokens, LogitsFn, LogitsProcessor
from manyformer.inference.generate.next_token import LogitsFeed
from manyformer.inference.generate.protocol import TokenizerProtocol
from manyformer.inference.generate.result import FinishReason, Hypothesis, StreamPiece
from manyformer.nn.runtime.devices import float64_device

READBACK_INTERVAL = 16
"""Steps between two readbacks of tokens on an accelerator, because each readback synchronizes with it."""

COMPACTION_SHARE = 0.75
"""Finished rows are removed from the batch once at most this fraction of its rows is active."""


class DecodeBatch(NamedTuple):
    """One batch to decode: the feed of logits, the prompt tokens (b, p), and the most new tokens of each row."""

    feed: LogitsFeed
    tokens: Int[Tensor, "b p"]
    limits: list[int]
    stop_ids: tuple[int, ...]
    processors: tuple[LogitsProcessor, ...]
    forced: ForcedTokens | None = None

    def read_prompts(self, repeats: int) -> tuple[Float[Tensor, "r v"], list[LogitsFn]]:
        """Feed the prompts, each once, and then repeat the rows; returns the logits and the prepared processors."""
        logits = self.feed(self.tokens, self.tokens.shape[1])
        logits_fns = [processor.prepare(logits.shape[-1], logits.device) for processor in self.processors]
        if repeats > 1:
            rows = torch.arange(logits.shape[0], device=logits.device).repeat_interleave(repeats)
            self.feed.select_rows(rows)
            # samples of a prompt share its prefill: the state is repeated after it
            logits = logits.index_select(0, rows)
        return logits, logits_fns


class TextReading(NamedTuple):
    """How the text of the rows is used during decoding: for stop strings and for streaming."""

    tokenizer: TokenizerProtocol | None = None
    stop_strings: tuple[str, ...] = ()
    streaming: bool = False


@final
class StepwiseDecoder:
    """Decodes one batch with a `StepChoice`: call `advance` until `is_done`, under `torch.inference_mode()`."""

    def __init__(self, batch: DecodeBatch, choice: StepChoice, reading: TextReading) -> None:
        self.batch = batch
        self.reading = reading
        self.stop_ids = frozenset(batch.stop_ids)
        prompts, self.prompt_length = batch.tokens.shape
        self.seeds = choice.seeds(prompts)
        self.samples = len(self.seeds) // prompts
        max_new = max(batch.limits)
        device = batch.tokens.device
        self.draws = choice.draws(self.seeds, max_new, device)
        self.rows = [
            DecodedRow(prompt_index, sample, limit, reading)
            for prompt_index, limit in enumerate(batch.limits)
            for sample in range(self.samples)
        ]
        self.active_rows = list(self.rows)
        # for forced last tokens, which a GPU chooses without asking the host how long a row may be
        self.limits = torch.tensor([row.limit for row in self.rows], device=device)
        self.tokens = batch.tokens.new_zeros(len(self.rows), self.prompt_length + max_new)
        # one buffer for prompts and new tokens: processors read it up to the current column without a copy
        self.tokens[:, : self.prompt_length] = batch.tokens.repeat_interleave(self.samples, 0)
        # chosen but not yet read back: the tokens, and the scores that are finite if there was a token to choose
        self.unread: list[tuple[Tensor, Tensor]] = []
        self.logits_fns: list[LogitsFn] = []
        self.column = self.prompt_length
        self.read_column = self.prompt_length
        needs_every_token = reading.streaming or reading.stop_strings
        if needs_every_token:
            # a streamed text and a stop string need the tokens of every step on the host
            self.readback_interval = 1
        else:
            self.readback_interval = readback_interval(device)
        self.lowest_limit = min(batch.limits)
        self.readback_column = self._next_readback_column()
        self.new_tokens = self.cache_bytes = 0

    @property
    def is_done(self) -> bool:
        """Whether every row has ended."""
        return not self.active_rows

    def advance(self) -> list[StreamPiece]:
        """Decode one more token for every active row and return the pieces that were read back."""
        column = self.column
        if column == self.prompt_length:
            logits, self.logits_fns = self.batch.read_prompts(self.samples)
            self.cache_bytes = self.batch.feed.cache_bytes
        else:
            logits = self.batch.feed(self.tokens, column)
        for process in self.logits_fns:
            logits = process(logits, self.tokens[:, :column])
        if self.batch.forced is not None:
            logits = self.batch.forced(logits, column - self.prompt_length + 1, self.limits)
        chosen = choose_tokens(logits, None if self.draws is None else self.draws[:, column - self.prompt_length])
        self.tokens[:, column] = chosen[0]
        self.unread.append(chosen)
        self.column = column + 1
        # until then a GPU works ahead: rows that have ended go on, and their further tokens are thrown away
        if self.column >= self.readback_column:
            return self._read_back()
        return []

    def results(self) -> list[tuple[Hypothesis, ...]]:
        """The hypotheses of each prompt."""
        hypotheses = [row.hypothesis(self.reading.tokenizer) for row in self.rows]
        return [tuple(hypotheses[i : i + self.samples]) for i in range(0, len(hypotheses), self.samples)]

    def _read_back(self) -> list[StreamPiece]:
        """Move the tokens chosen since the last readback to the CPU and return their pieces."""
        tokens, scores = zip(*self.unread)
        # a single step is not stacked: that would cost more than the remainder of this function
        if len(tokens) == 1:
            token_steps = [tokens[0].tolist()]
        else:
            token_steps = torch.stack(tokens).tolist()
        if len(scores) == 1:
            score_steps = [scores[0].tolist()]
        else:
            score_steps = torch.stack(scores).tolist()
        self.unread = []
        self.read_column = self.column
        pieces: list[StreamPiece] = []
        for step_tokens, step_scores in zip(token_steps, score_steps):
            for row, token, score in zip(self.active_rows, step_tokens, step_scores):
                # ended at an earlier step of those that are read now
                if row.finish:
                    continue
                if not math.isfinite(score):
                    position = f"prompt {row.prompt_index} after {len(row.tokens)} new tokens"
                    raise UserError(nothing_to_choose(position))
                self.new_tokens += 1
                pieces.append(row.push(token, self.stop_ids))
        ended = [row.finish for row in self.active_rows if row.finish]
        # a row at its limit may have reached the model's max_length: it must not be fed again
        rows = len(self.active_rows)
        if "limit" in ended or rows - len(ended) <= COMPACTION_SHARE * rows:
            self._compact([index for index, row in enumerate(self.active_rows) if not row.finish])
        self.readback_column = self._next_readback_column()
        return pieces

    def _next_readback_column(self) -> int:
        """The column at which tokens must be read back, so that no row exceeds its limit."""
        return min(self.read_column + self.readback_interval, self.prompt_length + self.lowest_limit)

    def _compact(self, active: list[int]) -> None:
        """Reduce the batch and the model's state to these active rows."""
        self.cache_bytes = max(self.cache_bytes, self.batch.feed.cache_bytes)
        self.active_rows = [self.active_rows[index] for index in active]
        if active:
            self.lowest_limit = min(row.limit for row in self.active_rows)
            rows = torch.tensor(active, device=self.tokens.device)
            self.batch.feed.select_rows(rows)
            if self.draws is not None:
                # in float64, and so on the host where the device has no such numbers
                self.draws = self.draws.index_select(0, rows.to(self.draws.device))
            self.tokens = self.tokens.index_select(0, rows)
            self.limits = self.limits.index_select(0, rows)


def choose_tokens(
    logits: Float[Tensor, "r v"], draws: Float[Tensor, " r"] | None
) -> tuple[Int[Tensor, " r"], Float[Tensor, " r"]]:
    """The most likely token of each row, or with random numbers `draws` one sampled by inversion of the cumulative sum.

    Also returns a score for each row that is finite if and only if there was a token to choose.
    """
    if draws is None:
        score, token = logits.max(-1)
        return token, score
    # summed in double precision: in a large vocabulary the last probabilities would otherwise be rounded away
    probabilities = logits.softmax(-1, dtype=torch.float32).to(float64_device(logits.device))
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    token = torch.searchsorted(cumulative, draws[:, None] * total, right=True)
    # where no token is allowed all sums are 0 or no numbers, and the search ends behind the last token
    return token[:, 0].clamp_(max=logits.shape[-1] - 1).to(logits.device), total[:, 0].float().to(logits.device)


def readback_interval(device: torch.device) -> int:
    """The steps between two readbacks where nothing needs every token at once."""
    if device.type == "cpu":
        return 1
    return READBACK_INTERVAL


def nothing_to_choose(position: str) -> str:
    """The error message where every token has the logit minus infinity."""
    return f"there is nothing to choose from for {position}: the logits are not finite, or every token is forbidden"


@final
class DecodedRow:
    """The Python-side record of one row: its tokens and, once it has ended, the reason (`finish`)."""

    def __init__(self, prompt_index: int, sample: int, limit: int, reading: TextReading) -> None:
        self.prompt_index = prompt_index
        self.sample = sample
        self.limit = limit
        self.tokens: list[int] = []
        self.finish: FinishReason | None = None
        self.text_stream: StopStringStream | None = None
        if reading.tokenizer is not None and (reading.streaming or reading.stop_strings):
            self.text_stream = StopStringStream(reading.tokenizer, reading.stop_strings)

    def push(self, token: int, stop_ids: frozenset[int]) -> StreamPiece:
        """Append one token and return the piece that it adds."""
        text = ""
        is_end = token in stop_ids
        if is_end:
            self.finish = "end"
        else:
            self.tokens.append(token)
            if self.text_stream is not None:
                text = self.text_stream.push(token)
            if self.text_stream is not None and self.text_stream.stopped:
                self.finish = "stop"
            elif len(self.tokens) == self.limit:
                self.finish = "limit"
        if self.finish and self.text_stream is not None:
            text += self.text_stream.finish()
            # the text that was held back may have a stop string, too
            self.finish = "stop" if self.text_stream.stopped else self.finish
        return StreamPiece(self.prompt_index, None if is_end else token, text, self.sample, self.finish)

    def hypothesis(self, tokenizer: TokenizerProtocol | None) -> Hypothesis:
        """The row as a `Hypothesis`."""
        text: str | None = None
        if self.text_stream is not None:
            # decoded as the tokens came, and ended before a stop string
            text = self.text_stream.text
        elif tokenizer is not None:
            text = tokenizer.decode(self.tokens)
        return Hypothesis(self.tokens, text, None, self.finish or "limit")


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
        # a stop string may begin in text of earlier tokens
        starts = {stop: self.text.find(stop, max(0, old_length - len(stop) + 1)) for stop in self.stop_strings}
        # the stop string that is complete first, so that the result does not depend on token boundaries
        if matches := [(start + len(stop), start) for stop, start in starts.items() if start >= 0]:
            self.text = self.text[: min(matches)[1]]
            self.stopped = True
            return self._emit(len(self.text))
        # what may be the beginning of a stop string is not shown yet
        held_back = max((_partial_stop_length(self.text, stop) for stop in self.stop_strings), default=0)
        return self._emit(len(self.text) - held_back)

    def _emit(self, end: int) -> str:
        start = self.emitted
        self.emitted = max(self.emitted, end)
        return self.text[start : self.emitted]


def _partial_stop_length(text: str, stop: str) -> int:
    """The length of the longest proper prefix of `stop` that `text` ends with."""
    return next((length for length in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:length])), 0)
