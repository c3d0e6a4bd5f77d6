"""An encoder-decoder model: a bidirectional encoder of the source and an autoregressive decoder of the target."""

from typing import final

from jaxtyping import Int
from torch import Tensor

from manyformer.batches import Seq2SeqBatch
from manyformer.binding import has_hooks
from manyformer.core import (
    Context,
    Layer,
    LayeredStack,
    LayerOutput,
    MemorySequence,
    PackedLayout,
    State,
    WatchFn,
    no_watch,
)
from manyformer.models.auxiliary_losses import AuxiliaryLoss, deep_loss
from manyformer.models.embedding import TokenEmbedding
from manyformer.models.generative_model import GenerativeModel
from manyformer.models.language_model import ModelState
from manyformer.models.model import BatchLoss, BatchScore, ModelOutput, max_length_of
from manyformer.models.next_token_step import NextTokenFn, next_token_step
from manyformer.models.output_head import OutputHead
from manyformer.models.token_positions import empty_tail, positions_of


@final
class EncoderDecoder(GenerativeModel[Seq2SeqBatch]):
    """Predicts each next target token: `logits[:, i]` are those of target i + 1; the target begins with a start token.

    Pass one embedding twice and tie the head to it for the three shared matrices of Vaswani et al. (2017, section 3.4).
    Packed rows of pairs need equal segment ids on both sides. `auxiliary` adds losses of the intermediate layers of
    `decoder`, which then must be a `LayeredStack`; ValueError otherwise.
    """

    def __init__(
        self,
        embed_source: TokenEmbedding,
        encoder: Layer,
        embed_target: TokenEmbedding,
        decoder: Layer,
        head: OutputHead,
        *,
        auxiliary: AuxiliaryLoss | None = None,
    ) -> None:
        super().__init__()
        if auxiliary is not None and not isinstance(decoder, LayeredStack):
            raise ValueError(f"auxiliary losses need the layers of a Chain, and a {type(decoder).__name__} has none")
        self.embed_source, self.encoder = embed_source, encoder
        self.embed_target, self.decoder, self.head, self.auxiliary = embed_target, decoder, head, auxiliary
        self.max_length = max_length_of(embed_source, encoder, embed_target, decoder)
        self.vocab = head.classes

    def forward(
        self,
        source: Int[Tensor, "b s"],
        target: Int[Tensor, "b t"],
        source_segments: Int[Tensor, "b s"] | None = None,
        target_segments: Int[Tensor, "b t"] | None = None,
        state: ModelState | None = None,
        *,
        watch: WatchFn = no_watch,
    ) -> ModelOutput:
        memory = self.encode(source, source_segments, watch=watch)
        return self.decode(target, memory, target_segments, state, watch=watch)

    def encode(
        self,
        source: Int[Tensor, "b s"],
        source_segments: Int[Tensor, "b s"] | None = None,
        *,
        watch: WatchFn = no_watch,
    ) -> MemorySequence:
        """The encoder's output, to which the decoder attends; computed once per source, a tree like a state."""
        self.check_length(source.shape[1])
        positions, _ = positions_of(source, source_segments, None)
        y = self.encoder(self.embed_source(source, positions), Context(positions, watch=watch)).y
        # a packed layout names rows, which a reordering of rows would invalidate
        return MemorySequence(
            y, positions._replace(layout=None) if isinstance(positions.layout, PackedLayout) else positions
        )

    def decode(
        self,
        target: Int[Tensor, "b t"],
        memory: MemorySequence,
        target_segments: Int[Tensor, "b t"] | None = None,
        state: ModelState | None = None,
        *,
        watch: WatchFn = no_watch,
    ) -> ModelOutput:
        """The logits of the target given an encoded source; with a state, `target` continues the tokens before."""
        hidden = self._decode(target, memory, target_segments, state, watch)
        return ModelOutput(self.head(hidden.y), hidden.state, hidden.loss)

    def init_state(self, batch: int, *, capacity: int | None = None) -> ModelState:
        """The decoder's state before any token."""
        body = self.decoder.init_state(batch, capacity=capacity, device=self.device, dtype=self.state_dtype)
        return ModelState(body, empty_tail(batch, self.device))

    @property
    def decoder_stack(self) -> Layer:
        return self.decoder

    @property
    def decoder_width(self) -> int:
        return self.embed_target.token.embedding_dim

    def with_decoder(self, stack: Layer, head: OutputHead, auxiliary: AuxiliaryLoss | None) -> "EncoderDecoder":
        return type(self)(self.embed_source, self.encoder, self.embed_target, stack, head, auxiliary=auxiliary)

    def next_token(self) -> NextTokenFn:
        def forward(tokens: Tensor, state: State, memory: MemorySequence | None) -> tuple[Tensor, State]:
            assert memory is not None
            logits, next_state, _ = self.decode(tokens, memory, None, state)
            return logits, next_state

        has_step = not (self.training or has_hooks(self))
        return next_token_step(self.embed_target, self.decoder, self.head, forward) if has_step else forward

    def loss(self, batch: Seq2SeqBatch, *, label_smoothing: float = 0.0, state: State = None) -> BatchLoss:
        if self.auxiliary is not None:
            return self._deep_loss(batch, self.auxiliary, label_smoothing)
        hidden = self._decode_batch(batch)
        return self.head.loss(hidden.y, batch.targets, label_smoothing=label_smoothing)._replace(extra=hidden.loss)

    def score(self, batch: Seq2SeqBatch, *, state: State = None) -> BatchScore:
        return self.head.score(self._decode_batch(batch).y, batch.targets)

    def _deep_loss(self, batch: Seq2SeqBatch, auxiliary: AuxiliaryLoss, label_smoothing: float) -> BatchLoss:
        assert isinstance(self.decoder, LayeredStack)
        memory = self.encode(batch.source, batch.source_segments)
        self.check_length(batch.target.shape[1])
        positions, _ = positions_of(batch.target, batch.target_segments, None)
        x, ctx = self.embed_target(batch.target, positions), Context(positions, memory)
        return deep_loss(auxiliary, self.decoder, x, ctx, self.head, batch.targets, label_smoothing=label_smoothing)

    def _decode_batch(self, batch: Seq2SeqBatch) -> LayerOutput:
        memory = self.encode(batch.source, batch.source_segments)
        return self._decode(batch.target, memory, batch.target_segments, None, no_watch)

    def _decode(
        self, target: Tensor, memory: MemorySequence, segments: Tensor | None, state: ModelState | None, watch: WatchFn
    ) -> LayerOutput:
        self.check_length(target.shape[1])
        positions, tail = positions_of(target, segments, None if state is None else state.tail)
        ctx = Context(positions, memory, watch)
        y, body, loss = self.decoder(self.embed_target(target, positions), ctx, state and state.body)
        return LayerOutput(y, None if tail is None else ModelState(body, tail), loss)
