"""A latent array between a sequence and its outputs: attention whose cost is linear in both lengths (Perceiver)."""

from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from manyformer.nn.core import (
    PADDING_SEGMENT,
    AxisKind,
    Context,
    ContiguousLayout,
    Layer,
    LayerOutput,
    MakesStream,
    MemorySequence,
    PackedLayout,
    State,
    TokenPositions,
    WeightAxes,
    contiguous_positions,
)
from manyformer.nn.positions.absolute import LearnedPosition
from manyformer.nn.runtime.devices import send
from manyformer.nn.runtime.torch_internals import compiler_disabled
from manyformer.nn.runtime.training_hooks import UndecayedParameters

LATENT_STD = 0.02


class EncodedLatents(NamedTuple):
    """The latent vectors of all documents of each row, with their positions, and the auxiliary losses."""

    sequence: MemorySequence
    loss: Tensor | float


@final
class LatentArrayEncoder(Layer, MakesStream, UndecayedParameters):
    """Maps a sequence (b, l, d) to `count` latent vectors (b, n, z) of each document: the encoder of Perceiver.

    Jaegle et al. 2021, arXiv:2103.03206, section 3.1. The latents begin as learned vectors of width `dim` and attend to
    the normalized sequence in `inner`, a layer with attention to `ctx.memory`: only there does the length of the
    sequence count. Each document of packed rows has latents of its own. The output is of another length than the input,
    so the layer stands at an end of a model, or in a `LatentArrayLayer`; it is bidirectional and has no decoding
    state."""

    undecayed = ("latents",)

    def __init__(self, inner: Layer, count: int, dim: int, *, input_norm: nn.Module) -> None:
        super().__init__()
        if count < 1:
            raise ValueError(f"LatentArrayEncoder: count ({count}) must be at least 1")
        self.inner = inner
        self.input_norm = input_norm
        self.latents = nn.Parameter(torch.empty(count, dim).normal_(std=LATENT_STD))

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        if state:
            raise ValueError("LatentArrayEncoder is bidirectional: it cannot continue from a state")
        encoded = self.encode(x, ctx)
        return LayerOutput(encoded.sequence.y, None, encoded.loss)

    def outer_axes(self, axes: WeightAxes) -> WeightAxes:
        # the latents are the stream of `inner`, and the stream of this layer is its source
        keys: dict[AxisKind, AxisKind] = {"stream": "latents", "source": "stream"}
        return WeightAxes("latents" if axes.rows == "stream" else axes.rows, keys.get(axes.keys, axes.keys))

    def encode(self, x: Float[Tensor, "b l d"], ctx: Context) -> EncodedLatents:
        """The latents of a sequence."""
        positions = self.latent_positions(ctx.positions, x.shape[0])
        # the position of a latent is its number
        latents = self.latents.to(x.dtype)[positions.position_ids]
        memory = MemorySequence(self.input_norm(x), ctx.positions)
        y, _, loss = self.inner(latents, Context(positions, memory, ctx.watch))
        return EncodedLatents(MemorySequence(y, positions), loss)

    def latent_positions(self, positions: TokenPositions, rows: int) -> TokenPositions:
        """The latents of the documents of each row, one document after the other."""
        count = len(self.latents)
        device = positions.segment_ids.device
        if isinstance(positions.layout, ContiguousLayout):
            return contiguous_positions(rows, 0, count, device)
        documents = _list_documents(positions, rows)
        position_ids = torch.arange(count, device=device).repeat(documents.shape[1]).expand(rows, -1)
        return TokenPositions(position_ids, documents.repeat_interleave(count, 1))

    def extra_repr(self) -> str:
        return f"{len(self.latents)} latents"


@final
class LatentArrayLayer(Layer, MakesStream):
    """Maps a sequence to one of the same length by way of latents (Jaegle et al. 2021, arXiv:2107.14795, section 3.1).

    Each output is a query, the learned vector of its position, that attends to the latents of `encoder` in `decoder`,
    a layer with attention to `ctx.memory`. An output thus sees its input only by way of the latents."""

    def __init__(self, encoder: LatentArrayEncoder, decoder: Layer, *, queries: LearnedPosition) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder
        self.queries = queries

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        if state:
            raise ValueError("LatentArrayLayer is bidirectional: it cannot continue from a state")
        latents, encoder_loss = self.encoder.encode(x, ctx)
        # the input itself is not among the queries: it reaches the output by way of the latents alone
        queries = self.queries.embed(torch.zeros_like(x), ctx.positions)
        y, _, loss = self.decoder(queries, Context(ctx.positions, latents, ctx.watch))
        return LayerOutput(y, None, encoder_loss + loss)

    def outer_axes(self, axes: WeightAxes) -> WeightAxes:
        # the encoder has no source any more: its latents are that of the decoder
        if axes.keys == "source":
            return axes._replace(keys="latents")
        return axes


# the number of documents depends on tensor values
@compiler_disabled
def _list_documents(positions: TokenPositions, rows: int) -> Int[Tensor, "b m"]:
    """The segment ids of the documents of each row, in their order; `PADDING_SEGMENT` fills rows with fewer."""
    segment_ids = positions.segment_ids
    layout = positions.layout
    row_ids = None
    if isinstance(layout, PackedLayout):
        row_ids = layout.ids_of_rows(rows)
    if row_ids is None:
        ids = [torch.unique(row[row != PADDING_SEGMENT]) for row in segment_ids.expand(rows, -1).cpu()]
    else:
        ids = [torch.tensor(row, dtype=segment_ids.dtype, device="cpu") for row in row_ids]
    # a batch of padding alone has latents, too, which see nothing
    columns = max(1, *map(len, ids))
    # one more row of full length, which is cut off again, gives all of them that length
    padded = pad_sequence([*ids, ids[0].new_zeros(columns)], batch_first=True, padding_value=PADDING_SEGMENT)
    return send(padded[:-1], segment_ids.device)
