"""One call of `generate`: its checked inputs (`DecodePlan`) and the loop over its batches (`DecodeJob`)."""

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
from manyformer.generate.prompts import SpecialTokens, pad_left, pad_right, special_tokens
from manyformer.generate.protocol import GenerativeModelProtocol, TokenizerProtocol, TranslatesText, model_device
from manyformer.generate.result import GenerationStats, Hypothesis, StreamPiece
from manyformer.generate.sampling import DecodeBatch, StepwiseDecoder, TextReading
from manyformer.generate.token_choice import BeamSettings, SampledChoice
from manyformer.recipes.registry import card_of
from manyformer.training_hooks import eval_mode

TokenizerChoice = TokenizerProtocol | tuple[TokenizerProtocol, TokenizerProtocol]
"""One tokenizer, or the pair of the source's and the target's tokenizers."""


class ReadWriteTokenizers(NamedTuple):
    """The tokenizer of the prompts or sources, and that of the generated text."""

    read: TokenizerProtocol | None
    write: TokenizerProtocol | None


def read_write_tokenizers(tokenizer: TokenizerChoice | None) -> ReadWriteTokenizers:
    """The tokenizers of both sides; a single tokenizer is used for both."""
    return (
        ReadWriteTokenizers(*tokenizer) if isinstance(tokenizer, tuple) else ReadWriteTokenizers(tokenizer, tokenizer)
    )


class CacheDecision(NamedTuple):
    """Whether decoding uses the model's state, and a description of it for the statistics."""

    enabled: bool
    description: str


def decide_caching(model: GenerativeModelProtocol, *, use_cache: bool | None) -> CacheDecision:
    """Decide whether to decode with the model's state, which needs a recipe that promises `incremental_decoding`.

    Raises UserError if `use_cache` is True and the recipe does not promise it.
    """
    spec = getattr(model, "spec", None)
    card = None if spec is None else card_of(spec)
    if use_cache is False:
        return CacheDecision(enabled=False, description="without cache")
    if card is None or "incremental_decoding" in card.promises:
        return CacheDecision(enabled=True, description="with cache")
    reason = card.reasons["incremental_decoding"]
    if use_cache:
        raise UserError(f"{card.name} cannot use a cache ({reason}): leave use_cache out or make it False")
    return CacheDecision(enabled=False, description=f"without cache ({reason})")


@dataclass(frozen=True)
class DecodePlan:
    """The inputs of one decoding: model, prompt rows, the most new tokens of each row (`limits`) and the options."""

    model: GenerativeModelProtocol
    rows: list[list[int]]
    limits: list[int]
    decoding: Decoding
    tokenizer: TokenizerProtocol | None
    streaming: bool = False

    def make_batch(
        self, rows: list[list[int]], limits: list[int], special: SpecialTokens, *, cached: bool
    ) -> DecodeBatch:
        """Make the batch of these rows; an encoder-decoder encodes its sources here."""
        processors: tuple[LogitsProcessor, ...] = self.decoding.processors
        if special.banned_ids:
            processors = (BanTokensProcessor(special.banned_ids), *processors)
        device = model_device(self.model)
        if isinstance(self.model, TranslatesText):
            source = pad_right(rows, device)
            start_tokens = torch.full((len(rows), 1), special.bos or 0, device=device)
            # beam search copies the state at every step, and a reserved capacity would be copied with it
            capacity = None if isinstance(self.decoding.choice, BeamSettings) else 1 + max(limits)
            pair_feed: LogitsFeed = (
                CachedPairFeed(self.model, source, capacity) if cached else UncachedPairFeed(self.model, source)
            )
            return DecodeBatch(pair_feed, start_tokens, limits, special.stop_ids, processors)
        tokens = pad_left(rows, device)
        capacity = None if isinstance(self.decoding.choice, BeamSettings) else tokens.shape[1] + max(limits)
        text_feed: LogitsFeed = (
            CachedTextFeed(self.model, len(rows), capacity) if cached else UncachedTextFeed(self.model)
        )
        return DecodeBatch(text_feed, tokens, limits, special.stop_ids, processors)


@final
class DecodeJob:
    """Decodes a plan, `batch_size` rows at a time: iterating yields the pieces and fills `answers` and `stats`."""

    def __init__(self, plan: DecodePlan, batch_size: int) -> None:
        self.plan, self.batch_size = plan, batch_size
        self.cache = decide_caching(plan.model, use_cache=plan.decoding.use_cache)
        self.special = special_tokens(plan.model, plan.tokenizer, plan.decoding)
        if plan.decoding.stop and plan.tokenizer is None:
            raise UserError("stop strings need a tokenizer: give tokenizer=, or stop_ids")
        if plan.streaming and isinstance(plan.decoding.choice, BeamSettings):
            raise UserError("beam search selects its hypotheses only at the end, so there is nothing to stream")
        self.answers: list[tuple[Hypothesis, ...]] = []
        self.seeds: list[int] = []
        self.seconds, self.new_tokens, self.cache_bytes = 0.0, 0, 0

    def __iter__(self) -> Iterator[StreamPiece]:
        with eval_mode(self.plan.model):
            for start in range(0, len(self.plan.rows), self.batch_size):
                yield from self._decode_batch(start)

    @property
    def stats(self) -> GenerationStats:
        prompt_tokens = sum(map(len, self.plan.rows))
        return GenerationStats(
            len(self.plan.rows), prompt_tokens, self.new_tokens, self.seconds, self.cache_bytes, self.cache.description
        )

    def _decode_batch(self, start: int) -> Iterator[StreamPiece]:
        batch_rows = slice(start, start + self.batch_size)
        started = time.perf_counter()
        # never around a yield: inference mode would stay active in the code that consumes the pieces
        with torch.inference_mode():
            decoder = self._make_decoder(self.plan.rows[batch_rows], self.plan.limits[batch_rows])
        self.seconds += time.perf_counter() - started
        while not decoder.is_done:
            started = time.perf_counter()
            with torch.inference_mode():
                pieces = decoder.advance()
            self.seconds += time.perf_counter() - started
            for piece in pieces:
                yield piece._replace(row=start + piece.row) if start else piece
        self.answers += decoder.results()
        self.new_tokens += decoder.new_tokens
        self.cache_bytes = max(self.cache_bytes, decoder.cache_bytes)

    def _make_decoder(self, rows: list[list[int]], limits: list[int]) -> StepwiseDecoder | BeamSearch:
        plan, choice = self.plan, self.plan.decoding.choice
        batch = plan.make_batch(rows, limits, self.special, cached=self.cache.enabled)
        if isinstance(choice, BeamSettings):
            return BeamSearch(batch, choice, plan.tokenizer)
        decoder = StepwiseDecoder(batch, choice, TextReading(plan.tokenizer, plan.decoding.stop, plan.streaming))
        if isinstance(choice, SampledChoice):
            self.seeds += decoder.seeds
        return decoder
