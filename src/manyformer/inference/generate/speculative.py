"""Decoding with drafts: a model reads the tokens that a drafter proposes together, and keeps those it agrees with.

The method is that of Leviathan et al. 2023 (arXiv:2211.17192) and Chen et al. 2023 (arXiv:2302.01318); with the model's
own layers as the drafter it is that of Stern et al. 2018 (arXiv:1811.03115)."""

import math
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.base.errors import UserError
from manyformer.inference.generate.decoding import StepChoice
from manyformer.inference.generate.draft_acceptance import AcceptanceRule, GreedyAcceptance, SampledAcceptance
from manyformer.inference.generate.drafters import DraftedToken, Drafter, VerifiedText
from manyformer.inference.generate.logits_processors import LogitsFn
from manyformer.inference.generate.result import DraftCounts, Hypothesis, StreamPiece
from manyformer.inference.generate.rewindable_feed import MAX_REREAD, RewindableFeed
from manyformer.inference.generate.sampling import DecodeBatch, DecodedRow, TextReading, nothing_to_choose


@final
class SpeculativeDecoder:
    """Decodes one row by drafts of up to `count` tokens: call `advance` until `is_done`, in `torch.inference_mode()`.

    Greedy texts are those without drafts, up to ties and the rounding of calls with several tokens; sampled texts have
    the same distribution, but are others for the same seed."""

    def __init__(
        self, batch: DecodeBatch, choice: StepChoice, reading: TextReading, drafter: Drafter, count: int
    ) -> None:
        assert isinstance(batch.feed, RewindableFeed)
        self.batch = batch
        self.feed = batch.feed
        self.drafter = drafter
        self.count = count
        self.reading = reading
        self.seeds = choice.seeds(1)
        device = batch.tokens.device
        # greedy choices need no random numbers
        is_greedy = choice.draws(self.seeds, 1, device) is None
        self.rule: AcceptanceRule = GreedyAcceptance() if is_greedy else SampledAcceptance(self.seeds[0])
        self.row = DecodedRow(0, 0, batch.limits[0], reading)
        self.stop_ids = frozenset(batch.stop_ids)
        self.prompt_length = self.end = batch.tokens.shape[1]
        self.limits = torch.tensor(batch.limits, device=device)
        # drafts stand behind the text while they are verified
        self.tokens = batch.tokens.new_zeros(1, self.prompt_length + batch.limits[0] + count)
        self.tokens[:, : self.prompt_length] = batch.tokens
        self.hidden: Float[Tensor, "1 n d"] | None = None
        self.logits_fns: list[LogitsFn] = []
        self.new_tokens = self.cache_bytes = 0
        self.counts = DraftCounts()

    @property
    def is_done(self) -> bool:
        """Whether the row has ended."""
        return self.row.finish is not None

    def advance(self) -> list[StreamPiece]:
        """Decode the tokens that one call of the model gives, and return their pieces."""
        if self.hidden is None:
            logits, self.logits_fns = self.batch.read_prompts(1)
            self.hidden = self.feed.hidden
            pieces = self._push(self._verify(logits, []))
        else:
            pieces = self._push(self._step(self.hidden))
        self.cache_bytes = max(self.cache_bytes, self.feed.cache_bytes)
        return pieces

    def results(self) -> list[tuple[Hypothesis, ...]]:
        """The hypothesis of the prompt."""
        return [(self.row.hypothesis(self.reading.tokenizer),)]

    def _step(self, hidden: Float[Tensor, "1 n d"]) -> list[int]:
        """The tokens of one call of the model, of which all but the last were drafted."""
        text = self.tokens[:, : self.end]
        # the last token of the text is never drafted
        wanted = min(self.count, self.row.limit - len(self.row.tokens) - 1)
        drafts = self.drafter.draft(VerifiedText(text, hidden), wanted, self._choose_draft) if wanted else []
        self._write([draft.token for draft in drafts])
        read = self.feed.read(self.tokens[:, self.feed.length : self.end + len(drafts)], len(drafts) + 1)
        tokens = self._verify(read.logits, drafts)
        accepted = len(tokens) - 1
        self.counts = self.counts.plus(DraftCounts(1, len(drafts), accepted))
        self.feed.keep(self.end + accepted - self.feed.length)
        if self.end + accepted - self.feed.length > MAX_REREAD:
            unread = self.tokens[:, self.feed.length : self.end + accepted]
            self.feed.read(unread, 1)
            self.feed.keep(unread.shape[1])
        # of the text's last token, and of the drafts that stand
        start = read.hidden.shape[1] - len(drafts) - 1
        self.hidden = read.hidden[:, start : start + len(tokens)]
        return tokens

    def _push(self, tokens: list[int]) -> list[StreamPiece]:
        """Append tokens to the row, until it ends."""
        self._write(tokens)
        pieces: list[StreamPiece] = []
        for token in tokens:
            if self.is_done:
                break
            self.new_tokens += 1
            self.end += 1
            pieces.append(self.row.push(token, self.stop_ids))
        return pieces

    def _write(self, tokens: list[int]) -> None:
        """Put tokens behind the text."""
        self.tokens[0, self.end : self.end + len(tokens)] = self.tokens.new_tensor(tokens)

    def _choose_draft(self, logits: Float[Tensor, "1 v"], drafted: list[int]) -> DraftedToken:
        self._write(drafted)
        return self.rule.draft(self._processed(logits, self.end + len(drafted)))

    def _verify(self, logits: Float[Tensor, "n v"], drafts: list[DraftedToken]) -> list[int]:
        """The tokens that stand, by logits of what follows the text and each of its drafts."""
        if self.logits_fns or self.batch.forced is not None:
            logits = torch.cat([self._processed(row[None], self.end + index) for index, row in enumerate(logits)])
        tokens = self.rule.verify(logits, drafts)
        scores = logits.amax(-1)[: len(tokens)].tolist()
        for index, score in enumerate(scores):
            if not math.isfinite(score):
                position = f"prompt 0 after {len(self.row.tokens) + index} new tokens"
                raise UserError(nothing_to_choose(position))
        return tokens

    def _processed(self, logits: Float[Tensor, "1 v"], column: int) -> Float[Tensor, "1 v"]:
        """The logits of the token in a column, as the processors change them."""
        for process in self.logits_fns:
            logits = process(logits, self.tokens[:, :column])
        if self.batch.forced is not None:
            logits = self.batch.forced(logits, column - self.prompt_length + 1, self.limits)
        return logits
