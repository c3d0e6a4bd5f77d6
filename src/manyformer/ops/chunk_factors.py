"""What decays and documents do to the pairs of a chunk and to the memory that passes it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from manyformer.ops.decay_scales import scale_by_decays


class PairBlocks(NamedTuple):
    """The decayed products of queries with keys and u up to their tokens, and of w with those before its token.

    Those of queries and u have the opposite sign, as what w reads is removed."""

    queries_of_keys: Float[Tensor, "b h n c c"]
    queries_of_removals: Float[Tensor, "b h n c c"]
    readers_of_keys: Float[Tensor, "b h n c c"]
    system: Float[Tensor, "b h n c c"]


class DecayedChunks(NamedTuple):
    """Features of chunks with their decays and document masks; None stands for a factor of 1.

    `rows` and `columns` are readers and keys as pairs take them, and `entered` the readers as they read the memory
    before the chunk: zeros in later documents. Readers that read before the decay of their own token come last. Pairs
    of a reader and a key have the factor `table`, and where decays of channels are too strong for factors of readers
    and keys, each channel its own of `pair_factors`, and `early_pair_factors` for those that read before a decay.
    `leaving` leads from `columns` to the memory after the chunk, `retention` is the factor of this memory itself."""

    rows: Sequence[Float[Tensor, "b h n c r"]]
    entered: Sequence[Float[Tensor, "b h n c r"]]
    columns: Sequence[Float[Tensor, "b h n c r"]]
    table: Float[Tensor, "b #h n c c"] | None = None
    leaving: Float[Tensor, "b h n #c #r"] | None = None
    retention: Float[Tensor, "b h n #r 1"] | None = None
    pair_factors: Float[Tensor, "b h n c c r"] | None = None
    early_pair_factors: Float[Tensor, "b h n c c r"] | None = None

    def leave(self, columns: Float[Tensor, "b h n c r"]) -> Float[Tensor, "b h n c r"]:
        """Keys with the decay after them; zeros for those of earlier documents than the last token's."""
        return columns if self.leaving is None else columns * self.leaving

    def remove(self, columns: Float[Tensor, "b h n c r"]) -> Float[Tensor, "b h n c r"]:
        """`leave` with the opposite sign."""
        return -columns if self.leaving is None else columns * -self.leaving

    def pairs(
        self, rows: Float[Tensor, "b h n c r"], columns: Float[Tensor, "b h n c r"]
    ) -> Float[Tensor, "b h n c c"]:
        """The decayed products of each reader with all keys up to its token, of the same document."""
        pairs = self.system(rows, columns)
        return pairs.tril() if self.table is None else pairs

    def system(
        self, rows: Float[Tensor, "b h n c r"], columns: Float[Tensor, "b h n c r"]
    ) -> Float[Tensor, "b h n c c"]:
        """`pairs` for a triangular system, which reads only what is below its diagonal."""
        if self.pair_factors is None:
            pairs = rows @ columns.mT
        else:
            pairs = torch.einsum("...id,...ijd,...jd->...ij", rows, self.pair_factors, columns)
        return pairs if self.table is None else pairs * self.table

    def pair_blocks(self) -> PairBlocks:
        """All pairs of queries and early readers with keys and u, in one product, faster than four small ones."""
        rows, columns = torch.stack(list(self.rows), 3), torch.stack(list(self.columns), 3)
        length = rows.shape[-2]
        if self.pair_factors is None or self.early_pair_factors is None:
            products = rows.flatten(3, 4) @ columns.flatten(3, 4).mT
            blocks = products.unflatten(4, (2, length)).unflatten(3, (2, length))  # type: ignore[no-untyped-call]
        else:
            pair_factors = torch.stack([self.pair_factors, self.early_pair_factors], 3)
            blocks = torch.einsum("bhnpid,bhnpijd,bhnqjd->bhnpiqj", rows, pair_factors, columns)
        visible = blocks.new_ones(length, length).tril()
        earlier = visible.tril(-1)
        factors = torch.stack([visible, -visible, earlier, earlier]).view(2, 2, length, length).transpose(1, 2)
        if self.table is not None:
            factors = factors * self.table[:, :, :, None, :, None]
        return PairBlocks(*(block for row in (blocks * factors).unbind(3) for block in row.unbind(4)))


def decayed_chunks(
    readers: Sequence[Float[Tensor, "b h n c r"]],
    keys: Sequence[Float[Tensor, "b h n c r"]],
    decay: Float[Tensor, "b h n c #r"] | None,
    runs: Int[Tensor, "b 1 n c"] | None,
    *,
    is_exact: bool,
    early_readers: Sequence[Float[Tensor, "b h n c r"]] = (),
) -> DecayedChunks:
    """The features of readers and keys with decays, one per token or one per channel, and documents.

    Where some readers are early, decays must be those of channels. `is_exact` gives each channel of each pair a factor
    of its own."""
    rows = [*readers, *early_readers]
    if decay is None:
        chunks = DecayedChunks(rows, rows, keys)
    elif decay.shape[-1] > 1 and not is_exact:
        scales = scale_by_decays(decay, readers, keys, early_readers)
        rows = [*scales.readers, *scales.early_readers]
        chunks = DecayedChunks(rows, rows, scales.keys, leaving=scales.end, retention=scales.end.mT)
    else:
        total = decay.cumsum(-2)
        early, entering = F.pad(total[..., :-1, :], (0, 0, 1, 0)), total.exp()
        entered = [*(x * entering for x in readers), *(x * early.exp() for x in early_readers)]
        # backwards, so that small sums after strong decays keep their digits
        leaving = F.pad(decay[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2).exp()
        chunks = DecayedChunks(rows, entered, keys, leaving=leaving, retention=entering[..., -1:, :].mT)
        if is_exact:
            early_pair_factors = _pair_factors(early, total, 0) if early_readers else None
            chunks = chunks._replace(pair_factors=_pair_factors(total, total), early_pair_factors=early_pair_factors)
        else:
            chunks = chunks._replace(table=_DecayTable.apply(total))  # type: ignore[no-untyped-call]
    return chunks if runs is None else _separate_documents(chunks, runs)


def _separate_documents(chunks: DecayedChunks, runs: Int[Tensor, "b 1 n c"]) -> DecayedChunks:
    # the memory at the start of a chunk belongs to the last run of the previous chunk
    previous, last = F.pad(runs[:, :, :-1, -1:], (0, 0, 1, 0)), runs[..., -1:]
    dtype = chunks.rows[0].dtype
    same = (runs[..., :, None] == runs[..., None, :]).tril().to(dtype)
    is_entered, is_left = ((runs == end)[..., None].to(dtype) for end in (previous, last))
    is_retained = (last == previous)[..., None].to(dtype)
    return chunks._replace(
        entered=[x * is_entered for x in chunks.entered],
        table=same if chunks.table is None else chunks.table * same,
        leaving=is_left if chunks.leaving is None else chunks.leaving * is_left,
        retention=is_retained if chunks.retention is None else chunks.retention * is_retained,
    )


def channel_decay_pairs(
    a: Float[Tensor, "*b l r"], c: Float[Tensor, "*b l r"], total: Float[Tensor, "*b l r"]
) -> Float[Tensor, "*b l l"]:
    """The definition: the sums over channels of a_i c_j exp(total_i - total_j) where j <= i; `total` sums decays."""
    pairs: Tensor = (a[..., :, None, :] * c[..., None, :, :] * _pair_factors(total, total)).sum(-1)
    return pairs


def _pair_factors(
    row_total: Float[Tensor, "*b l r"], total: Float[Tensor, "*b l r"], first_hidden: int = 1
) -> Float[Tensor, "*b l l r"]:
    hidden = torch.ones(total.shape[-2], total.shape[-2], dtype=torch.bool, device=total.device).triu(first_hidden)
    # the exponent of hidden pairs may overflow
    exponents = row_total[..., :, None, :] - total[..., None, :, :]
    return exponents.masked_fill(hidden[..., None], -torch.inf).exp()


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
