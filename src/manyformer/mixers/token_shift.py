"""Token shift: the layers of RWKV see each token together with the one before it."""

from collections.abc import Sequence
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import Context, Layer, LayerOutput, State, TokenPositions
from manyformer.ops.depthwise_convolution import ConvolutionTokens, convolve_neighbours, one_document_rows
from manyformer.ops.token_mixtures import mix_tokens, squared_relu
from manyformer.training_hooks import UndecayedParameters


@final
class TokenShift(nn.Module, UndecayedParameters):
    """x + m_n * (p - x) for each of several vectors m_n, where p is the token before x in its document, or zeros.

    Peng et al. 2025 (RWKV-7, arXiv:2503.14456), section 4, equation 3. The state of a row is its last token."""

    undecayed = ("mix",)

    def __init__(self, initial: Float[Tensor, "n d"]) -> None:
        super().__init__()
        self.mix = nn.Parameter(initial)

    def init_state(self, batch: int, *, device: torch.device, dtype: torch.dtype) -> State:
        """The state before any token."""
        return ConvolutionTokens.empty(batch, 1, self.mix.shape[1], device=device, dtype=dtype)

    def forward(
        self, x: Float[Tensor, "b l d"], positions: TokenPositions, state: ConvolutionTokens | None
    ) -> tuple[Sequence[Tensor], ConvolutionTokens | None]:
        """The mixtures; a `state` is continued and the next one returned."""
        rows = None
        if state is None:
            rows = one_document_rows(x, positions)
        if rows is None:
            taps = F.pad(x.new_ones(1, x.shape[2]), (0, 0, 0, 1))
            previous, state = convolve_neighbours(x, taps, positions, state, causal=True)
        else:
            previous = F.pad(rows[:, :-1], (0, 0, 1, 0))
        return mix_tokens(x, previous, self.mix.to(x.dtype)), state


@final
class ShiftedFeedForward(Layer):
    """W_down relu(W_up x')^2 of the shifted token x' (RWKV-7, section 4.2), with `ff_dim` channels, 4 dim by default.

    The mixture begins at 1 - (i / dim)^`power` for channel i."""

    def __init__(self, dim: int, ff_dim: int | None = None, *, power: float = 1.0) -> None:
        super().__init__()
        ff_dim = 4 * dim if ff_dim is None else ff_dim
        self.shift = TokenShift(initial_mixture(dim, power)[None])
        self.up = nn.Linear(dim, ff_dim, bias=False)
        self.down = nn.Linear(ff_dim, dim, bias=False)

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        return self.shift.init_state(batch, device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        (shifted,), state = self.shift(x, ctx.positions, state)
        return LayerOutput(self.down(squared_relu(self.up(shifted))), state)


def initial_mixture(dim: int, power: float) -> Float[Tensor, " d"]:
    """1 - (i / dim)^power for the channels i."""
    return 1 - (torch.arange(dim) / dim) ** power
