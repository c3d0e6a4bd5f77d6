"""An encoder-decoder model: a bidirectional encoder of the source and an autoregressive decoder of the target."""

from typing import final

from jaxtyping import Int
from torch import Tensor

from manyformer.batches import Seq2SeqBatch
from manyformer.core import Context, Layer, MemorySequence, PackedLayout, State, WatchFn, no_watch
from manyformer.errors import UserError
from manyformer.models.auxiliary_losses import AuxiliaryLoss
from manyformer.models.embedding import TokenEmbedding
from manyformer.models.generative_model import DecoderInput, GenerativeModel, ModelState
from manyformer.models.model import ModelOutput, max_length_of
from manyformer.models.output_head import OutputHead
from manyformer.models.token_inputs import apply_head, apply_layer
from manyformer.models.token_positions import positions_of


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
        self.embed_source, self.encoder, self.embed_target, self.decoder = embed_source, encoder, embed_target, decoder
        self.max_length = max_length_of(embed_source, encoder, embed_target, decoder)
        self.set_head(head, auxiliary)

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
        positions, _ = positions_of(source, source_segments, None)
        self.check_length(source.shape[1])
        y = apply_layer(self.encoder, self.embed_source(source, positions), Context(positions, watch=watch)).y
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
    ) -> ModelOutput:
        """The logits of the target given an encoded source; with a state, `target` continues the tokens before."""
        if target.numel() and not memory.y.shape[1]:
            raise UserError("the source has no tokens, but each target needs a source of one token or more")
        hidden = self._run_decoder(target, target_segments, memory, state, watch)
        return ModelOutput(apply_head(self.head, hidden.y), hidden.state, hidden.loss)

    @property
    def decoder_embed(self) -> TokenEmbedding:
        return self.embed_target

    @property
    def decoder_stack(self) -> Layer:
        return self.decoder

    def with_decoder(self, stack: Layer, head: OutputHead, auxiliary: AuxiliaryLoss | None) -> "EncoderDecoder":
        return type(self)(self.embed_source, self.encoder, self.embed_target, stack, head, auxiliary=auxiliary)

    def forward_token(self, tokens: Tensor, state: State, memory: MemorySequence | None) -> tuple[Tensor, State]:
        assert memory is not None
        logits, next_state, _ = self.decode(tokens, memory, None, state)
        return logits, next_state

    def decoder_input(self, batch: Seq2SeqBatch) -> DecoderInput:
        memory = self.encode(batch.source, batch.source_segments)
        return DecoderInput(batch.target, batch.target_segments, memory, batch.targets)
