"""An encoder-decoder: one sequence is read as a whole, another is written token by token."""

from typing import final

from jaxtyping import Int
from torch import Tensor

from manyformer.batches import Batch, PairBatch
from manyformer.core import Context, Deep, Layer, Memory, Out, Packed, Watch, ignore
from manyformer.models.auxiliary import Auxiliary, deep_loss
from manyformer.models.base import Loss, Model, ModelOut, Score, longest_in
from manyformer.models.embedding import Embedding
from manyformer.models.language_model import Stream
from manyformer.models.output import Output
from manyformer.models.places import fresh, locate


@final
class EncoderDecoder(Model):
    """Predicts each next target token: `logits[:, i]` is about target i + 1; the target begins with the start token.

    Pass one embedding twice and tie the head to it for the three shared matrices of Vaswani et al. (2017, section 3.4).
    Packed rows of pairs work where both sides number their documents alike. `auxiliary` adds losses from between the
    layers of `decoder`, which then must show them.
    """

    def __init__(
        self,
        embed_source: Embedding,
        encoder: Layer,
        embed_target: Embedding,
        decoder: Layer,
        head: Output,
        *,
        auxiliary: Auxiliary | None = None,
    ) -> None:
        super().__init__()
        if auxiliary is not None and not isinstance(decoder, Deep):
            raise ValueError(f"auxiliary losses need the layers of a Chain, and a {type(decoder).__name__} shows none")
        self.embed_source, self.encoder = embed_source, encoder
        self.embed_target, self.decoder, self.head, self.auxiliary = embed_target, decoder, head, auxiliary
        self.longest = longest_in(embed_source, encoder, embed_target, decoder)
        self.vocab = head.classes

    def forward(
        self,
        source: Int[Tensor, "b s"],
        target: Int[Tensor, "b t"],
        source_segments: Int[Tensor, "b s"] | None = None,
        target_segments: Int[Tensor, "b t"] | None = None,
        state: Stream | None = None,
        *,
        watch: Watch = ignore,
    ) -> ModelOut:
        memory = self.encode(source, source_segments, watch=watch)
        return self.decode(target, memory, target_segments, state, watch=watch)

    def encode(
        self, source: Int[Tensor, "b s"], source_segments: Int[Tensor, "b s"] | None = None, *, watch: Watch = ignore
    ) -> Memory:
        """What the decoder may attend to; made once per source, and mapped over by `tree_map` like a state."""
        self.check_length(source.shape[1])
        place, _ = locate(source, source_segments, None)
        y = self.encoder(self.embed_source(source, place), Context(place, watch=watch)).y
        # which rows the documents are in does not survive a reordering of rows
        return Memory(y, place._replace(layout=None) if isinstance(place.layout, Packed) else place)

    def decode(
        self,
        target: Int[Tensor, "b t"],
        memory: Memory,
        target_segments: Int[Tensor, "b t"] | None = None,
        state: Stream | None = None,
        *,
        watch: Watch = ignore,
    ) -> ModelOut:
        """Logits for the target given an encoded source; with a state, `target` is what comes next."""
        hidden = self._decode(target, memory, target_segments, state, watch)
        return ModelOut(self.head(hidden.y), hidden.state, hidden.loss)

    def start(self, batch: int, *, capacity: int | None = None) -> Stream:
        """The decoder's state before any token."""
        body = self.decoder.start(batch, capacity=capacity, device=self.device, dtype=self.state_dtype)
        return Stream(body, fresh(batch, self.device))

    def loss(self, batch: Batch, *, smoothing: float = 0.0) -> Loss:
        assert isinstance(batch, PairBatch)
        if self.auxiliary is not None:
            return self._deep_loss(batch, self.auxiliary, smoothing)
        hidden = self._both(batch)
        return self.head.loss(hidden.y, batch.targets, smoothing=smoothing)._replace(extra=hidden.loss)

    def score(self, batch: Batch) -> Score:
        assert isinstance(batch, PairBatch)
        return self.head.score(self._both(batch).y, batch.targets)

    def _deep_loss(self, batch: PairBatch, auxiliary: Auxiliary, smoothing: float) -> Loss:
        assert isinstance(self.decoder, Deep)
        memory = self.encode(batch.source, batch.source_segments)
        self.check_length(batch.target.shape[1])
        place, _ = locate(batch.target, batch.target_segments, None)
        x, ctx = self.embed_target(batch.target, place), Context(place, memory)
        return deep_loss(auxiliary, self.decoder, x, ctx, self.head, batch.targets, smoothing=smoothing)

    def _both(self, batch: PairBatch) -> Out:
        memory = self.encode(batch.source, batch.source_segments)
        return self._decode(batch.target, memory, batch.target_segments, None, ignore)

    def _decode(
        self, target: Tensor, memory: Memory, segments: Tensor | None, state: Stream | None, watch: Watch
    ) -> Out:
        self.check_length(target.shape[1])
        place, tail = locate(target, segments, None if state is None else state.tail)
        ctx = Context(place, memory, watch)
        y, body, loss = self.decoder(self.embed_target(target, place), ctx, state and state.body)
        return Out(y, None if tail is None else Stream(body, tail), loss)
