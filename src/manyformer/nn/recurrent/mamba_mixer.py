"""The layer of Mamba: a short convolution, a selective scan over the text, and a gate."""

import math
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from manyformer.nn.convolution.depthwise_convolution import ConvolutionTokens, ShortConvolution
from manyformer.nn.core import Context, ContiguousLayout, Layer, LayerOutput, State, TokenPositions
from manyformer.nn.linear.decay_gates import draw_step_biases
from manyformer.nn.ops.document_rows import NO_SEGMENT, segment_runs
from manyformer.nn.recurrent.selective_scan import selective_scan
from manyformer.nn.runtime.length_norms import RMSNorm
from manyformer.nn.runtime.torch_internals import autocast_disabled
from manyformer.nn.runtime.training_hooks import FusedRows


class MambaState(NamedTuple):
    """The last inputs of the convolution, the memory of each channel, and the segment id of the last token."""

    convolution: ConvolutionTokens
    memory: Float[Tensor, "b n s"]
    segment_ids: Int[Tensor, " b"]


@final
class StepProjection(nn.Module):
    """Maps `rank` channels to step sizes softplus(W x + b), which begin log-uniform in [0.001, 0.1] (section 3.6)."""

    def __init__(self, rank: int, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, rank))
        self.bias = nn.Parameter(torch.empty(channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights up to 1 / sqrt(rank), and biases."""
        limit = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -limit, limit)
        draw_step_biases(self.bias)

    def forward(self, x: Float[Tensor, "b l r"]) -> Float[Tensor, "b l n"]:
        return F.softplus(F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype)))


@final
class MambaMixer(Layer, FusedRows):
    """Mamba's layer (Gu and Dao 2023, arXiv:2312.00752, section 3.4): a gated selective scan over convolved channels.

    `channels` of the stream pass a short convolution of `conv_size` tokens; they decide the step size of each channel,
    through `rank` channels, and what all channels write to and read from memories of `state_dim` entries each (see
    `selective_scan`). Channels skip the memory too, and SiLU of as many further channels gates them. With `norm_eps`
    the `rank` channels, what is written and what is read are divided by their root mean square, as in Jamba. With
    `negative_eigenvalues` a token may change the sign of a memory (Grazzi et al. 2024, arXiv:2411.12537, section 4).
    Memories are of float32 at least; they begin empty in every document, and padding leaves them as they are."""

    def __init__(
        self,
        dim: int,
        channels: int,
        *,
        state_dim: int,
        rank: int,
        conv_size: int = 4,
        norm_eps: float | None = None,
        negative_eigenvalues: bool = False,
    ) -> None:
        super().__init__()
        self.negative_eigenvalues = negative_eigenvalues
        self.state_dim = state_dim
        self.rank = rank
        self.channels = channels
        self.in_proj = nn.Linear(dim, 2 * channels, bias=False)
        self.short_convolution = ShortConvolution(channels, conv_size, bias=True)
        self.x_proj = nn.Linear(channels, rank + 2 * state_dim, bias=False)
        self.dt_proj = StepProjection(rank, channels)
        # flat, because optimizers decay the weights of matrices, which rates are not
        self.a_log = nn.Parameter(torch.arange(1.0, state_dim + 1).log().repeat(channels))
        self.skip = nn.Parameter(torch.ones(channels))
        self.out_proj = nn.Linear(channels, dim, bias=False)
        self.norms: nn.ModuleList | None = None
        if norm_eps is not None:
            self.norms = nn.ModuleList(RMSNorm(width, norm_eps) for width in (rank, state_dim, state_dim))

    def row_parts(self) -> dict[str, tuple[int, ...]]:
        return {
            "in_proj.weight": (self.channels, self.channels),
            "x_proj.weight": (self.rank, self.state_dim, self.state_dim),
        }

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        wide_dtype = torch.promote_types(dtype, torch.float32)
        return MambaState(
            self.short_convolution.init_state(batch, device=device, dtype=dtype),
            torch.zeros(batch, self.channels, self.state_dim, device=device, dtype=wide_dtype),
            torch.full((batch,), NO_SEGMENT, dtype=torch.long, device=device),
        )

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        convolved, gate = self.in_proj(x).chunk(2, -1)
        (convolved,), convolution = self.short_convolution([convolved], ctx.positions, state and state.convolution)
        scanned = torch.split(self.x_proj(convolved), [self.rank, self.state_dim, self.state_dim], -1)
        if self.norms is not None:
            scanned = tuple(norm(part) for norm, part in zip(self.norms, scanned))
        rank, writes, reads = scanned
        with autocast_disabled(x.device):
            y, memory, segment_ids = self._scan(convolved, rank, writes, reads, ctx.positions, state)
        y = self.out_proj(y.to(gate.dtype) * F.silu(gate))
        return LayerOutput(y, None if state is None else MambaState(convolution, memory, segment_ids))

    def _scan(
        self,
        x: Float[Tensor, "b l n"],
        rank: Float[Tensor, "b l r"],
        writes: Float[Tensor, "b l s"],
        reads: Float[Tensor, "b l s"],
        positions: TokenPositions,
        state: MambaState | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What the memories return, with the skip, the last memories, and the last segment ids."""
        dtype = torch.promote_types(self.a_log.dtype, torch.float32)
        if state is None:
            previous = self.init_state(x.shape[0], device=x.device, dtype=dtype)
        else:
            previous = state
        x, rank, writes, reads = (part.to(dtype) for part in (x, rank, writes, reads))
        steps = self.dt_proj(rank)
        starts = None
        segment_ids = positions.segment_ids[:, -1].expand(x.shape[0])
        if not isinstance(positions.layout, ContiguousLayout):
            runs = segment_runs(positions.segment_ids, previous.segment_ids)
            starts = runs.run_ids.diff(prepend=torch.zeros_like(runs.run_ids[:, :1])) > 0
            # a step of size zero leaves the memory as it is
            steps = steps.masked_fill(~runs.valid[..., None], 0.0)
            segment_ids = runs.last_segment
        # learned as a logarithm, so that every memory decays
        rates = -self.a_log.to(dtype).exp().view(self.channels, self.state_dim)
        inputs = x, steps, rates, writes, reads, previous.memory.to(dtype), starts
        y, memory = selective_scan(*inputs, signed=self.negative_eigenvalues)
        # a copy, since the ids may be a view of the caller's tensor
        return y + self.skip * x, memory, segment_ids.clone()

    def extra_repr(self) -> str:
        return f"channels={self.channels}, state_dim={self.state_dim}, rank={self.rank}"


def default_rank(dim: int) -> int:
    """The rank of step sizes in the paper's code: a sixteenth of the stream's width."""
    return math.ceil(dim / 16)
