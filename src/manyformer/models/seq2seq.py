"""An encoder-decoder model: a bidirectional encoder of the source and an autoregressive decoder of the target.

Encoders of sound may have a second objective: the labels of the target by connectionist temporal classification.
"""

from collections.abc import Sequence
from typing import Any, Generic, final

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from typing_extensions import TypeVar

from manyformer.base.errors import UserError
from manyformer.models.auxiliary_losses import AuxiliaryLoss
from manyformer.models.embedding import ModelState, SourceEmbedding, TokenEmbedding, check_length
from manyformer.models.generative_model import DecoderInput, GenerativeModel
from manyformer.models.head import OutputHead, apply_head
from manyformer.models.model import ModelOutput, max_length_of
from manyformer.models.transformers_call import ENCODER_DECODER
from manyformer.nn.batches import IGNORE_INDEX, Seq2SeqBatch, TranscriptionBatch
from manyformer.nn.batches.batch import SegmentLayout
from manyformer.nn.core import (
    PADDING_SEGMENT,
    Context,
    Layer,
    LayerOutput,
    MemorySequence,
    PackedLayout,
    State,
    WatchFn,
    apply_layer,
    no_watch,
)
from manyformer.nn.ops.ctc import BLANK, ctc_losses, needed_positions


@final
class EncoderCTC(nn.Module):
    """CTC of `vocab` labels over an encoder's output, with the share `weight` of the loss (Watanabe et al. 2017, II-C).

    The paper's loss is weight x CTC + (1 - weight) x cross entropy; here CTC is added to the cross entropy with
    weight / (1 - weight), the same up to a factor."""

    def __init__(self, dim: int, vocab: int, weight: float) -> None:
        super().__init__()
        self.head = nn.Linear(dim, vocab)
        self.weight = weight

    def extra_loss(
        self, memory: MemorySequence, target: Int[Tensor, "b t"], targets: Int[Tensor, "b t"]
    ) -> Float[Tensor, ""]:
        """What is added to the cross entropy per target; a text without an alignment only has a cross entropy."""
        scored = (targets != IGNORE_INDEX).sum(1)
        lengths = _lengths(memory)
        # without the start token, which no sound stands for
        labels = target[:, 1:]
        counts = (scored - 1).clamp(min=0)
        # a text of more labels than positions would have an infinite loss
        is_alignable = (scored > 0) & (needed_positions(labels, counts) <= lengths)
        losses = ctc_losses(self.head(memory.y), lengths, labels, counts * is_alignable)
        total = torch.where(is_alignable, losses, 0.0).sum() / scored.sum().clamp(min=1)
        # the cross entropy keeps the weight 1, so that its value stays comparable with models without CTC
        return self.weight / (1 - self.weight) * total

    def log_probability(self, memory: MemorySequence, labels: Sequence[int]) -> float:
        """The natural logarithm of the probability of the labels of one row; minus infinity without an alignment."""
        if BLANK in labels:
            return float("-inf")
        lengths = _lengths(memory)
        target = lengths.new_tensor([list(labels)])
        count = lengths.new_tensor([len(labels)])
        if bool((needed_positions(target, count) > lengths).any()):
            return float("-inf")
        return -ctc_losses(self.head(memory.y), lengths, target, count).item()


def _lengths(memory: MemorySequence) -> Int[Tensor, " b"]:
    valid = memory.positions.segment_ids != PADDING_SEGMENT
    return valid.expand(memory.y.shape[:2]).sum(1)


SourceEmbeddingT = TypeVar("SourceEmbeddingT", bound=SourceEmbedding, default=Any)
"""What reads the source of a model."""


@final
class EncoderDecoder(GenerativeModel[Seq2SeqBatch | TranscriptionBatch], Generic[SourceEmbeddingT]):
    """Predicts each next target token: `logits[:, i]` are those of target i + 1; the target begins with a start token.

    The source is what `embed_source` reads: token ids, images, frames of sound.
    Pass one embedding twice and tie the head to it for the three shared matrices of Vaswani et al. (2017, section 3.4).
    Packed rows of pairs need equal segment ids on both sides. `auxiliary` adds losses of the intermediate layers of
    `decoder`, which then must be a `LayeredStack`; ValueError otherwise. `ctc` adds a loss of the encoder's output.
    """

    call_form = ENCODER_DECODER

    def __init__(
        self,
        embed_source: SourceEmbeddingT,
        encoder: Layer,
        embed_target: TokenEmbedding,
        decoder: Layer,
        head: OutputHead,
        *,
        auxiliary: AuxiliaryLoss | None = None,
        ctc: EncoderCTC | None = None,
    ) -> None:
        super().__init__()
        if auxiliary is not None and ctc is not None:
            raise ValueError("losses of intermediate layers cannot be combined with CTC of the encoder")
        self.ctc = ctc
        self.embed_source = embed_source
        self.encoder = encoder
        self.embed_target = embed_target
        self.decoder = decoder
        self.max_source_length = max_length_of(encoder)
        limits = (embed_source.max_length, self.max_source_length, max_length_of(embed_target, decoder))
        self.max_length = min((limit for limit in limits if limit is not None), default=None)
        self.set_head(head, auxiliary)

    def forward(
        self,
        source: Shaped[Tensor, "b *source"],
        target: Int[Tensor, "b t"],
        source_segments: Int[Tensor, "b s"] | None = None,
        target_segments: Int[Tensor, "b t"] | None = None,
        state: ModelState | None = None,
        *,
        watch: WatchFn = no_watch,
        inputs_embeds: Float[Tensor, "b s d"] | None = None,
        decoder_inputs_embeds: Float[Tensor, "b t d"] | None = None,
    ) -> ModelOutput:
        memory = self.encode(source, source_segments, watch=watch, inputs_embeds=inputs_embeds)
        return self.decode(
            target, memory, target_segments, state, watch=watch, decoder_inputs_embeds=decoder_inputs_embeds
        )

    def encode(
        self,
        source: Shaped[Tensor, "b *source"],
        source_segments: Int[Tensor, "b s"] | None = None,
        *,
        layout: SegmentLayout = None,
        watch: WatchFn = no_watch,
        inputs_embeds: Float[Tensor, "b s d"] | None = None,
    ) -> MemorySequence:
        """The encoder's output, to which the decoder attends; computed once per source, a tree like a state.

        `layout` is what a batch knows of the segments. `inputs_embeds` are vectors in place of those of the tokens.
        Raises UserError for them where the source is not read by one table of tokens."""
        if inputs_embeds is None:
            x, positions = self.embed_source.read_source(source, source_segments, layout)
        elif isinstance(self.embed_source, TokenEmbedding):
            x, positions = self.embed_source.read_source(source, source_segments, layout, vectors=inputs_embeds)
        else:
            kind = type(self.embed_source).__name__
            raise UserError(f"inputs_embeds stand for tokens, and the source of this model is read by a {kind}")
        check_length(x.shape[1], self.max_source_length)
        y = apply_layer(self.encoder, x, Context(positions, watch=watch)).y
        # a packed layout names rows, which a reordering of rows would invalidate
        is_packed = isinstance(positions.layout, PackedLayout)
        return MemorySequence(y, positions._replace(layout=None) if is_packed else positions)

    def decode(
        self,
        target: Int[Tensor, "b t"],
        memory: MemorySequence,
        target_segments: Int[Tensor, "b t"] | None = None,
        state: ModelState | None = None,
        *,
        watch: WatchFn = no_watch,
        decoder_inputs_embeds: Float[Tensor, "b t d"] | None = None,
    ) -> ModelOutput:
        """The logits of the target given an encoded source; with a state, `target` continues the tokens before."""
        if target.numel() and not memory.y.shape[1]:
            raise UserError("the source has no tokens, but each target needs a source of one token or more")
        hidden = self._run_decoder(target, target_segments, memory, state, watch, inputs_embeds=decoder_inputs_embeds)
        return ModelOutput(apply_head(self.head, hidden.y), hidden.state, hidden.loss)

    @property
    def decoder_embed(self) -> TokenEmbedding:
        return self.embed_target

    @property
    def decoder_stack(self) -> Layer:
        return self.decoder

    def with_decoder(
        self, stack: Layer, head: OutputHead, auxiliary: AuxiliaryLoss | None
    ) -> "EncoderDecoder[SourceEmbeddingT]":
        return type(self)(
            self.embed_source, self.encoder, self.embed_target, stack, head, auxiliary=auxiliary, ctc=self.ctc
        )

    def head_inputs(self, batch: Seq2SeqBatch | TranscriptionBatch, state: State) -> tuple[LayerOutput, Tensor]:
        tokens, segments, memory, targets, layout = self.decoder_input(batch)
        hidden = self._run_decoder(tokens, segments, memory, state, layout=layout)
        if self.ctc is None or memory is None:
            return hidden, targets
        loss = hidden.loss + self.ctc.extra_loss(memory, tokens, targets)
        return LayerOutput(hidden.y, hidden.state, loss), targets

    def forward_token(self, tokens: Tensor, state: State, memory: MemorySequence | None) -> tuple[Tensor, State]:
        assert memory is not None
        logits, next_state, _ = self.decode(tokens, memory, None, state)
        return logits, next_state

    def decoder_input(self, batch: Seq2SeqBatch | TranscriptionBatch) -> DecoderInput:
        if isinstance(batch, Seq2SeqBatch):
            memory = self.encode(batch.source, batch.source_segments, layout=batch.source_layout)
        else:
            memory = self.encode(batch.features, batch.segments)
        return DecoderInput(batch.target, batch.target_segments, memory, batch.targets, batch.target_layout)
