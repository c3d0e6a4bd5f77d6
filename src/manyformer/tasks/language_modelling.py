"""The task of predicting each next token of a text."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import final

from manyformer.models import LanguageModel
from manyformer.scores import ScoreKind, bits_per_byte, bits_per_character
from manyformer.tasks.causal_task import WORK_SCORES, CausalTask
from manyformer.tasks.image_modelling import IMAGE_GENERATION
from manyformer.tasks.likelihood import likelihood, row_accuracy, token_scores
from manyformer.tasks.model_passes import EncodedText, TextPass
from manyformer.tasks.requests import EvaluationRequest, EvaluationResult
from manyformer.tasks.task import Task, text_pass

STDLIB_PROMPT = "def "
SYNTHETIC_PROMPT = "ab"
TEXT_PROMPT = "The "


@final
class LanguageModelling(CausalTask):
    """Predicts each next token of a text."""

    name = "language-model"
    title = "language modelling"
    data_forms: Mapping[str, str] = {"text": "next-token", "synthetic": "next-token", "images": "levels"}
    reasons: Mapping[str, str] = {"cross_attention": "a language model reads one sequence only"}
    score_kinds: Mapping[str, ScoreKind] = {
        "bits_per_character": ScoreKind(lower_is_better=True, digits=4),
        "exact_match": ScoreKind("%"),
        **WORK_SCORES,
    }
    generates = "continuation"

    def evaluate(self, request: EvaluationRequest[LanguageModel]) -> EvaluationResult:
        """Perplexity, bits per character and byte, token accuracy; each token is predicted once.

        For rows of a rule also exact match: the rows without a wrong token.

        The signatures tell how the text was cut, which decides the context of each token.
        """
        sums = likelihood(request)
        assert request.batches is not None
        units = request.batches.units
        assert units is not None
        token_perplexity, accuracy = token_scores(sums)
        scores = [
            token_perplexity,
            bits_per_character(sums.nats, units.characters),
            bits_per_byte(sums.nats, units.bytes),
            accuracy,
        ]
        if getattr(request.section, "kind", "") == "synthetic" and not request.batches.rows_continue:
            scores.append(row_accuracy(request))
        reading, cut = describe_reading(request)
        scores = [replace(score, signature="|".join([score.signature, *_pairs(reading)])) for score in scores]
        return EvaluationResult(scores, f"{sums.targets:,} tokens {cut}", reading)

    def text_passes(self, model: LanguageModel, text: EncodedText) -> list[TextPass]:
        return [text_pass(self, model, [text.tokenizer.bos, *text.ids], text)]

    def next_commands(self, run: Path, data: object) -> tuple[str, ...]:
        prompt = {"stdlib": STDLIB_PROMPT, None: SYNTHETIC_PROMPT}.get(getattr(data, "path", None), TEXT_PROMPT)
        return (f'manyformer generate {run} "{prompt}"',)

    def variant(self, data_kind: str) -> Task[LanguageModel]:
        if data_kind == "images":
            return IMAGE_GENERATION
        return self


def describe_reading(request: EvaluationRequest[LanguageModel]) -> tuple[Mapping[str, int], str]:
    """The numbers of how the text was cut, for signatures, and a description."""
    assert request.batches is not None
    if request.windows is not None:
        context, stride = request.windows
        cut = f"in windows of {context}, {stride} apart: each is predicted from {context - stride + 1} tokens at least"
        return request.windows._asdict(), f"{cut}, or from all of its document before it"
    cut = f"in rows of {request.row_length}"
    if not request.batches.rows_continue:
        return {}, cut
    # where the lanes of continuing rows begin, the context does
    lanes = len(next(iter(request.batches))[0])
    return {"lanes": lanes}, f"{cut}, each continuing the row before it in one of {lanes} lanes"


def _pairs(reading: Mapping[str, int]) -> list[str]:
    return [f"{name}:{number}" for name, number in reading.items()]


LANGUAGE_MODELLING = LanguageModelling()
