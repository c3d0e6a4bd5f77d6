"""What decays and documents do to the pairs of a chunk and to the memory that passes it."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class PairBlocks(NamedTuple):
    """The decayed products of queries with keys and u up to their tokens, and of w with those before its token.

    `system` has those of w and u with the opposite sign, as the system of a chunk does."""

    queries_of_keys: Float[Tensor, "b h n c c"]
    queries_of_corrections: Float[Tensor, "b h n c c"]
    readers_of_keys: Float[Tensor, "b h n c c"]
    system: Float[Tensor, "b h n c c"]


class ChunkFactors(NamedTuple):
    """Decay and document masks of chunks; None stands for a factor of 1.

    `entering` is that from the memory before a chunk to a token, `retention` that of the memory itself. Pairs of a
    query and a key have the factor `table`; with one decay per channel the product of `entering` at the query and
    `inverse` at the key, or each channel its own of `pair_factors` where the decays are too strong for that. `leaving`
    leads from a key, with its `inverse` where there is one, to the memory after the chunk."""

    table: Float[Tensor, "b #h n c c"] | None
    entering: Float[Tensor, "b h n c #r"] | None
    leaving: Float[Tensor, "b h n #c #r"] | None
    retention: Float[Tensor, "b h n #r 1"] | None
    inverse: Float[Tensor, "b h n c r"] | None
    pair_factors: Float[Tensor, "b h n c c r"] | None
    is_entered: Float[Tensor, "b 1 n c 1"] | None

    def read(self, x: Float[Tensor, "b h n c r"]) -> tuple[Tensor, Tensor]:
        """Queries or other readers as `pairs` takes them, and as they read the memory before the chunk.

        The latter have its decay up to them, and are zeros in later documents."""
        decayed = x if self.entering is None else x * self.entering
        entered = decayed if self.is_entered is None else decayed * self.is_entered
        return x if self.inverse is None else decayed, entered

    def columns(self, x: Float[Tensor, "b h n c r"]) -> Float[Tensor, "b h n c r"]:
        """Keys as `pairs` takes them."""
        return x if self.inverse is None else x * self.inverse

    def leave(self, columns: Float[Tensor, "b h n c r"]) -> Float[Tensor, "b h n c r"]:
        """Keys with the decay after them; zeros for those of earlier documents than the last token's."""
        return columns if self.leaving is None else columns * self.leaving

    def pairs(
        self, rows: Float[Tensor, "b h n c r"], columns: Float[Tensor, "b h n c r"]
    ) -> Float[Tensor, "b h n c c"]:
        """The decayed products of each reader with all keys up to its token, of the same document."""
        if self.pair_factors is None:
            pairs = rows @ columns.mT
        else:
            pairs = torch.einsum("...id,...ijd,...jd->...ij", rows, self.pair_factors, columns)
        return pairs.tril() if self.table is None else pairs * self.table

    def pair_blocks(self, queries: Tensor, readers: Tensor, keys: Tensor, corrections: Tensor) -> PairBlocks:
        """All pairs of the general form, in one product, which is faster than four small ones."""
        rows, columns = torch.stack([queries, readers], 3), torch.stack([keys, corrections], 3)
        length = rows.shape[-2]
        if self.pair_factors is None:
            products = rows.flatten(3, 4) @ columns.flatten(3, 4).mT
            blocks = products.unflatten(4, (2, length)).unflatten(3, (2, length))  # type: ignore[no-untyped-call]
        else:
            blocks = torch.einsum("bhnpid,bhnijd,bhnqjd->bhnpiqj", rows, self.pair_factors, columns)
        visible = blocks.new_ones(length, length).tril()
        earlier = visible.tril(-1)
        factors = torch.stack([visible, visible, earlier, -earlier]).view(2, 2, length, length).transpose(1, 2)
        if self.table is not None:
            factors = factors * self.table[:, :, :, None, :, None]
        return PairBlocks(*(block for row in (blocks * factors).unbind(3) for block in row.unbind(4)))


def channel_decay_pairs(
    a: Float[Tensor, "*b l r"], c: Float[Tensor, "*b l r"], total: Float[Tensor, "*b l r"]
) -> Float[Tensor, "*b l l"]:
    """The definition: the sums over channels of a_i c_j exp(total_i - total_j) where j <= i; `total` sums decays."""
    pairs: Tensor = (a[..., :, None, :] * c[..., None, :, :] * _pair_factors(total)).sum(-1)
    return pairs


def _pair_factors(total: Float[Tensor, "*b l r"]) -> Float[Tensor, "*b l l r"]:
    hidden = torch.ones(total.shape[-2], total.shape[-2], dtype=torch.bool, device=total.device).triu(1)
    # the exponent of hidden pairs may overflow
    return (total[..., :, None, :] - total[..., None, :, :]).masked_fill(hidden[..., None], -torch.inf).exp()


def chunk_factors(decay: Tensor | None, runs: Tensor | None, like: Tensor, *, is_exact: bool) -> ChunkFactors:
    table = entering = leaving = retention = inverse = pair_factors = is_entered = None
    if decay is not None:
        total = decay.cumsum(-2)
        entering, end = total.exp(), total[..., -1:, :].exp()
        retention = end.mT
        if decay.shape[-1] > 1 and not is_exact:
            inverse, leaving = (-total).exp(), end
        else:
            # backwards, so that small sums after strong decays keep their digits
            leaving = F.pad(decay[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2).exp()
            if is_exact:
                pair_factors = _pair_factors(total)
            else:
                table = _DecayTable.apply(total)  # type: ignore[no-untyped-call]
    if runs is not None:
        # the memory at the start of a chunk belongs to the last run of the previous chunk
        previous, last = F.pad(runs[:, :, :-1, -1:], (0, 0, 1, 0)), runs[..., -1:]
        same = (runs[..., :, None] == runs[..., None, :]).tril().to(like.dtype)
        table = same if table is None else table * same
        is_entered, is_left = ((runs == end)[..., None].to(like.dtype) for end in (previous, last))
        is_retained = (last == previous)[..., None].to(like.dtype)
        leaving = is_left if leaving is None else leaving * is_left
        retention = is_retained if retention is None else retention * is_retained
    return ChunkFactors(table, entering, leaving, retention, inverse, pair_factors, is_entered)


def decay_table(total: Float[Tensor, "*b c 1"]) -> Float[Tensor, "*b c c"]:
    """exp(total_i - total_j) where j <= i, else 0; `total` are sums of log decays, which never grow."""
    # the exponent of hidden pairs may overflow, and on a CPU exp(-inf) takes twenty times as long as exp(0)
    return (total - total.mT).clamp_(max=0.0).exp_().tril_()


class _DecayTable(torch.autograd.Function):
    """`decay_table` with a gradient."""

    @staticmethod
    def forward(ctx: Any, total: Float[Tensor, "b h n c 1"]) -> Float[Tensor, "b h n c c"]:
        table = decay_table(total)
        ctx.save_for_backward(table)
        return table

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtable: Tensor) -> Tensor:
        (table,) = ctx.saved_tensors
        dexponent = dtable * table
        dtotal: Tensor = (dexponent.sum(-1) - dexponent.sum(-2))[..., None]
        return dtotal
