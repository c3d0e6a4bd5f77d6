"""What decays and documents do to the pairs of a chunk and to the memory that passes it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from manyformer.ops.decay_scales import scale_by_decays
from manyformer.ops.decay_sums import sum_decays
from manyformer.ops.halved_pairs import halved_pairs


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
    of a reader and a key have the factor `table`, and where decays of channels may be too strong for factors of readers
    and keys, those of `pair_decay` between them.
    `leaving` leads from `columns` to the memory after the chunk, `retention` is the factor of this memory itself."""

    rows: Sequence[Float[Tensor, "b h n c r"]]
    entered: Sequence[Float[Tensor, "b h n c r"]]
    columns: Sequence[Float[Tensor, "b h n c r"]]
    table: Float[Tensor, "b #h n c c"] | None = None
    leaving: Float[Tensor, "b h n #c #r"] | None = None
    retention: Float[Tensor, "b h n #r 1"] | None = None
    pair_decay: Float[Tensor, "b h n c r"] | None = None

    def leave(self, columns: Float[Tensor, "b h n c r"]) -> Float[Tensor, "b h n c r"]:
        """Keys with the decay after them; zeros for those of earlier documents than the last token's."""
        if self.leaving is None:
            return columns
        return columns * self.leaving

    def remove(self, columns: Float[Tensor, "b h n c r"]) -> Float[Tensor, "b h n c r"]:
        """`leave` with the opposite sign."""
        if self.leaving is None:
            return -columns
        return columns * -self.leaving

    def pairs(
        self, rows: Float[Tensor, "b h n c r"], columns: Float[Tensor, "b h n c r"]
    ) -> Float[Tensor, "b h n c c"]:
        """The decayed products of each reader with all keys up to its token, of the same document."""
        pairs = self.system(rows, columns)
        if self.table is None:
            return pairs.tril()
        return pairs

    def system(
        self, rows: Float[Tensor, "b h n c r"], columns: Float[Tensor, "b h n c r"]
    ) -> Float[Tensor, "b h n c c"]:
        """`pairs` for a triangular system, which reads only what is below its diagonal."""
        if self.pair_decay is None:
            pairs = rows @ columns.mT
        else:
            pairs = halved_pairs(rows, columns, self.pair_decay, 0)
        if self.table is None:
            return pairs
        return pairs * self.table

    def pair_blocks(self) -> PairBlocks:
        """All pairs of queries and early readers with keys and u, in one product, faster than four small ones."""
        rows = torch.stack(list(self.rows), 3)
        columns = torch.stack(list(self.columns), 3)
        length = rows.shape[-2]
        if self.pair_decay is None:
            products = rows.flatten(3, 4) @ columns.flatten(3, 4).mT
            blocks = products.unflatten(4, (2, length)).unflatten(3, (2, length))  # type: ignore[no-untyped-call]
        else:
            pairs = [
                halved_pairs(rows[:, :, :, lag], columns[:, :, :, column], self.pair_decay, lag)
                for lag in (0, 1)
                for column in (0, 1)
            ]
            blocks = torch.stack(pairs, 3).unflatten(3, (2, 2)).transpose(4, 5)  # type: ignore[no-untyped-call]
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

    Where some readers are early, decays must be those of channels. `is_exact` takes decays of any strength."""
    rows = [*readers, *early_readers]
    if decay is None:
        chunks = DecayedChunks(rows, rows, keys)
    elif decay.shape[-1] > 1 and not is_exact:
        scales = scale_by_decays(decay, readers, keys, early_readers)
        rows = [*scales.readers, *scales.early_readers]
        chunks = DecayedChunks(rows, rows, scales.keys, leaving=scales.end, retention=scales.end.mT)
    else:
        sums, leaving = sum_decays(decay)
        before = sums.before()
        entering = sums.total().exp()
        entered = [*(x * entering for x in readers), *(x * before.total().exp() for x in early_readers)]
        chunks = DecayedChunks(rows, entered, keys, leaving=leaving, retention=entering[..., -1:, :].mT)
        table = None if is_exact else _DecayTable.apply(*sums)  # type: ignore[no-untyped-call]
        chunks = chunks._replace(table=table, pair_decay=decay if is_exact else None)
    if runs is None:
        return chunks
    return _separate_documents(chunks, runs)


def _separate_documents(chunks: DecayedChunks, runs: Int[Tensor, "b 1 n c"]) -> DecayedChunks:
    # the memory at the start of a chunk belongs to the last run of the previous chunk
    previous = F.pad(runs[:, :, :-1, -1:], (0, 0, 1, 0))
    last = runs[..., -1:]
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


def decay_table(coarse: Float[Tensor, "*b c 1"], fine: Float[Tensor, "*b c 1"]) -> Float[Tensor, "*b c c"]:
    """exp(G_i - G_j) where j <= i, else 0, with the two parts of sums G of log decays."""
    exponents = (coarse - coarse.mT).add_(fine).sub_(fine.mT)
    # the exponent of hidden pairs may overflow, and on a CPU exp(-inf) takes twenty times as long as exp(0); sums of
    # decays next to 0 may exceed it by rounding
    return exponents.clamp_(max=1.0).exp_().tril_()


class _DecayTable(torch.autograd.Function):
    """`decay_table` with a gradient."""

    @staticmethod
    def forward(ctx: Any, coarse: Float[Tensor, "b h n c 1"], fine: Float[Tensor, "b h n c 1"]) -> Tensor:
        table = decay_table(coarse, fine)
        ctx.save_for_backward(table)
        return table

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtable: Tensor) -> tuple[None, Tensor]:
        (table,) = ctx.saved_tensors
        return None, gradient_of_sums(dtable * table)


def gradient_of_sums(dexponents: Float[Tensor, "*b c c"]) -> Float[Tensor, "*b c 1"]:
    """The gradient of sums whose differences are the exponents of pairs; that of a token with itself is overwritten."""
    # it is 0, but would leave the difference of two rounded sums
    dexponents.diagonal(dim1=-2, dim2=-1).zero_()
    return (dexponents.sum(-1) - dexponents.sum(-2))[..., None]
