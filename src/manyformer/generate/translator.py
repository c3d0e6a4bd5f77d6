"""Many sentences through an encoder-decoder: sorted by length, in batches of about equal work, in their old order."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import final

from manyformer.errors import UserError
from manyformer.generate.decode_plan import DecodeJob, DecodePlan, TokenizerChoice, sides
from manyformer.generate.decoding import Decoding
from manyformer.generate.prompts import check_tokens, new_token_limits, read_prompts
from manyformer.generate.protocol import TranslatesText
from manyformer.generate.result import GenerationStats, Hypothesis
from manyformer.generate.token_choice import BeamSettings

WINDOW = 1024
"""Sentences that are read ahead and sorted together."""

TOKENS = 4096
"""Source tokens in a batch, padding and every sequence of the beam included."""


@final
class Translator:
    """Translates texts with one model; `stats` adds up over everything that it has translated."""

    def __init__(
        self,
        model: TranslatesText,
        *,
        tokenizer: TokenizerChoice,
        decoding: Decoding | None = None,
        tokens: int = TOKENS,
        window: int = WINDOW,
    ) -> None:
        if tokens < 1 or window < 1:
            raise UserError(f"tokens and window must be 1 or more, got {tokens} and {window}")
        self.model, self.sides = model, sides(tokenizer)
        self.decoding = Decoding(choice=BeamSettings()) if decoding is None else decoding
        self.tokens, self.window = tokens, window
        self.stats = GenerationStats(0, 0, 0, 0.0, 0, "")
        self.lines = 0

    def __call__(self, sentences: Iterable[str]) -> Iterator[tuple[Hypothesis, ...]]:
        """The answers to each sentence, in order; a blank line is answered with nothing.

        Raises UserError with the number of the line, from 1, that is longer than the model allows.
        """
        rest = iter(sentences)
        while chunk := list(islice(rest, self.window)):
            yield from self._chunk(chunk)
            self.lines += len(chunk)

    def _chunk(self, chunk: list[str]) -> Iterator[tuple[Hypothesis, ...]]:
        texts = {number: text for number, text in enumerate(chunk) if text.strip()}
        if texts:
            rows = dict(zip(texts, read_prompts(list(texts.values()), self.sides.read, source=True)))
            self._check(rows)
            answers = {number: answer for batch in self._batches(rows) for number, answer in self._translate(batch)}
        else:
            answers = {}
        nothing = (Hypothesis([], "", None, "end"),)
        return iter([answers.get(number, nothing) for number in range(len(chunk))])

    def _check(self, rows: dict[int, list[int]]) -> None:
        max_length = self.model.max_length
        for number, row in rows.items():
            if max_length is not None and len(row) > max_length:
                line = self.lines + number + 1
                raise UserError(f"line {line} has {len(row)} tokens, but the model allows at most {max_length}")
        check_tokens(list(rows.values()), self.model.vocab)

    def _batches(self, rows: dict[int, list[int]]) -> Iterator[dict[int, list[int]]]:
        """Rows of similar length together, the longest first: what does not fit into memory fails at once."""
        width = self.decoding.choice.width if isinstance(self.decoding.choice, BeamSettings) else 1
        batch: dict[int, list[int]] = {}
        for number in sorted(rows, key=lambda n: len(rows[n]), reverse=True):
            max_length = len(next(iter(batch.values()), rows[number]))
            if batch and (len(batch) + 1) * max_length * width > self.tokens:
                yield batch
                batch = {}
            batch[number] = rows[number]
        yield batch

    def _translate(self, batch: dict[int, list[int]]) -> Iterator[tuple[int, tuple[Hypothesis, ...]]]:
        rows = list(batch.values())
        plan = DecodePlan(
            self.model, rows, new_token_limits(self.model, rows, self.decoding), self.decoding, self.sides.write
        )
        work = DecodeJob(plan, len(rows))
        for _ in work:
            pass
        self.stats = self.stats + work.stats
        yield from zip(batch, work.answers)


def translate(
    model: TranslatesText, sentences: Iterable[str], *, tokenizer: TokenizerChoice, decoding: Decoding | None = None
) -> list[str]:
    """The best translation of each sentence, by beam search of width 4 with Vaswani's length penalty unless told."""
    translator = Translator(model, tokenizer=tokenizer, decoding=decoding)
    return [answers[0].text or "" for answers in translator(sentences)]
