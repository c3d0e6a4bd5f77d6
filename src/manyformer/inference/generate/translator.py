"""What an encoder-decoder writes for its sources: translations of many sentences, and texts for images and recordings.

Sentences are sorted by length into batches of about equal size, and their translations returned in the original order;
where the encoder also has CTC, hypotheses of a beam are ranked by both."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, final

import torch

from manyformer.base.errors import UserError
from manyformer.inference.generate.decoding import BeamSettings, Decoding
from manyformer.inference.generate.generate import DecodeJob, TokenizerChoice, read_write_tokenizers
from manyformer.inference.generate.prompts import (
    SourceBatch,
    SourcePrompts,
    TokenPrompts,
    check_tokens,
    read_prompts,
    read_vocab,
)
from manyformer.inference.generate.protocol import TranslatesText
from manyformer.inference.generate.result import GenerationResult, GenerationStats, Hypothesis

SORTED_SENTENCES = 1024
"""Sentences that are read and sorted by length together."""

BATCH_TOKENS = 4096
"""Source tokens in a batch, including padding, times the width of the beam."""


def translate(
    model: TranslatesText,
    sentences: Iterable[str],
    *,
    tokenizer: TokenizerChoice | None = None,
    decoding: Decoding | None = None,
) -> list[str]:
    """The best translation of each sentence; by default by beam search of width 4 with Vaswani's length penalty.

    The tokenizers are the model's own unless given."""
    translator = Translator(model, tokenizer=tokenizer, decoding=decoding)
    return [answers[0].text or "" for answers in translator(sentences)]


@final
class Translator:
    """Translates texts with one model; `stats` are the totals of all calls."""

    def __init__(
        self,
        model: TranslatesText,
        *,
        tokenizer: TokenizerChoice | None = None,
        decoding: Decoding | None = None,
        tokens: int = BATCH_TOKENS,
        window: int = SORTED_SENTENCES,
    ) -> None:
        if tokens < 1 or window < 1:
            raise UserError(f"tokens and window must be 1 or more, got {tokens} and {window}")
        self.model = model
        self.tokenizers = read_write_tokenizers(getattr(model, "tokenizer", None) if tokenizer is None else tokenizer)
        if decoding is None:
            self.decoding = Decoding(choice=BeamSettings())
        else:
            self.decoding = decoding
        self.tokens = tokens
        self.window = window
        self.stats = GenerationStats(0, 0, 0, 0.0, 0, "")
        self.lines_read = 0

    def __call__(self, sentences: Iterable[str]) -> Iterator[tuple[Hypothesis, ...]]:
        """Yield the hypotheses of each sentence, in order; a blank line has one empty hypothesis.

        Raises UserError with the number (from 1) of a line that is longer than the model allows.
        """
        remaining = iter(sentences)
        # enough to sort by length, and few enough that a pipe is answered while it is read
        while chunk := list(islice(remaining, self.window)):
            yield from self._translate_chunk(chunk)
            self.lines_read += len(chunk)

    def _translate_chunk(self, chunk: list[str]) -> Iterator[tuple[Hypothesis, ...]]:
        texts = {index: text for index, text in enumerate(chunk) if text.strip()}
        # blank lines have their answer from the start; the others are replaced in any order, the order of keys stays
        answers: dict[int, tuple[Hypothesis, ...]] = dict.fromkeys(
            range(len(chunk)), (Hypothesis([], "", None, "end"),)
        )
        if texts:
            rows = dict(zip(texts, read_prompts(list(texts.values()), self.tokenizers.read, source=True)))
            self._check_lengths(rows)
            for batch in self._batches(rows):
                answers.update(self._translate_batch(batch))
        return iter(answers.values())

    def _check_lengths(self, rows: dict[int, list[int]]) -> None:
        max_length = self.model.max_length
        for index, row in rows.items():
            if max_length is not None and len(row) > max_length:
                line_number = self.lines_read + index + 1
                raise UserError(f"line {line_number} has {len(row)} tokens, but the model allows at most {max_length}")
        check_tokens(list(rows.values()), read_vocab(self.model))

    def _batches(self, rows: dict[int, list[int]]) -> Iterator[dict[int, list[int]]]:
        """Batches of rows of similar length, the longest first, so that a lack of memory shows at once."""
        width = 1
        if isinstance(self.decoding.choice, BeamSettings):
            width = self.decoding.choice.width
        batch: dict[int, list[int]] = {}
        for index in sorted(rows, key=lambda index: len(rows[index]), reverse=True):
            max_length = len(next(iter(batch.values()), rows[index]))
            if batch and (len(batch) + 1) * max_length * width > self.tokens:
                yield batch
                batch = {}
            batch[index] = rows[index]
        yield batch

    def _translate_batch(self, batch: dict[int, list[int]]) -> Iterator[tuple[int, tuple[Hypothesis, ...]]]:
        rows = list(batch.values())
        job = DecodeJob(self.model, TokenPrompts(rows), self.decoding, self.tokenizers.write, batch_size=len(rows))
        for _ in job:
            pass
        self.stats = self.stats + job.stats
        yield from zip(batch, job.answers)


def answer_sources(
    model: TranslatesText,
    sources: SourceBatch,
    *,
    tokenizer: TokenizerChoice | None = None,
    decoding: Decoding | None = None,
    batch: int = 32,
) -> GenerationResult:
    """What an encoder-decoder writes for sources that are no tokens, such as images, `batch` rows at a time.

    The text is that of the target's `tokenizer`, by default the model's. Raises UserError."""
    tokenizers = read_write_tokenizers(getattr(model, "tokenizer", None) if tokenizer is None else tokenizer)
    decoding = Decoding() if decoding is None else decoding
    ranking = joint_ranking(model, decoding)
    job = DecodeJob(model, SourcePrompts(sources), ranking.decoding, tokenizers.write, batch_size=batch)
    for _ in job:
        pass
    return GenerationResult(tuple(ranking.rank(sources, job.answers)), job.stats, tuple(job.seeds))


@dataclass(frozen=True)
class JointRanking:
    """Ranks by weight x log p_CTC + (1 - weight) x score (Watanabe et al. 2017, section II-D, rescoring).

    `decoding` keeps all hypotheses of the beam, of which `rank` returns the `best`. A model without CTC, and decoding
    without a beam, leave the hypotheses as they are."""

    model: Any
    decoding: Decoding
    best: int | None

    def rank(self, sources: SourceBatch, answers: Sequence[tuple[Hypothesis, ...]]) -> Sequence[tuple[Hypothesis, ...]]:
        """The best hypotheses of each source, with their joint scores."""
        if self.best is None:
            return answers
        with torch.inference_mode():
            return [self._rank_row(sources, row, hypotheses) for row, hypotheses in enumerate(answers)]

    def _rank_row(self, sources: SourceBatch, row: int, hypotheses: tuple[Hypothesis, ...]) -> tuple[Hypothesis, ...]:
        source, segments = (None if part is None else part[row : row + 1].to(self.model.device) for part in sources)
        memory = self.model.encode(source, segments)
        # one source at a time: hypotheses differ in length, and CTC has no padding for them
        ctc = self.model.ctc
        scored = [
            hypothesis._replace(
                score=ctc.weight * ctc.log_probability(memory, hypothesis.tokens)
                + (1 - ctc.weight) * (hypothesis.score or 0.0)
            )
            for hypothesis in hypotheses
        ]
        return tuple(sorted(scored, key=lambda hypothesis: hypothesis.score or 0.0, reverse=True)[: self.best])


def joint_ranking(model: TranslatesText, decoding: Decoding) -> JointRanking:
    """The ranking of what a model writes."""
    choice = decoding.choice
    if getattr(model, "ctc", None) is None or not isinstance(choice, BeamSettings):
        return JointRanking(model, decoding, None)
    # the whole beam is kept, because CTC may prefer any of it
    return JointRanking(model, replace(decoding, choice=replace(choice, best=choice.width)), choice.best)
