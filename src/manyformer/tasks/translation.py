"""The task of writing a target sequence for a source sequence."""

import math
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

from manyformer.batches import Seq2SeqBatch
from manyformer.errors import UserError
from manyformer.models import EncoderDecoder
from manyformer.scores import ScoreKind, bleu, bleu_by_length, chrf, exact_match, ter
from manyformer.tasks.encoder_decoder_task import EncoderDecoderTask, decoder_pass
from manyformer.tasks.likelihood import likelihood, token_scores
from manyformer.tasks.model_passes import EncodedText, TextPass
from manyformer.tasks.requests import EvaluationRequest, EvaluationResult
from manyformer.tasks.task import Inputs, token_row
from manyformer.tasks.toy import SYMBOLS, Toy, ToyDraw

LIKELIHOOD_SHARE = 0.1
"""The share of the progress of an evaluation that the likelihood takes; the rest is translation."""


@final
class Translation(EncoderDecoderTask):
    """Writes a text for a text, such as its translation."""

    name = "translation"
    title = "translation"
    data_forms: Mapping[str, str] = {"pairs": "pairs"}
    score_kinds: Mapping[str, ScoreKind] = {
        "bleu": ScoreKind(),
        "chrf": ScoreKind(),
        "ter": ScoreKind(lower_is_better=True),
        "exact": ScoreKind("%"),
    }
    generates = "answer"
    command = "translate"
    argument = '"TEXT"'

    def token_ids(self, model: EncoderDecoder) -> int:
        return min(_source_vocab(model), model.embed_target.vocab)

    def source(self, model: EncoderDecoder, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        assert inputs.source is not None
        return inputs.source, inputs.source_segments

    def toy(self, model: EncoderDecoder, draw: ToyDraw) -> Toy:
        """The target is the source in reverse order."""
        reversed_source = draw.period.flip(1)
        target = torch.cat([torch.ones_like(draw.period[:, :1]), reversed_source[:, :-1]], dim=1)
        return Toy(Seq2SeqBatch(draw.period, target, reversed_source), math.log(SYMBOLS))

    def evaluate(self, request: EvaluationRequest[EncoderDecoder]) -> EvaluationResult:
        """BLEU (also by source length), chrF, TER and exact matches by beam search; perplexity of the references."""
        sums = likelihood(request, final_progress=LIKELIHOOD_SHARE)
        references = [example.target for example in request.examples]
        settings = request.settings
        texts: list[str] = []
        for text in request.translate(example.source for example in request.examples):
            texts.append(text)
            request.on_progress(LIKELIHOOD_SHARE + (1 - LIKELIHOOD_SHARE) * len(texts) / len(references))
        options: dict[str, Any] = {"tokenize": settings.tokenize, "lowercase": settings.lowercase}
        sources = [example.source for example in request.examples]
        if settings.lengths:
            by_length = bleu_by_length(texts, references, sources, settings.lengths, **options)
        else:
            by_length = []
        scores = [
            bleu(texts, references, **options),
            *by_length,
            chrf(texts, references),
            ter(texts, references),
            exact_match(texts, references),
            *token_scores(sums),
        ]
        return EvaluationResult(
            scores, f"{len(texts):,} translations, beam {settings.beam}, length penalty {settings.length_penalty:g}"
        )

    def text_passes(self, model: EncoderDecoder, text: EncodedText) -> list[TextPass]:
        answer = text.answer
        assert answer is not None
        source = [*text.ids, text.tokenizer.eos]
        tokens = token_row(model, source, _source_vocab(model))
        labels = text.labels_of(source)
        encode = TextPass(lambda watch: model.encode(tokens, watch=watch), labels, len(source), tokens=tuple(source))
        return [encode, decoder_pass(model, tokens, labels, answer, source_tokens=tuple(source))]


def _source_vocab(model: EncoderDecoder) -> int:
    """The number of tokens of the source. Raises UserError for a model that reads no tokens."""
    vocab: int | None = model.embed_source.vocab
    if vocab is None:
        raise UserError(f"this model reads its source by {type(model.embed_source).__name__}, and a text is tokens")
    return vocab


TRANSLATION = Translation()
