"""The tasks of generating images from a source: a class, or a small image."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from manyformer.models import EncoderDecoder
from manyformer.models.embedding import FixedLengthSource
from manyformer.models.scores import ScoreKind, bits_per_dimension
from manyformer.models.tasks.requests import EvaluationRequest, EvaluationResult, TaskTokenizers, TextPass
from manyformer.models.tasks.task import likelihood, token_scores
from manyformer.models.tasks.toy import SYMBOLS, Toy, ToyDraw
from manyformer.models.tasks.translation import EncoderDecoderTask, repeated_source
from manyformer.nn.batches import Batch, Seq2SeqBatch
from manyformer.nn.model_inputs import Inputs


class SourcedImages(EncoderDecoderTask):
    """Predicts each next value of an image, given a source of tokens."""

    reasons: Mapping[str, str] = {
        "source-padding": "all sources have one size, so they have no padding",
        "packing": "an image is not part of a row",
    }
    score_kinds: Mapping[str, ScoreKind] = {"bits_per_dimension": ScoreKind(lower_is_better=True, digits=4)}
    generates = "images"
    command = "generate"

    def token_ids(self, model: EncoderDecoder) -> int:
        return model.embed_target.vocab

    def source(self, model: EncoderDecoder[FixedLengthSource], inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """The tokens that are no padding, repeated until the source is full, in their segment."""
        embed = model.embed_source
        ids, segments = repeated_source(inputs, embed.tokens)
        return ids % embed.vocab, segments

    @abstractmethod
    def toy_values(self, period: Tensor) -> Tensor:
        """The first values of an image that its source, these symbols repeated, determines."""

    def toy(self, model: EncoderDecoder, draw: ToyDraw) -> Toy:
        """The first values of the image tell the source."""
        values = self.toy_values(draw.period)
        target = torch.cat([torch.ones_like(values[:, :1]), values[:, :-1]], dim=1)
        source, _ = self.source(model, Inputs(target, source=draw.period))
        return Toy(Seq2SeqBatch(source, target, values), math.log(SYMBOLS))

    def example_pass(self, model: EncoderDecoder, batch: Batch, tokenizers: TaskTokenizers) -> TextPass:
        """The values of the first image, the start token first, and the tokens of its source."""
        assert isinstance(batch, Seq2SeqBatch)
        source = batch.source[:1].to(model.device)
        target = batch.target[:1].to(model.device)
        memory = model.encode(source)
        values = tuple(map(str, batch.targets[0].tolist()))
        return TextPass(
            lambda watch: model.decode(target, memory, watch=watch),
            ("start", *values[:-1]),
            target.shape[1],
            predicted_labels=values,
            source_labels=tuple(map(str, source[0].tolist())),
        )

    def evaluate(self, request: EvaluationRequest[EncoderDecoder]) -> EvaluationResult:
        """Bits per dimension, perplexity and accuracy of the values."""
        sums = likelihood(request)
        scores = [bits_per_dimension(sums.nats, sums.targets), *token_scores(sums)]
        return EvaluationResult(scores, f"{sums.targets:,} values of images")


@final
class ImagesOfClasses(SourcedImages):
    """Predicts each next value of an image, given its class."""

    name = "class-images"
    title = "generation of images of classes"
    data_forms: Mapping[str, str] = {"images": "levels-of-classes"}

    def toy_values(self, period: Tensor) -> Tensor:
        return period[:, :1]


@final
class SuperResolution(SourcedImages):
    """Predicts each next value of an image, given a smaller one."""

    name = "super-resolution"
    title = "super-resolution"
    data_forms: Mapping[str, str] = {"images": "levels-of-small"}

    def toy_values(self, period: Tensor) -> Tensor:
        return period.flip(1)


IMAGES_OF_CLASSES = ImagesOfClasses()
SUPER_RESOLUTION = SuperResolution()
