"""Translation of many sentences: sorted by length into batches of about equal size, returned in the original order."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import final

from manyformer.errors import UserError
from manyformer.generate.decode_job import DecodeJob, TokenizerChoice, read_write_tokenizers
from manyformer.generate.decoding import Decoding
from manyformer.generate.prompts import TokenPrompts, check_tokens, read_prompts, read_vocab
from manyformer.generate.protocol import TranslatesText
from manyformer.generate.result import GenerationStats, Hypothesis
from manyformer.generate.token_choice import BeamSettings

SORTED_SENTENCES = 1024
"""Sentences that are read and sorted by length together."""

BATCH_TOKENS = 4096
"""Source tokens in a batch, including padding, times the width of the beam."""


@final
class Translator:
    """Translates texts with one model; `stats` are the totals of all calls."""

    def __init__(
        self,
        model: TranslatesText,
        *,
        tokenizer: TokenizerChoice,
        decoding: Decoding | None = None,
        tokens: int = BATCH_TOKENS,
        window: int = SORTED_SENTENCES,
    ) -> None:
        if tokens < 1 or window < 1:
            raise UserError(f"tokens and window must be 1 or more, got {tokens} and {window}")
        self.model = model
        self.tokenizers = read_write_tokenizers(tokenizer)
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
        while chunk := list(islice(remaining, self.window)):
            yield from self._translate_chunk(chunk)
            self.lines_read += len(chunk)

    def _translate_chunk(self, chunk: list[str]) -> Iterator[tuple[Hypothesis, ...]]:
        texts = {index: text for index, text in enumerate(chunk) if text.strip()}
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


def translate(
    model: TranslatesText, sentences: Iterable[str], *, tokenizer: TokenizerChoice, decoding: Decoding | None = None
) -> list[str]:
    """The best translation of each sentence; by default by beam search of width 4 with Vaswani's length penalty."""
    translator = Translator(model, tokenizer=tokenizer, decoding=decoding)
    return [answers[0].text or "" for answers in translator(sentences)]
