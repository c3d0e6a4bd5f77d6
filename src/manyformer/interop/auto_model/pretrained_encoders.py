"""Masked language models and classifiers of this library in `transformers`."""

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import (
    ImageClassifierOutput,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from manyformer.core import PADDING_SEGMENT
from manyformer.interop.auto_model.pretrained_model import ManyformerModel, label_loss, refuse_options, segments_of
from manyformer.models import ImageClassifier, MaskedLM, SpanReader, Tagger, TextClassifier


class ReadsWholeTexts(ManyformerModel):
    """A bidirectional encoder of tokens; `output_class` is the record of `transformers` for its outputs."""

    output_class: Any

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Logits and loss; `token_type_ids` number the texts of a row, for models that distinguish them."""
        refuse_options(options)
        segments = segments_of(attention_mask, input_ids.shape[1])
        logits, _, auxiliary = self.model(input_ids, segments, parts=self._parts(token_type_ids, segments))
        return self.output_class(label_loss(logits, labels, options, auxiliary), logits)

    def _parts(self, types: Tensor | None, segments: Tensor | None) -> Tensor | None:
        """The part that each token belongs to, -1 for padding."""
        if types is None or segments is None:
            return types
        return types.masked_fill(segments == PADDING_SEGMENT, -1)


class ManyformerForMaskedLM(ReadsWholeTexts):
    """A masked language model behind `AutoModelForMaskedLM`; its labels are those of the same column, or -100."""

    model_class = MaskedLM
    output_class = MaskedLMOutput


class ManyformerForSequenceClassification(ReadsWholeTexts):
    """A classifier of texts behind `AutoModelForSequenceClassification`."""

    model_class = TextClassifier
    output_class = SequenceClassifierOutput


class ManyformerForTokenClassification(ManyformerModel):
    """A tagger behind `AutoModelForTokenClassification`; `trees` are those of `Tagger`, for recipes that read them."""

    model_class = Tagger

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        trees: Tensor | None = None,
        labels: Tensor | None = None,
        **options: Any,
    ) -> TokenClassifierOutput:
        """Logits and loss; a word's label is that of its first token, and -100 that of all other tokens."""
        refuse_options(options)
        logits, _, auxiliary = self.model(input_ids, segments_of(attention_mask, input_ids.shape[1]), trees)
        return TokenClassifierOutput(label_loss(logits, labels, options, auxiliary), logits)


class ManyformerForQuestionAnswering(ManyformerModel):
    """A reader that marks an answer in a text, behind `AutoModelForQuestionAnswering`."""

    model_class = SpanReader

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **options: Any,
    ) -> QuestionAnsweringModelOutput:
        """The logits of each token as the first and as the last of the answer; the loss is the mean of both ends."""
        refuse_options(options)
        segments = segments_of(attention_mask, input_ids.shape[1])
        logits, _, auxiliary = self.model(input_ids, segments)
        if segments is not None:
            logits = logits.masked_fill((segments == PADDING_SEGMENT)[..., None], torch.finfo(logits.dtype).min)
        targets = None
        if start_positions is not None and end_positions is not None:
            targets = torch.stack([start_positions, end_positions], 1)
        loss = label_loss(logits.mT, targets, options, auxiliary)
        return QuestionAnsweringModelOutput(loss, logits[..., 0], logits[..., 1])


class ManyformerForImageClassification(ManyformerModel):
    """A classifier of images behind `AutoModelForImageClassification`; pixels are (b, c, h, w), from -1 to 1."""

    model_class = ImageClassifier
    main_input_name = "pixel_values"

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None, **options: Any) -> ImageClassifierOutput:
        """Logits and loss."""
        refuse_options(options)
        logits, _, auxiliary = self.model(pixel_values.movedim(1, -1))
        return ImageClassifierOutput(label_loss(logits, labels, options, auxiliary), logits)
