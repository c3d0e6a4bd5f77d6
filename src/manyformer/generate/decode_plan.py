"""One call of `generate`, checked and cut into batches, and the loop over them."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, final

import torch

from manyformer.errors import UserError
from manyformer.generate.beam_search import BeamSearch
from manyformer.generate.decoding import Decoding
from manyformer.generate.logits_processors import BanTokensProcessor, LogitsProcessor
from manyformer.generate.next_token import (
    CachedPairFeed,
    CachedTextFeed,
    LogitsFeed,
    UncachedPairFeed,
    UncachedTextFeed,
)
from manyformer.generate.prompts import SpecialTokens, left_padded, right_padded, specials
from manyformer.generate.protocol import GenerativeModelProtocol, TokenizerProtocol, TranslatesText, device_of
from manyformer.generate.result import GenerationStats, Hypothesis, StreamPiece
from manyformer.generate.sampling import DecodeBatch, StepwiseDecoder, TextReading
from manyformer.generate.token_choice import BeamSettings, SampledChoice
from manyformer.recipes.registry import card_of
from manyformer.training_hooks import eval_mode

TokenizerChoice = TokenizerProtocol | tuple[TokenizerProtocol, TokenizerProtocol]
"""One tokenizer for everything, or the source's and the target's."""


class ReadWriteTokenizers(NamedTuple):
    """The tokenizers of what is read and of what is written."""

    read: TokenizerProtocol | None
    write: TokenizerProtocol | None


def sides(tokenizer: TokenizerChoice | None) -> ReadWriteTokenizers:
    """The same tokenizer for both sides where only one is given."""
    return (
        ReadWriteTokenizers(*tokenizer) if isinstance(tokenizer, tuple) else ReadWriteTokenizers(tokenizer, tokenizer)
    )


class CacheDecision(NamedTuple):
    """Whether the model's state is used, and how that is told."""

    used: bool
    description: str


def caching(model: GenerativeModelProtocol, *, wanted: bool | None) -> CacheDecision:
    """A model that does not promise that going on from its state changes nothing is used without it.

    Raises UserError where a cache is demanded all the same.
    """
    spec = getattr(model, "spec", None)
    card = None if spec is None else card_of(spec)
    if wanted is False:
        return CacheDecision(used=False, description="without cache")
    if card is None or card.incremental_decoding:
        return CacheDecision(used=True, description="with cache")
    why = card.reasons["incremental_decoding"]
    if wanted:
        raise UserError(f"{card.name} cannot use a cache ({why}): leave use_cache out or make it False")
    return CacheDecision(used=False, description=f"without cache ({why})")


@dataclass(frozen=True)
class DecodePlan:
    """What to decode and how; `limits` says how many new tokens each row may get."""

    model: GenerativeModelProtocol
    rows: list[list[int]]
    limits: list[int]
    decoding: Decoding
    words: TokenizerProtocol | None
    streaming: bool = False

    def job(self, rows: list[list[int]], limits: list[int], marks: SpecialTokens, *, cached: bool) -> DecodeBatch:
        """One batch of it; an encoder-decoder reads the source here."""
        shape: tuple[LogitsProcessor, ...] = (
            (BanTokensProcessor(marks.ban), *self.decoding.processors) if marks.ban else self.decoding.processors
        )
        device = device_of(self.model)
        if isinstance(self.model, TranslatesText):
            source = right_padded(rows, device)
            begin = torch.full((len(rows), 1), marks.begin or 0, device=device)
            # a beam is copied at every step, so that reserved room would be copied with it
            room = None if isinstance(self.decoding.choice, BeamSettings) else 1 + max(limits)
            pair: LogitsFeed = (
                CachedPairFeed(self.model, source, room) if cached else UncachedPairFeed(self.model, source)
            )
            return DecodeBatch(pair, begin, limits, marks.ends, shape)
        tokens = left_padded(rows, device)
        room = None if isinstance(self.decoding.choice, BeamSettings) else tokens.shape[1] + max(limits)
        text: LogitsFeed = CachedTextFeed(self.model, len(rows), room) if cached else UncachedTextFeed(self.model)
        return DecodeBatch(text, tokens, limits, marks.ends, shape)


@final
class DecodeJob:
    """Does a plan, `size` rows at a time; iterating gives the pieces, and afterwards the answers and what it took."""

    def __init__(self, plan: DecodePlan, size: int) -> None:
        self.plan, self.size = plan, size
        self.cache = caching(plan.model, wanted=plan.decoding.use_cache)
        self.marks = specials(plan.model, plan.words, plan.decoding)
        if plan.decoding.stop and plan.words is None:
            raise UserError("stop strings need a tokenizer: give tokenizer=, or stop_ids")
        if plan.streaming and isinstance(plan.decoding.choice, BeamSettings):
            raise UserError("beam search knows its answer only at the end, so there is nothing to stream")
        self.answers: list[tuple[Hypothesis, ...]] = []
        self.seeds: list[int] = []
        self.seconds, self.new_tokens, self.kept = 0.0, 0, 0

    def __iter__(self) -> Iterator[StreamPiece]:
        with eval_mode(self.plan.model):
            for first in range(0, len(self.plan.rows), self.size):
                yield from self._batch(first)

    @property
    def stats(self) -> GenerationStats:
        prompt_tokens = sum(map(len, self.plan.rows))
        return GenerationStats(
            len(self.plan.rows), prompt_tokens, self.new_tokens, self.seconds, self.kept, self.cache.description
        )

    def _batch(self, first: int) -> Iterator[StreamPiece]:
        part = slice(first, first + self.size)
        clock = time.perf_counter()
        # never around a yield: the mode would leak into whoever reads the pieces
        with torch.inference_mode():
            search = self._search(self.plan.rows[part], self.plan.limits[part])
        self.seconds += time.perf_counter() - clock
        while not search.over:
            clock = time.perf_counter()
            with torch.inference_mode():
                pieces = search.advance()
            self.seconds += time.perf_counter() - clock
            for piece in pieces:
                yield piece._replace(row=first + piece.row) if first else piece
        self.answers += search.results()
        self.new_tokens += search.new_tokens
        self.kept = max(self.kept, search.kept)

    def _search(self, rows: list[list[int]], limits: list[int]) -> StepwiseDecoder | BeamSearch:
        plan, pick = self.plan, self.plan.decoding.choice
        job = plan.job(rows, limits, self.marks, cached=self.cache.used)
        if isinstance(pick, BeamSettings):
            return BeamSearch(job, pick, plan.words)
        sampling = StepwiseDecoder(job, pick, TextReading(plan.words, plan.decoding.stop, plan.streaming))
        if isinstance(pick, SampledChoice):
            self.seeds += sampling.seeds
        return sampling
