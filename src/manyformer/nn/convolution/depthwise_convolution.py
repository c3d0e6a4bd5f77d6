"""Depthwise convolutions along a text, over neighbors by position ids rather than by columns.

Rows of one document each, whose neighbors are columns, are computed as sums of shifted rows.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.nn.core import PADDING_SEGMENT, AlignedLayout, ContiguousLayout, PackedLayout, State, TokenPositions
from manyformer.nn.runtime.device_reads import block_elements
from manyformer.nn.runtime.handwritten_gradient import HandwrittenGradient
from manyformer.nn.runtime.head_selection import select_entries


class ConvolutionTokens(NamedTuple):
    """Tokens with their positions and documents: those of a call, or as a state the last `size` - 1 of each row."""

    x: Float[Tensor, "b n d"]
    position_ids: Int[Tensor, "b n"]
    segment_ids: Int[Tensor, "b n"]

    @classmethod
    def empty(
        cls, rows: int, columns: int, dim: int, *, device: torch.device, dtype: torch.dtype
    ) -> "ConvolutionTokens":
        """Padding, as before any token."""
        zeros = torch.zeros(rows, columns, dtype=torch.long, device=device)
        x = torch.zeros(rows, columns, dim, device=device, dtype=dtype)
        return cls(x, zeros, torch.full_like(zeros, PADDING_SEGMENT))

    def gather(self, columns: Int[Tensor, "b m"]) -> "ConvolutionTokens":
        """The tokens in these columns of each row."""
        x = self.x.gather(1, columns[..., None].expand(-1, -1, self.x.shape[2]))
        return ConvolutionTokens(x, self.position_ids.gather(1, columns), self.segment_ids.gather(1, columns))

    def append(self, new: "ConvolutionTokens") -> "ConvolutionTokens":
        """These tokens followed by `new` ones."""
        return ConvolutionTokens(*(torch.cat([old.to(field.dtype), field], 1) for old, field in zip(self, new)))


def convolve_neighbours(
    x: Float[Tensor, "b l d"],
    weight: Float[Tensor, "n d"],
    positions: TokenPositions,
    state: ConvolutionTokens | None,
    *,
    causal: bool,
) -> tuple[Float[Tensor, "b l d"], ConvolutionTokens | None]:
    """Each channel convolved over its neighbours in the same document, and the next state if there is one.

    The n neighbours include the token itself: if `causal`, the token and earlier ones; else equally many on either
    side. Missing ones count as zeros. Raises ValueError for a state unless causal."""
    size = len(weight)
    if state is not None and not causal:
        raise ValueError(
            "a later token changes earlier outputs of this convolution; only a causal one can continue from a state"
        )
    if state is not None and x.shape[1] == 1 and isinstance(positions.layout, ContiguousLayout):
        # the state holds the tokens before this one, and zeros before the document
        latest_tokens = torch.cat([state.x.to(x.dtype), x], 1)
        ids = (torch.cat([old[:, 1:], new.expand(len(x), 1)], 1) for old, new in zip(state[1:], positions[:2]))
        return (latest_tokens * weight).sum(1, keepdim=True), ConvolutionTokens(latest_tokens[:, 1:], *ids)
    position_ids, segment_ids = (ids.expand(x.shape[:2]) for ids in positions[:2])
    tokens = ConvolutionTokens(x, position_ids, segment_ids)
    order = None
    is_aligned = isinstance(positions.layout, AlignedLayout) and (state is None or x.shape[1] == 1)
    if not is_aligned and not isinstance(positions.layout, ContiguousLayout):
        # padding must neither separate tokens of a document nor precede the last ones of a row: move it to the end
        order = (segment_ids == PADDING_SEGMENT).byte().argsort(dim=1, stable=True)
        tokens = tokens.gather(order)
    context: ConvolutionTokens = tokens if state is None else state.append(tokens)
    y = _convolve_tokens(tokens, context, weight, first_offset=1 - size if causal else -(size // 2))
    if order is not None:
        y = torch.zeros_like(y).scatter(1, order[..., None].expand(y.shape), y)
    if state is not None:
        # the columns in `context` of the last valid tokens of each row
        valid_count = (tokens.segment_ids != PADDING_SEGMENT).sum(1, keepdim=True)
        state = context.gather(valid_count + torch.arange(size - 1, device=x.device))
    return y, state


def _convolve_tokens(
    tokens: ConvolutionTokens, context: ConvolutionTokens, weight: Float[Tensor, "n d"], first_offset: int
) -> Float[Tensor, "b l d"]:
    """The convolution at `tokens`, which are the last columns of `context`, found by position ids, tap by tap."""
    x = context.x
    length = tokens.x.shape[1]
    prefix = x.shape[1] - length
    y = x.new_zeros(x.shape[0], length, x.shape[2])
    for tap, offset in enumerate(range(first_offset, first_offset + len(weight))):
        # columns [start, stop) are those of the neighbours of tokens `rows`
        start = max(0, prefix + offset)
        stop = min(x.shape[1], prefix + offset + length)
        rows = slice(start - prefix - offset, stop - prefix - offset)
        if start < stop:
            is_next = context.position_ids[:, start:stop] == tokens.position_ids[:, rows] + offset
            is_neighbour = is_next & (context.segment_ids[:, start:stop] == tokens.segment_ids[:, rows])
            tap_output = torch.where(is_neighbour[..., None], x[:, start:stop], 0.0) * weight[tap]
            y = y + F.pad(tap_output, (0, 0, rows.start, length - rows.stop))
    return y


def one_document_rows(x: Float[Tensor, "b l d"], positions: TokenPositions) -> Float[Tensor, "b l d"] | None:
    """The rows with zeros in place of padding, if each row is known to be one document that begins it; else None."""
    if isinstance(positions.layout, ContiguousLayout):
        return x
    if isinstance(positions.layout, PackedLayout) and positions.layout.right_padded:
        return x.masked_fill((positions.segment_ids == PADDING_SEGMENT)[..., None], 0.0)
    return None


def previous_tokens(
    x: Float[Tensor, "b l d"], positions: TokenPositions, state: ConvolutionTokens | None
) -> tuple[Float[Tensor, "b l d"], ConvolutionTokens | None]:
    """The token before each one in its document, zeros before the first, and the next state if there is one."""
    rows = None
    if state is None:
        rows = one_document_rows(x, positions)
    if rows is None:
        # a convolution of two taps, 1 for the token before and 0 for the token itself, knows documents and states
        taps = F.pad(x.new_ones(1, x.shape[2]), (0, 0, 0, 1))
        return convolve_neighbours(x, taps, positions, state, causal=True)
    # every row is one document: the token before is the column before
    return F.pad(rows[:, :-1], (0, 0, 1, 0)), state


def convolve_rows(x: Float[Tensor, "b l d"], weight: Float[Tensor, "n d"], *, causal: bool) -> Float[Tensor, "b l d"]:
    """`convolve_neighbours` of rows that are one document each, for which zeros stand in place of padding.

    Half precision is summed in float32. On a CPU torch's grouped `conv1d`, which wants the channels before the tokens,
    takes five to eighteen times as long for 4 taps, and 0.8 times to twice as long for 31."""
    size = len(weight)
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    inputs = (part.to(compute_dtype) for part in (x, weight))
    y: Tensor = _ConvolveShifts.call(*inputs, 1 - size if causal else -(size // 2))
    return y.to(x.dtype)


class _ConvolveShifts(HandwrittenGradient):
    """y_i = sum over taps n of w_n x_(i + offset + n), with zeros outside of a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offset: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.offset = offset
        return _sum_shifts(x, weight, offset)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            # the transposed convolution is one with the taps in reverse order
            dx = _sum_shifts(dy, weight.flip(0), 1 - len(weight) - ctx.offset)
        if ctx.needs_input_grad[1]:
            dweight = torch.stack([_sum_products(x, dy, ctx.offset + tap) for tap in range(len(weight))])
        return dx, dweight, None

    @classmethod
    def in_graph(cls, *arguments: Any) -> Any:
        # blocks would be unrolled for one length, and a compiler makes one pass of all taps by itself
        return cls.plain(*arguments)

    @classmethod
    def plain(cls, *arguments: Any) -> Any:
        x, weight, offset = arguments
        length = x.shape[1]
        padded = F.pad(x, (0, 0, -offset, len(weight) - 1 + offset))
        # the token itself first, as in the loop over blocks
        taps = sorted(range(len(weight)), key=lambda tap: tap != -offset)
        terms = [padded[:, tap : tap + length] * weight[tap] for tap in taps]
        return sum(terms[1:], terms[0])


class _Block(NamedTuple):
    """Some rows, and the tokens [start, stop) of each."""

    rows: slice
    start: int
    stop: int

    def overlap(self, length: int, shift: int) -> tuple[slice, slice, slice]:
        """The tokens i of the block for which i + shift is in a row of `length`: in the block, in the row, shifted."""
        start = max(self.start, -shift)
        stop = max(start, min(self.stop, length - shift))
        in_block, in_row, shifted = (slice(start + move, stop + move) for move in (-self.start, 0, shift))
        return in_block, in_row, shifted


def _blocks(x: Float[Tensor, "b l d"]) -> Iterator[_Block]:
    """Blocks of which all taps are summed before they leave the caches of a CPU."""
    rows, length, channels = x.shape
    limit = block_elements(x)
    row_step = max(1, limit // max(1, length * channels))
    step = max(1, limit // max(1, channels))
    for row in range(0, rows, row_step):
        for start in range(0, length, step):
            yield _Block(slice(row, row + row_step), start, min(length, start + step))


def _sum_shifts(x: Float[Tensor, "b l d"], weight: Float[Tensor, "n d"], offset: int) -> Float[Tensor, "b l d"]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    for block in _blocks(x):
        block_y = y[block.rows, block.start : block.stop]
        # the neighbours include the token itself, whose term needs no zeros to be added to
        torch.mul(x[block.rows, block.start : block.stop], weight[-offset], out=block_y)
        for tap, tap_weight in enumerate(weight):
            if tap != -offset:
                inner, _, shifted = block.overlap(x.shape[1], offset + tap)
                block_y[:, inner].addcmul_(x[block.rows, shifted], tap_weight)
    return y


def _sum_products(x: Float[Tensor, "b l d"], dy: Float[Tensor, "b l d"], shift: int) -> Float[Tensor, " d"]:
    """The sums over rows and tokens i of x_(i + shift) dy_i."""
    sums = None
    for block in _blocks(x):
        if sums is None:
            sums = x.new_zeros(x[block.rows, block.start : block.stop].shape)
        _, tokens, shifted = block.overlap(x.shape[1], shift)
        block_x = x[block.rows, shifted]
        sums[: len(block_x), : block_x.shape[1]].addcmul_(block_x, dy[block.rows, tokens])
    if sums is None:
        return x.new_zeros(x.shape[2])
    return sums.sum((0, 1))


@final
class ShortConvolution(nn.Module):
    """A causal depthwise convolution over `size` tokens of the same document, then SiLU (Gu and Dao 2023, section 3.4).

    `Attention` applies it to the projected queries, keys and values side by side, `channels` in total, before they
    become heads. Tokens of other documents and padding count as zeros. The state of a row is its last `size` - 1
    inputs. With `residual` the convolution is added to its input instead, without SiLU, and begins as zeros
    (Allen-Zhu 2025, arXiv:2512.17351: "canon layers"). Raises ValueError for a size below 1."""

    def __init__(self, channels: int, size: int = 4, *, bias: bool = False, residual: bool = False) -> None:
        super().__init__()
        if size < 1:
            raise ValueError(f"ShortConvolution: size ({size}) must be at least 1 token")
        self.weight = nn.Parameter(torch.empty(size, channels))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.residual = residual
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize like torch's convolutions: uniform up to 1 / sqrt(size); with zeros what is added to its input."""
        limit = 0.0 if self.residual else len(self.weight) ** -0.5
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
                y = y if self.bias is None else y + self.bias.to(y.dtype)
                outputs = list((y if self.residual else F.silu(y)).split_with_sizes(widths, -1))
                return [x + y for x, y in zip(parts, outputs)] if self.residual else outputs, state
            convolved = list(torch.split(y, widths, -1))
        if self.bias is not None:
            convolved = [y + bias.to(y.dtype) for y, bias in zip(convolved, torch.split(self.bias, widths))]
        if self.residual:
            return [x + y for x, y in zip(parts, convolved)], state
        return [F.silu(y) for y in convolved], state

    def keep_channels(self, channels: Sequence[int]) -> None:
        """Remove all channels but these, in place."""
        select_entries(self, "weight", channels, 1)
        if self.bias is not None:
            select_entries(self, "bias", channels, 0)

    def extra_repr(self) -> str:
        return f"size={len(self.weight)}, channels={self.weight.shape[1]}"
