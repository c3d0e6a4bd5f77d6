"""One call of `generate`, checked and cut into batches, and the loop over them."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, final

import torch

from manyformer.errors import UserError
from manyformer.generate.beam import BeamSearch
from manyformer.generate.decoding import Decoding
from manyformer.generate.feeds import CachedPair, CachedText, Feed, WholePair, WholeText
from manyformer.generate.picking import Beam, Sample
from manyformer.generate.prompts import Specials, left_padded, right_padded, specials
from manyformer.generate.protocol import Model, Translates, Words, device_of
from manyformer.generate.result import Hypothesis, Piece, Stats
from manyformer.generate.sampling import Job, Reading, Sampling
from manyformer.generate.shaping import Ban, Shaping
from manyformer.hooks import evaluating
from manyformer.recipes.registry import card_of

Tokenizers = Words | tuple[Words, Words]
"""One tokenizer for everything, or the source's and the target's."""


class Sides(NamedTuple):
    """The tokenizers of what is read and of what is written."""

    read: Words | None
    write: Words | None


def sides(tokenizer: Tokenizers | None) -> Sides:
    """The same tokenizer for both sides where only one is given."""
    return Sides(*tokenizer) if isinstance(tokenizer, tuple) else Sides(tokenizer, tokenizer)


class Caching(NamedTuple):
    """Whether the model's state is used, and how that is told."""

    used: bool
    told: str


def caching(model: Model, *, wanted: bool | None) -> Caching:
    """A model that does not promise that going on from its state changes nothing is used without it.

    Raises UserError where a cache is demanded all the same.
    """
    spec = getattr(model, "spec", None)
    card = None if spec is None else card_of(spec)
    if wanted is False:
        return Caching(used=False, told="without cache")
    if card is None or card.streams:
        return Caching(used=True, told="with cache")
    why = card.because["streams"]
    if wanted:
        raise UserError(f"{card.name} cannot use a cache ({why}): leave use_cache out or make it False")
    return Caching(used=False, told=f"without cache ({why})")


@dataclass(frozen=True)
class Plan:
    """What to decode and how; `limits` says how many new tokens each row may get."""

    model: Model
    rows: list[list[int]]
    limits: list[int]
    decoding: Decoding
    words: Words | None
    live: bool = False

    def job(self, rows: list[list[int]], limits: list[int], marks: Specials, *, cached: bool) -> Job:
        """One batch of it; an encoder-decoder reads the source here."""
        shape: tuple[Shaping, ...] = (Ban(marks.ban), *self.decoding.shape) if marks.ban else self.decoding.shape
        device = device_of(self.model)
        if isinstance(self.model, Translates):
            source = right_padded(rows, device)
            begin = torch.full((len(rows), 1), marks.begin or 0, device=device)
            # a beam is copied at every step, so that reserved room would be copied with it
            room = None if isinstance(self.decoding.pick, Beam) else 1 + max(limits)
            pair: Feed = CachedPair(self.model, source, room) if cached else WholePair(self.model, source)
            return Job(pair, begin, limits, marks.ends, shape)
        tokens = left_padded(rows, device)
        room = None if isinstance(self.decoding.pick, Beam) else tokens.shape[1] + max(limits)
        text: Feed = CachedText(self.model, len(rows), room) if cached else WholeText(self.model)
        return Job(text, tokens, limits, marks.ends, shape)


@final
class Work:
    """Does a plan, `size` rows at a time; iterating gives the pieces, and afterwards the answers and what it took."""

    def __init__(self, plan: Plan, size: int) -> None:
        self.plan, self.size = plan, size
        self.cache = caching(plan.model, wanted=plan.decoding.use_cache)
        self.marks = specials(plan.model, plan.words, plan.decoding)
        if plan.decoding.stop and plan.words is None:
            raise UserError("stop strings need a tokenizer: give tokenizer=, or stop_ids")
        if plan.live and isinstance(plan.decoding.pick, Beam):
            raise UserError("beam search knows its answer only at the end, so there is nothing to stream")
        self.answers: list[tuple[Hypothesis, ...]] = []
        self.seeds: list[int] = []
        self.seconds, self.new_tokens, self.kept = 0.0, 0, 0

    def __iter__(self) -> Iterator[Piece]:
        with evaluating(self.plan.model):
            for first in range(0, len(self.plan.rows), self.size):
                yield from self._batch(first)

    @property
    def stats(self) -> Stats:
        prompt_tokens = sum(map(len, self.plan.rows))
        return Stats(len(self.plan.rows), prompt_tokens, self.new_tokens, self.seconds, self.kept, self.cache.told)

    def _batch(self, first: int) -> Iterator[Piece]:
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

    def _search(self, rows: list[list[int]], limits: list[int]) -> Sampling | BeamSearch:
        plan, pick = self.plan, self.plan.decoding.pick
        job = plan.job(rows, limits, self.marks, cached=self.cache.used)
        if isinstance(pick, Beam):
            return BeamSearch(job, pick, plan.words)
        sampling = Sampling(job, pick, Reading(plan.words, plan.decoding.stop, plan.live))
        if isinstance(pick, Sample):
            self.seeds += sampling.seeds
        return sampling
