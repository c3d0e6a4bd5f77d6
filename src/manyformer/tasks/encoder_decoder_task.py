"""What all tasks of encoder-decoders have in common: the state, and a source that token ids stand for."""

from abc import abstractmethod
from typing import Any

import torch
from torch import Generator, Tensor

from manyformer.batches import Seq2SeqBatch
from manyformer.core import PADDING_SEGMENT, State, WatchFn, no_watch
from manyformer.models import EncoderDecoder, ModelOutput
from manyformer.tasks.model_passes import EncodedText, TextPass
from manyformer.tasks.task import Inputs, Task, token_row


class EncoderDecoderTask(Task[EncoderDecoder]):
    """Predicts each next token of a target given a source; the state is the encoded source and the decoder's state."""

    model = EncoderDecoder
    takes_source = True

    @abstractmethod
    def source(self, model: EncoderDecoder, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """What the encoder reads where the source of the inputs are token ids, and its segment ids."""

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
    order = (segments == PADDING_SEGMENT).long().argsort(dim=1, stable=True)
    counts = (segments != PADDING_SEGMENT).sum(1, keepdim=True).clamp(min=1)
    ids = source.gather(1, order).gather(1, columns % counts)
    return ids, segments.amax(1, keepdim=True).expand(-1, length)
