"""The task of writing a target sequence for a source sequence."""

import math
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Generator, Tensor

from manyformer.batches import Seq2SeqBatch
from manyformer.core import PADDING_SEGMENT, State, WatchFn, no_watch
from manyformer.models import EncoderDecoder, ModelOutput
from manyformer.scores import ScoreKind, bleu, chrf, exact_match, ter
from manyformer.tasks.likelihood import likelihood, token_scores
from manyformer.tasks.task import EncodedText, EvaluationRequest, EvaluationResult, Inputs, Task, TextPass, token_row
from manyformer.tasks.toy import SYMBOLS, Toy, ToyDraw

LIKELIHOOD_SHARE = 0.1
"""The share of the progress of an evaluation that the likelihood takes; the rest is translation."""


@final
class Translation(Task[EncoderDecoder]):
    """Predicts each next token of a target given a source; the state is the encoded source and the decoder's state."""

    name = "translation"
    title = "translation"
    model = EncoderDecoder
    data_forms: Mapping[str, str] = {"pairs": "pairs"}
    score_kinds: Mapping[str, ScoreKind] = {
        "bleu": ScoreKind(),
        "chrf": ScoreKind(),
        "ter": ScoreKind(lower_is_better=True),
        "exact": ScoreKind("%"),
    }
    takes_source = True
    generates = "answer"
    command = "translate"
    argument = '"TEXT"'

    def token_ids(self, model: EncoderDecoder) -> int:
        return min(model.embed_source.vocab, model.embed_target.vocab)

    def example(self, model: EncoderDecoder, tokens: Tensor) -> Inputs:
        return Inputs(tokens, source=tokens)

    def arguments(self, model: EncoderDecoder, inputs: Inputs) -> tuple[Any, ...]:
        return inputs.source, inputs.tokens, inputs.source_segments, inputs.segments

    def call(
        self, model: EncoderDecoder, inputs: Inputs, state: State = None, *, watch: WatchFn = no_watch
    ) -> ModelOutput:
        if state is None:
            return super().call(model, inputs, watch=watch)
        memory, decoder_state = state
        output = model.decode(inputs.tokens, memory, inputs.segments, decoder_state, watch=watch)
        return output._replace(state=(memory, output.state))

    def init_state(self, model: EncoderDecoder, inputs: Inputs, *, capacity: int | None = None) -> State:
        assert inputs.source is not None
        memory = model.encode(inputs.source, inputs.source_segments)
        return memory, model.init_state(inputs.tokens.shape[0], capacity=capacity)

    def batch(self, model: EncoderDecoder, inputs: Inputs, targets: Tensor) -> Seq2SeqBatch:
        assert inputs.source is not None
        return Seq2SeqBatch(inputs.source, inputs.tokens, targets, inputs.source_segments, inputs.segments)

    def random_targets(self, model: EncoderDecoder, inputs: Inputs, generator: Generator) -> Tensor:
        return inputs.tokens.roll(-1, 1)

    def toy(self, model: EncoderDecoder, draw: ToyDraw) -> Toy:
        """The target is the source in reverse order."""
        reversed_source = draw.period.flip(1)
        target = torch.cat([torch.ones_like(draw.period[:, :1]), reversed_source[:, :-1]], dim=1)
        return Toy(Seq2SeqBatch(draw.period, target, reversed_source), math.log(SYMBOLS))

    def evaluate(self, request: EvaluationRequest[EncoderDecoder]) -> EvaluationResult:
        """BLEU, chrF, TER and exact matches of translations by beam search; perplexity and accuracy of references."""
        sums = likelihood(request, final_progress=LIKELIHOOD_SHARE)
        references, settings = [example.target for example in request.examples], request.settings
        texts: list[str] = []
        for text in request.translate(example.source for example in request.examples):
            texts.append(text)
            request.on_progress(LIKELIHOOD_SHARE + (1 - LIKELIHOOD_SHARE) * len(texts) / len(references))
        scores = [
            bleu(texts, references, tokenize=settings.tokenize, lowercase=settings.lowercase),
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
        target = [answer.tokenizer.bos, *answer.ids]
        # one more padding token if both sides have equal lengths: the number of keys then identifies the side
        padding = int(len(source) == len(target))
        source_tokens = token_row(model, [*source, *[text.tokenizer.pad] * padding], model.embed_source.vocab)
        segments = torch.tensor([[0] * len(source) + [PADDING_SEGMENT] * padding], device=model.device)
        target_tokens = token_row(model, target, model.embed_target.vocab)

        def decode(watch: WatchFn) -> ModelOutput:
            return model.decode(target_tokens, model.encode(source_tokens, segments), watch=watch)

        labels, source_length = text.labels_of(source), len(source) + padding
        return [
            TextPass(
                lambda watch: model.encode(source_tokens, segments, watch=watch),
                labels,
                source_length,
                tokens=tuple(source),
            ),
            TextPass(
                decode,
                answer.labels_of(target),
                len(target),
                predicted_labels=answer.labels_of([*answer.ids, answer.tokenizer.eos]),
                source_labels=labels,
                source_length=source_length,
                tokens=tuple(target),
                source_tokens=tuple(source),
            ),
        ]


TRANSLATION = Translation()
