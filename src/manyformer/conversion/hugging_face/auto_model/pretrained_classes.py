"""The classes of this library's models in `transformers`: encoders with heads, and generators with its `generate`."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationMixin
from transformers.modeling_outputs import (
    BaseModelOutput,
    CausalLMOutputWithPast,
    ImageClassifierOutput,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    Seq2SeqLMOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from manyformer.base.errors import UserError
from manyformer.conversion.hugging_face.auto_model.pretrained_model import (
    ManyformerModel,
    label_loss,
    refuse_options,
    segments_of,
)
from manyformer.models import (
    EncoderDecoder,
    ImageClassifier,
    LanguageModel,
    MaskedLM,
    SpanReader,
    Tagger,
    TextClassifier,
)
from manyformer.models.embedding import positions_of
from manyformer.nn.batches import IGNORE_INDEX
from manyformer.nn.core import PADDING_SEGMENT, MemorySequence, State, tree_map


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
        output = self.model(input_ids, segments, parts=self._parts(token_type_ids, segments))
        return self.output_class(label_loss(output.logits, labels, options, output.loss), output.logits)

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
        output = self.model(input_ids, segments_of(attention_mask, input_ids.shape[1]), trees)
        return TokenClassifierOutput(label_loss(output.logits, labels, options, output.loss), output.logits)


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
        output = self.model(input_ids, segments)
        logits = output.logits
        if segments is not None:
            # pipelines take the best pair of positions, so padding must never win
            logits = logits.masked_fill((segments == PADDING_SEGMENT)[..., None], torch.finfo(logits.dtype).min)
        targets = None
        if start_positions is not None and end_positions is not None:
            targets = torch.stack([start_positions, end_positions], 1)
        loss = label_loss(logits.mT, targets, options, output.loss)
        return QuestionAnsweringModelOutput(loss, logits[..., 0], logits[..., 1])


class ManyformerForImageClassification(ManyformerModel):
    """A classifier of images behind `AutoModelForImageClassification`; pixels are (b, c, h, w), from -1 to 1."""

    model_class = ImageClassifier
    main_input_name = "pixel_values"

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None, **options: Any) -> ImageClassifierOutput:
        """Logits and loss."""
        refuse_options(options)
        output = self.model(pixel_values.movedim(1, -1))
        return ImageClassifierOutput(label_loss(output.logits, labels, options, output.loss), output.logits)


class DecodingCache(Cache):
    """Holds the state of a model after `length` tokens; rows are reordered, repeated and selected in all its tensors.

    A state cannot be shortened, because not every recipe keeps what it has read."""

    is_compileable = False

    def __init__(self, state: State) -> None:
        super().__init__(layers=[])
        self.state = state
        self.length = 0

    def advance(self, state: State, count: int) -> None:
        """Replace the state by the one after `count` more tokens."""
        self.state, self.length = state, self.length + count

    def get_seq_length(self, layer_idx: int = 0, *args: Any, **kwargs: Any) -> int:
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.state = tree_map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)), self.state)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.state = tree_map(lambda tensor: tensor.repeat_interleave(repeats, dim=0), self.state)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.state = tree_map(lambda tensor: tensor[indices.to(tensor.device)], self.state)

    def crop(self, max_length: int) -> None:
        raise NotImplementedError(
            "the states of manyformer's models cannot be shortened, which assisted generation needs: leave it out"
        )

    def reset(self) -> None:
        raise NotImplementedError("the states of manyformer's models are not reset: call generate without a cache")


class GeneratesFromState(GenerationMixin):
    """The `generate` of `transformers`, whose cache is a state of this library."""

    model: Any

    @classmethod
    def can_generate(cls) -> bool:
        """Whether `generate` may be called."""
        return True

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _cache_for(
        self, rows: int, cache: Any, past_key_values: Any, *, use_cache: bool | None
    ) -> DecodingCache | None:
        """The cache to continue from: the one that is given under either name, or a new one if it is to be used."""
        if cache is None:
            cache = past_key_values
        elif past_key_values is not None:
            raise UserError("cache and past_key_values are two names of one argument: give one of them")
        if cache is None:
            if use_cache:
                return DecodingCache(self.model.init_state(rows))
            return None
        if not isinstance(cache, DecodingCache):
            raise UserError(f"the cache is a {type(cache).__name__}: give what an earlier call returned")
        return cache


class ManyformerForCausalLM(GeneratesFromState, ManyformerModel):
    """A language model behind `AutoModelForCausalLM`."""

    model_class = LanguageModel

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: DecodingCache | None = None,
        labels: Tensor | None = None,
        *,
        cache: DecodingCache | None = None,
        use_cache: bool | None = None,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of each next token. Tokens where `attention_mask` is 0 are padding, on either side; labels are those
        of the same column, or -100. The cache has two names: `transformers` calls it `cache` from 5.24 on."""
        refuse_options(options)
        cache = self._cache_for(len(input_ids), cache, past_key_values, use_cache=use_cache)
        segments = segments_of(attention_mask, input_ids.shape[1])
        output = self.model(input_ids, segments, None if cache is None else cache.state)
        if cache is not None:
            cache.advance(output.state, input_ids.shape[1])
        targets = None
        if labels is not None:
            # labels of transformers are the tokens themselves, ours the ones that follow
            targets = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        loss = label_loss(output.logits, targets, options, output.loss)
        return CausalLMOutputWithPast(loss, output.logits, cache)


class SourceEncoder(nn.Module):
    """The encoder of an encoder-decoder for `generate`; it holds the model without being a part of it."""

    main_input_name = "input_ids"
    model: EncoderDecoder

    def __init__(self, model: EncoderDecoder) -> None:
        super().__init__()
        # past nn.Module's registration, so that the encoder's weights are not listed twice
        object.__setattr__(self, "model", model)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> BaseModelOutput:
        """The encoder's outputs (b, s, d)."""
        refuse_options(options)
        y: Any = self.model.encode(input_ids, segments_of(attention_mask, input_ids.shape[1])).y
        return BaseModelOutput(y)


class ManyformerForSeq2SeqLM(GeneratesFromState, ManyformerModel):
    """An encoder-decoder of texts behind `AutoModelForSeq2SeqLM`."""

    model_class = EncoderDecoder

    def get_encoder(self, modality: str | None = None) -> SourceEncoder:
        """The encoder, which `generate` calls once."""
        return SourceEncoder(self.model)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """The decoder's input for labels: the start token, then all labels but the last; padding where it is -100."""
        start = self.generation_config.decoder_start_token_id
        pad = self.generation_config.pad_token_id
        shifted = nn.functional.pad(labels[:, :-1], (1, 0), value=start)
        # ignored labels still need an id that an embedding has
        return shifted.masked_fill(shifted == IGNORE_INDEX, pad)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: DecodingCache | None = None,
        labels: Tensor | None = None,
        *,
        cache: DecodingCache | None = None,
        use_cache: bool | None = None,
        **options: Any,
    ) -> Seq2SeqLMOutput:
        """Logits of each next token of the target, which `labels` give if `decoder_input_ids` do not."""
        refuse_options(options)
        if decoder_input_ids is None:
            if labels is None:
                raise UserError("give decoder_input_ids, or labels of which they are made")
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        if encoder_outputs is None:
            assert input_ids is not None
            encoder_outputs = self.get_encoder()(input_ids, attention_mask)
        y = encoder_outputs[0]
        memory = MemorySequence(y, _source_positions(y, attention_mask))
        cache = self._cache_for(len(decoder_input_ids), cache, past_key_values, use_cache=use_cache)
        segments = segments_of(decoder_attention_mask, decoder_input_ids.shape[1])
        state = None if cache is None else cache.state
        output = self.model.decode(decoder_input_ids, memory, segments, state)
        if cache is not None:
            cache.advance(output.state, decoder_input_ids.shape[1])
        loss = label_loss(output.logits, labels, options, output.loss)
        # the record is typed as if it held a pair of caches
        return Seq2SeqLMOutput(loss, output.logits, cast(Any, cache), encoder_last_hidden_state=y)


def _source_positions(y: Tensor, mask: Tensor | None) -> Any:
    """The positions of encoded tokens, of which those with mask 0 are padding."""
    # what stands in a column does not matter to positions
    columns = torch.zeros(y.shape[:2], dtype=torch.long, device=y.device)
    positions, _ = positions_of(columns, segments_of(mask, y.shape[1]), None)
    return positions._replace(layout=None)
