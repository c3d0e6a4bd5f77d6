"""The short convolution of today's recurrent layers: queries, keys and values see the few tokens before them."""

from collections.abc import Sequence
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.nn.convolution.depthwise_convolution import (
    ConvolutionTokens,
    convolve_neighbours,
    convolve_rows,
    one_document_rows,
)
from manyformer.nn.core import ContiguousLayout, State, TokenPositions
from manyformer.nn.runtime.head_selection import select_entries


@final
class ShortConvolution(nn.Module):
    """A causal depthwise convolution over `size` tokens of the same document, then SiLU (Gu and Dao 2023, section 3.4).

    `Attention` applies it to the projected queries, keys and values side by side, `channels` in total, before they
    become heads. Tokens of other documents and padding count as zeros. The state of a row is its last `size` - 1
    inputs. Raises ValueError for a size below 1."""

    def __init__(self, channels: int, size: int = 4, *, bias: bool = False) -> None:
        super().__init__()
        if size < 1:
            raise ValueError(f"ShortConvolution: size ({size}) must be at least 1 token")
        self.weight = nn.Parameter(torch.empty(size, channels))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize like torch's convolutions: uniform up to 1 / sqrt(size)."""
        limit = len(self.weight) ** -0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -limit, limit)

    def init_state(self, batch: int, *, device: torch.device, dtype: torch.dtype) -> State:
        """The state before any token."""
        size, channels = self.weight.shape
        return ConvolutionTokens.empty(batch, size - 1, channels, device=device, dtype=dtype)

    def forward(
        self, parts: Sequence[Float[Tensor, "b l _"]], positions: TokenPositions, state: ConvolutionTokens | None
    ) -> tuple[list[Tensor], ConvolutionTokens | None]:
        """The convolved channels, whose `parts` lie side by side; a `state` is continued and the next one returned."""
        widths = [part.shape[-1] for part in parts]
        weight = self.weight.to(parts[0].dtype)
        if state is not None:
            rows = []
        else:
            # rows of one document each are convolved part by part, without joining queries, keys and values
            rows = [one_document_rows(part, positions) for part in parts]
        complete_rows = [part for part in rows if part is not None]
        if complete_rows:
            # depthwise: every channel has a filter of its own, so that parts are independent
            part_weights = torch.split(weight, widths, 1)
            convolved = [
                convolve_rows(part, part_weight, causal=True) for part, part_weight in zip(complete_rows, part_weights)
            ]
        else:
            y, state = convolve_neighbours(torch.cat(list(parts), -1), weight, positions, state, causal=True)
            if y.shape[1] == 1 and isinstance(positions.layout, ContiguousLayout):
                # of one token the calls cost more than the channels
                y = F.silu(y if self.bias is None else y + self.bias.to(y.dtype))
                return list(y.split_with_sizes(widths, -1)), state
            convolved = list(torch.split(y, widths, -1))
        if self.bias is not None:
            convolved = [y + bias.to(y.dtype) for y, bias in zip(convolved, torch.split(self.bias, widths))]
        return [F.silu(y) for y in convolved], state

    def keep_channels(self, channels: Sequence[int]) -> None:
        """Remove all channels but these, in place."""
        select_entries(self, "weight", channels, 1)
        if self.bias is not None:
            select_entries(self, "bias", channels, 0)

    def extra_repr(self) -> str:
        return f"size={len(self.weight)}, channels={self.weight.shape[1]}"
