"""An encoder-decoder without attention: a GRU that ends in one vector, and a GRU that reads it at every step."""

from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.autocast import autocast_disabled
from manyformer.core import Context, Layer, LayerOutput, MemorySequence, State, TokenPositions
from manyformer.dropout import Dropout
from manyformer.mixers.gru import GRUWeights, gather_columns, initial_states, project_inputs, state_resets
from manyformer.ops.gru_scan import gru_scan


@final
class ForwardGRU(Layer):
    """A GRU over each document, from its first token to its last (Cho et al. 2014, arXiv:1406.1078, section 2.2)."""

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.gru = GRUWeights(width, dim)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        if state is not None:
            raise ValueError("ForwardGRU encodes whole documents, so it continues from no state")
        gates = self.gru.gates.weight.mT[None]
        candidate = self.gru.candidate.weight.mT[None]
        inputs = project_inputs(self.gru, x)[None]
        with autocast_disabled(x.device):
            initial_state = inputs.new_zeros(1, x.shape[0], self.dim)
            result = gru_scan(inputs, gates, candidate, initial_state, None, state_resets(ctx.positions))
        return LayerOutput(result.states_out[0].transpose(0, 1).to(x))


class FixedVectorState(NamedTuple):
    """The hidden state after the last token."""

    hidden: Float[Tensor, "b n"]


@final
class FixedVectorGRU(Layer):
    """A GRU decoder that reads one vector c of the source at every step: the encoder's output at its last token.

    Cho et al. 2014, section 2.2, in the form of Bahdanau et al. 2015 (arXiv:1409.0473), whose decoder it is if every
    context vector is c. The initial state of a document is tanh(W_s c).
    """

    def __init__(self, width: int, dim: int, memory_dim: int, *, out_dim: int, dropout: float) -> None:
        super().__init__()
        self.dim = dim
        self.gru = GRUWeights(width, dim)
        self.context_proj = nn.Linear(memory_dim, 3 * dim, bias=False)
        self.initial_proj = nn.Linear(memory_dim, dim)
        self.readout = nn.Linear(dim + width + memory_dim, 2 * out_dim)
        self.dropout = Dropout(dropout)

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        wide_dtype = torch.promote_types(dtype, torch.float32)
        return FixedVectorState(torch.zeros(batch, self.dim, device=device, dtype=wide_dtype))

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        memory = ctx.memory
        if memory is None:
            raise ValueError("FixedVectorGRU reads a source sequence, but the context has no memory")

        def document_states(positions: TokenPositions) -> Tensor:
            states: Tensor = self.initial_proj(source_vectors(positions, memory)).tanh()
            return states

        vectors = source_vectors(ctx.positions, memory)
        inputs = (project_inputs(self.gru, x) + self.context_proj(vectors).transpose(0, 1))[None]
        initial_state, resets = initial_states(ctx.positions, document_states, None if state is None else state.hidden)
        gates = self.gru.gates.weight.mT[None]
        candidate = self.gru.candidate.weight.mT[None]
        with autocast_disabled(x.device):
            result = gru_scan(inputs, gates, candidate, initial_state[None], None, resets)
        features = torch.cat([result.states_in[0].transpose(0, 1).to(x), x, vectors.to(x)], dim=-1)
        y: Tensor = self.dropout(torch.maximum(*self.readout(features).chunk(2, dim=-1)))
        return LayerOutput(y, None if state is None else FixedVectorState(result.states_out[0, -1]))


def source_vectors(positions: TokenPositions, memory: MemorySequence) -> Float[Tensor, "b l m"]:
    """The encoder's output at the last token of each target token's source; zeros where there is none."""
    same_document = memory.positions.segment_ids[:, None] == positions.segment_ids[:, :, None]
    from_end = same_document.byte().flip(-1).argmax(-1)
    return gather_columns(memory.y, memory.y.shape[1] - 1 - from_end) * same_document.any(-1, keepdim=True)
