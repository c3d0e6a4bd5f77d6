"""The tasks of an encoder-decoder in general, and that of writing a target text for a source text."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Generator, Tensor

from manyformer.base.errors import UserError
from manyformer.models import EncoderDecoder, ModelOutput
from manyformer.models.scores import ScoreKind, bleu, bleu_by_length, chrf, exact_match, ter
from manyformer.models.tasks.requests import EncodedText, EvaluationRequest, EvaluationResult, TextPass
from manyformer.models.tasks.task import LIKELIHOOD_SHARE, Task, likelihood, token_row, token_scores
from manyformer.models.tasks.toy import SYMBOLS, Toy, ToyDraw
from manyformer.nn.batches import Seq2SeqBatch
from manyformer.nn.core import PADDING_SEGMENT, State, WatchFn, no_watch
from manyformer.nn.model_inputs import Inputs


class EncoderDecoderTask(Task[EncoderDecoder]):
    """Predicts each next token of a target given a source; the state is the encoded source and the decoder's state."""

    model = EncoderDecoder
    takes_source = True

    @abstractmethod
    def source(self, model: EncoderDecoder, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """The input of the encoder where the source of the inputs are token ids, and its segment ids."""

    def example(self, model: EncoderDecoder, tokens: Tensor) -> Inputs:
        return Inputs(tokens, source=tokens)

    def arguments(self, model: EncoderDecoder, inputs: Inputs) -> tuple[Any, ...]:
        source, segments = self.source(model, inputs)
        return source, inputs.tokens, segments, inputs.segments

    def call(
        self, model: EncoderDecoder, inputs: Inputs, state: State = None, *, watch: WatchFn = no_watch
    ) -> ModelOutput:
        if state is None:
            return super().call(model, inputs, watch=watch)
        # the source was encoded by `init_state`
        memory, decoder_state = state
        output = model.decode(inputs.tokens, memory, inputs.segments, decoder_state, watch=watch)
        return output._replace(state=(memory, output.state))

    def init_state(self, model: EncoderDecoder, inputs: Inputs, *, capacity: int | None = None) -> State:
        memory = model.encode(*self.source(model, inputs))
        return memory, model.init_state(inputs.tokens.shape[0], capacity=capacity)

    def batch(self, model: EncoderDecoder, inputs: Inputs, targets: Tensor) -> Seq2SeqBatch:
        source, segments = self.source(model, inputs)
        return Seq2SeqBatch(source, inputs.tokens, targets, segments, inputs.segments)

    def random_targets(self, model: EncoderDecoder, inputs: Inputs, generator: Generator) -> Tensor:
        return inputs.tokens.roll(-1, 1)


def decoder_pass(
    model: EncoderDecoder,
    source: Tensor,
    source_labels: tuple[str, ...],
    answer: EncodedText,
    *,
    source_tokens: tuple[int, ...] = (),
) -> TextPass:
    """The pass of the decoder over a text, whose rows are labelled with the tokens that they predict.

    Raises UserError for tokens that the model does not have."""
    tokenizer = answer.tokenizer
    target = [tokenizer.bos, *answer.ids]
    tokens = token_row(model, target, model.embed_target.vocab)
    return TextPass(
        lambda watch: model.decode(tokens, model.encode(source), watch=watch),
        answer.labels_of(target),
        len(target),
        predicted_labels=answer.labels_of([*answer.ids, tokenizer.eos]),
        source_labels=source_labels,
        tokens=tuple(target),
        source_tokens=source_tokens,
    )


def repeated_source(inputs: Inputs, length: int) -> tuple[Tensor, Tensor | None]:
    """The source's tokens that are no padding, repeated to `length` tokens in their segment; 0, 1, ... without a token.

    For models whose sources have one size."""
    source = inputs.source
    segments = inputs.source_segments
    assert source is not None
    columns = torch.arange(length, device=source.device)
    if not source.shape[1]:
        return columns.expand(len(source), -1), None
    if segments is None:
        return source[:, columns % source.shape[1]], None
    # tokens first, padding behind them, each in their order
    order = (segments == PADDING_SEGMENT).long().argsort(dim=1, stable=True)
    counts = (segments != PADDING_SEGMENT).sum(1, keepdim=True).clamp(min=1)
    ids = source.gather(1, order).gather(1, columns % counts)
    # padding has the lowest id, so the maximum is the segment of the tokens
    return ids, segments.amax(1, keepdim=True).expand(-1, length)


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
