"""What decays and documents do to the pairs of tokens of a chunk and to the memory that passes it, to the last digit.

A pair of tokens i >= j has the factor exp(G_i - G_j), with the sums G of log decays up to each token. After strong
decays G is large, and rounding it costs the digits of what a few weak decays between i and j add up to. So G is kept as
two sums: one of multiples of a step, which float32 adds and subtracts without an error, and one of the small rest.

Where features have decays of their own, the factor is split: exp(G_i) scales the query and exp(-G_j) the key
(`scale_by_decays`). Where a decay is too strong for its inverse, `halved_pairs` splits the pair where a half of a block
begins: i in the second half has a factor from the middle on, j in the first one up to the middle. Both are at most 1
and sums of decays in between alone; pairs within a half are those of a smaller block. As the host need not know how
strong decays are, a GPU is not read.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from manyformer.nn.ops.any_length import EXPORTED_LENGTH
from manyformer.nn.runtime.handwritten_gradient import HandwrittenGradient
from manyformer.nn.runtime.one_operation import OneOperation
from manyformer.nn.runtime.torch_internals import fixed_size, refuse_any_size


class DecaySums(NamedTuple):
    """The sums of log decays up to each token: `coarse` + `fine`, or those up to other tokens.

    `coarse` has no rounding error and no gradient; `fine` has at most half a step a token, and the gradient of both."""

    coarse: Float[Tensor, "*b c #r"]
    fine: Float[Tensor, "*b c #r"]

    def total(self) -> Float[Tensor, "*b c #r"]:
        """The sums as one number each, for what begins before the first token."""
        return self.coarse + self.fine

    def before(self) -> "DecaySums":
        """The sums of the tokens before each one."""
        return DecaySums(*(F.pad(part[..., :-1, :], (0, 0, 1, 0)) for part in self))


class ChunkDecays(NamedTuple):
    """The sums of the decays of a chunk, and the product `leaving` of those after each token."""

    sums: DecaySums
    leaving: Float[Tensor, "*b c #r"]


def sum_decays(decay: Float[Tensor, "*b c #r"]) -> ChunkDecays:
    """Sums and products of log decays, at most 0, of each of the c tokens.

    Decays below what the type can represent, such as -inf, are total: they count as the weakest whose exponential is
    0, so that no sum of a chunk loses digits to them."""
    coarse, fine, leaving = _SumDecays.call(decay)
    return ChunkDecays(DecaySums(coarse, fine), leaving)


class _SumDecays(HandwrittenGradient):
    @staticmethod
    def forward(ctx: Any, decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # coarse sums stay exact only while a chunk's sum fits the digits that `_step` leaves
        parts = split_decays(decay.clamp(min=-total_decay(decay.dtype)))
        coarse, fine = (sum_along_tokens(part) for part in parts)
        leaving = (coarse[..., -1:, :] - coarse).add_(fine[..., -1:, :] - fine).exp_()
        ctx.mark_non_differentiable(coarse)
        ctx.save_for_backward(leaving)
        return coarse, fine, leaving

    @staticmethod
    def backward(ctx: Any, _: Tensor, dfine: Tensor, dleaving: Tensor) -> Tensor:
        (leaving,) = ctx.saved_tensors
        return gradient_of_decays(dfine, dleaving * leaving)


def gradient_of_decays(dsums: Float[Tensor, "*b c r"], dleaving: Float[Tensor, "*b c r"]) -> Float[Tensor, "*b c r"]:
    """The gradient of decays from those of the sums up to each token and of the exponents of `leaving`.

    The latter are added up over the tokens before a decay: as the gradient of a difference of two sums, the gradients
    of tokens without a decay after them would cancel only up to rounding, and drown those of strong decays."""
    left_before = F.pad(dleaving[..., :-1, :], (0, 0, 1, 0))
    return sum_along_tokens(dsums, reverse=True) + sum_along_tokens(left_before)


def split_decays(decay: Float[Tensor, "*b c r"]) -> tuple[Float[Tensor, "*b c r"], Float[Tensor, "*b c r"]]:
    """Decays as multiples of the step of a chunk, and the rest, without an error."""
    step = _step(decay.shape[-2], decay.dtype)
    # the step is a power of two: scaling is exact, and so is the difference
    coarse = (decay * (1 / step)).round_().mul_(step)
    return coarse, decay - coarse


def total_decay(dtype: torch.dtype) -> float:
    """The least whole number of nats whose decay is 0 in this type: 104 in float32."""
    info = torch.finfo(dtype)
    return float(math.ceil(math.log(2) - math.log(info.smallest_normal * info.eps)))


def sum_along_tokens(x: Float[Tensor, "*b c r"], *, reverse: bool = False) -> Float[Tensor, "*b c r"]:
    """Sums along the tokens up to each one, or from each one on."""
    if x.shape[-1] > 1 and x.device.type in ("cpu", "meta"):
        # for many channels three times as fast as a cumulated sum, which also has to be turned around twice; planned
        # like that on `meta`
        ones = x.new_ones(x.shape[-2], x.shape[-2])
        return (ones.triu() if reverse else ones.tril()) @ x
    if reverse:
        return x.flip(-2).cumsum(-2).flip(-2)
    return x.cumsum(-2)


def _step(length: int, dtype: torch.dtype) -> float:
    """The least power of two of which the sum of so many total decays is an exact multiple."""
    if torch.compiler.is_exporting():
        # the graph is for texts of any length, and sums of so many tokens have no error
        length = EXPORTED_LENGTH
    # the number of binary digits of the type, 24 in float32
    digits = 1 - round(math.log2(torch.finfo(dtype).eps))
    return float(2.0 ** (math.ceil(math.log2(total_decay(dtype) * length)) - digits))


class DecayScales(NamedTuple):
    """Features as `scale_by_decays` returns them, and the factor of a memory that passes the whole chunk."""

    readers: Sequence[Float[Tensor, "*b c r"]]
    early_readers: Sequence[Float[Tensor, "*b c r"]]
    keys: Sequence[Float[Tensor, "*b c r"]]
    end: Float[Tensor, "*b 1 r"]


def scale_by_decays(
    decay: Float[Tensor, "*b c r"],
    readers: Sequence[Float[Tensor, "*b c r"]],
    keys: Sequence[Float[Tensor, "*b c r"]],
    early_readers: Sequence[Float[Tensor, "*b c r"]] = (),
) -> DecayScales:
    """Readers times exp(s_i), with the sums s_i of the log decays up to token i, and keys times exp(-s_i).

    Their products then have the factors exp(s_i - s_j) of pairs. `early_readers` have those before the token's own
    decay, exp(s_(i-1)). The decays of a chunk must be weak enough for the inverse to be finite."""
    tensors = *readers, *early_readers, *keys
    *scaled, end = _ScaleByDecays.call(decay, len(readers), len(early_readers), *tensors)
    first_key = len(readers) + len(early_readers)
    return DecayScales(scaled[: len(readers)], scaled[len(readers) : first_key], scaled[first_key:], end)


class _ScaleByDecays(HandwrittenGradient):
    """All factors share one gradient of the sums, which composed functions would add up product by product."""

    @staticmethod
    def forward(ctx: Any, decay: Tensor, readers: int, early_readers: int, *features: Tensor) -> tuple[Tensor, ...]:
        # the exponential of one sum would have the rounding error of an exponent of up to 60
        coarse, fine = split_decays(decay)
        entering = sum_along_tokens(coarse).exp_()
        del coarse
        entering.mul_(sum_along_tokens(fine).exp_())
        del fine
        inverse = entering.reciprocal()
        ctx.save_for_backward(entering, inverse, *features)
        ctx.counts = readers, early_readers
        factors = _factors(entering, inverse, readers, early_readers, len(features))
        return *(x * factor for x, factor in zip(features, factors)), entering[..., -1:, :].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        entering, inverse, *features = ctx.saved_tensors
        readers, early_readers = ctx.counts
        *dscaled, dend = gradients
        factors = _factors(entering, inverse, readers, early_readers, len(features))
        dfeatures = []
        dsums = torch.zeros_like(entering)
        dsums[..., -1:, :] = dend * entering[..., -1:, :]
        for number, (x, dy, factor) in enumerate(zip(features, dscaled, factors)):
            dx = dy * factor
            if number < readers:
                dsums.addcmul_(dx, x)
            elif number < readers + early_readers:
                dsums[..., :-1, :].addcmul_(dx[..., 1:, :], x[..., 1:, :])
            else:
                dsums.addcmul_(dx, x, value=-1)
            dfeatures.append(dx)
        return sum_along_tokens(dsums, reverse=True), None, None, *dfeatures

    @classmethod
    def plain(cls, *arguments: Any) -> tuple[Tensor, ...]:
        decay, readers, early_readers, *features = arguments
        coarse, fine = split_decays(decay)
        entering = sum_along_tokens(coarse).exp() * sum_along_tokens(fine).exp()
        factors = _factors(entering, entering.reciprocal(), readers, early_readers, len(features))
        return *(x * factor for x, factor in zip(features, factors)), entering[..., -1:, :]


def _factors(entering: Tensor, inverse: Tensor, readers: int, early_readers: int, features: int) -> list[Tensor]:
    if early_readers:
        early_factors = [F.pad(entering[..., :-1, :], (0, 0, 1, 0), value=1.0)] * early_readers
    else:
        early_factors = []
    return [entering] * readers + early_factors + [inverse] * (features - readers - early_readers)


def halved_pairs(
    rows: Float[Tensor, "*b c r"], columns: Float[Tensor, "*b c r"], decay: Float[Tensor, "*b c r"], lag: int
) -> Float[Tensor, "*b c c"]:
    """sum_d rows_id columns_jd exp(decay_(j+1)d + ... + decay_(i-lag)d) where j <= i - lag, else 0; `lag` is 0 or 1.

    Log decays are at most 0, and -inf is total. Raises UserError in an exported graph of any length."""
    length = fixed_size(rows.shape[-2])
    refuse_any_size(length, "pairs of tokens with decays of their channels are those of halves of halves")
    # halving needs a power of two; rows of zeros at the end meet no other pair
    missing = (1 << (length - 1).bit_length()) - length
    if missing:
        rows, columns, decay = (F.pad(x, (0, 0, 0, missing)) for x in (rows, columns, decay))
    pairs: Tensor = _HalvedPairs.call(rows, columns, decay, lag)
    if missing:
        return pairs[..., :length, :length]
    return pairs


class _Halves(NamedTuple):
    """The rows in second halves of blocks and the columns in first ones, with the factors of both."""

    rows: Float[Tensor, "*b n m r"]
    columns: Float[Tensor, "*b n m r"]
    to_rows: Float[Tensor, "*b n m r"]
    from_columns: Float[Tensor, "*b n m r"]


def _halves(x: Float[Tensor, "*b c r"], size: int) -> tuple[Float[Tensor, "*b n m r"], Float[Tensor, "*b n m r"]]:
    """Views of the first and the second halves, of `size` tokens each."""
    first, second = x.unflatten(-2, (-1, 2, size)).unbind(-3)  # type: ignore[no-untyped-call]
    return first, second


def _take_halves(rows: Tensor, columns: Tensor, decay: Tensor, size: int, lag: int) -> _Halves:
    # i in a second half, j in the first one: what lies between them is split at the middle, so no sum has a negative
    # part
    earlier, later = _halves(decay, size)
    # up to the row, or the token before it
    to_rows = sum_along_tokens(later if not lag else F.pad(later[..., :-1, :], (0, 0, 1, 0)))
    # from the token after the column on
    from_columns = sum_along_tokens(F.pad(earlier[..., 1:, :], (0, 0, 0, 1)), reverse=True)
    return _Halves(_halves(rows, size)[1], _halves(columns, size)[0], to_rows.exp_(), from_columns.exp_())


class _HalvedPairs(OneOperation):
    """Factors are computed again for the gradient: those of all sizes are larger than what they are made of."""

    @classmethod
    def loops(cls, *arguments: Any) -> int:
        # the sizes of halves are numbers, but to trace all of them for any number of chunks takes minutes
        rows, *_ = arguments
        chunks: int = rows.shape[-3]
        return chunks

    @classmethod
    def empty_results(cls, *arguments: Any) -> list[Tensor]:
        rows, *_ = arguments
        return [rows.new_empty(*rows.shape[:-1], rows.shape[-2])]

    @staticmethod
    def forward(ctx: Any, rows: Tensor, columns: Tensor, decay: Tensor, lag: int) -> Float[Tensor, "*b c c"]:
        # minus infinity, times the 0 of a sum that does not contain it, would be no number
        decay = decay.clamp(min=-total_decay(decay.dtype))
        ctx.save_for_backward(rows, columns, decay)
        ctx.lag = lag
        length = rows.shape[-2]
        pairs = rows.new_zeros(*rows.shape[:-1], length)
        if not lag:
            pairs.diagonal(dim1=-2, dim2=-1).copy_((rows * columns).sum(-1))
        size = 1
        while size < length:
            halves = _take_halves(rows, columns, decay, size, lag)
            products = (halves.rows * halves.to_rows) @ (halves.columns * halves.from_columns).mT
            _lower_blocks(pairs, size).copy_(products)
            size *= 2
        return pairs

    @staticmethod
    def backward(ctx: Any, dpairs: Tensor) -> tuple[Tensor | None, ...]:
        rows, columns, decay = ctx.saved_tensors
        lag = ctx.lag
        length = rows.shape[-2]
        if lag:
            drows = torch.zeros_like(rows)
            dcolumns = torch.zeros_like(columns)
        else:
            diagonal = dpairs.diagonal(dim1=-2, dim2=-1)[..., None]
            drows = diagonal * columns
            dcolumns = diagonal * rows
        ddecay = torch.zeros_like(decay)
        size = 1
        while size < length:
            halves = _take_halves(rows, columns, decay, size, lag)
            dproducts = _lower_blocks(dpairs, size)
            drow_part = (dproducts @ (halves.columns * halves.from_columns)).mul_(halves.to_rows)
            dcolumn_part = (dproducts.mT @ (halves.rows * halves.to_rows)).mul_(halves.from_columns)
            _halves(drows, size)[1].add_(drow_part)
            _halves(dcolumns, size)[0].add_(dcolumn_part)
            # each decay is in the sums of the rows from it on, and of the columns before it
            dto_rows = sum_along_tokens(drow_part.mul_(halves.rows), reverse=True)
            dfrom_columns = sum_along_tokens(dcolumn_part.mul_(halves.columns))
            earlier, later = _halves(ddecay, size)
            if lag:
                later[..., :-1, :].add_(dto_rows[..., 1:, :])
            else:
                later.add_(dto_rows)
            earlier[..., 1:, :].add_(dfrom_columns[..., :-1, :])
            size *= 2
        return drows, dcolumns, ddecay, None


def _lower_blocks(pairs: Float[Tensor, "*b c c"], size: int) -> Float[Tensor, "*b n m m"]:
    """A view of the pairs of second halves with first ones, in the blocks on the diagonal."""
    blocks = pairs.unflatten(-1, (-1, 2, size)).unflatten(-4, (-1, 2, size))  # type: ignore[no-untyped-call]
    lower: Tensor = blocks[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
    return lower


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
        # the table holds zeros above the diagonal; without it they have to be set
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
        # (b h n 2 c r): queries and early readers, and keys and u
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
        # queries see their own token; w reads the memory before it
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
    # decays of channels cannot be one table of pairs: they scale the features themselves
    elif decay.shape[-1] > 1 and not is_exact:
        scales = scale_by_decays(decay, readers, keys, early_readers)
        rows = [*scales.readers, *scales.early_readers]
        chunks = DecayedChunks(rows, rows, scales.keys, leaving=scales.end, retention=scales.end.mT)
    else:
        sums, leaving = sum_decays(decay)
        sums_before = sums.before()
        entering = sums.total().exp()
        entered = [*(x * entering for x in readers), *(x * sums_before.total().exp() for x in early_readers)]
        chunks = DecayedChunks(rows, entered, keys, leaving=leaving, retention=entering[..., -1:, :].mT)
        table = None if is_exact else _DecayTable.call(*sums)
        chunks = chunks._replace(table=table, pair_decay=decay if is_exact else None)
    if runs is None:
        return chunks
    return _separate_documents(chunks, runs)


def _separate_documents(chunks: DecayedChunks, runs: Int[Tensor, "b 1 n c"]) -> DecayedChunks:
    # the memory at the start of a chunk belongs to the last run of the previous chunk
    previous = F.pad(runs[:, :, :-1, -1:], (0, 0, 1, 0))
    # what leaves a chunk is of the last token's document alone, as only that one can go on
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


class _DecayTable(HandwrittenGradient):
    """`decay_table` with a gradient."""

    @staticmethod
    def forward(ctx: Any, coarse: Float[Tensor, "b h n c 1"], fine: Float[Tensor, "b h n c 1"]) -> Tensor:
        table = decay_table(coarse, fine)
        ctx.save_for_backward(table)
        return table

    @staticmethod
    def backward(ctx: Any, dtable: Tensor) -> tuple[None, Tensor]:
        (table,) = ctx.saved_tensors
        return None, gradient_of_sums(dtable * table)

    @classmethod
    def plain(cls, *arguments: Any) -> Any:
        coarse, fine = arguments
        exponents = coarse - coarse.mT + fine - fine.mT
        return exponents.tril().clamp(max=1.0).exp().tril()


def gradient_of_sums(dexponents: Float[Tensor, "*b c c"]) -> Float[Tensor, "*b c 1"]:
    """The gradient of sums whose differences are the exponents of pairs; that of a token with itself is overwritten."""
    # it is 0, but would leave the difference of two rounded sums
    dexponents.diagonal(dim1=-2, dim2=-1).zero_()
    return (dexponents.sum(-1) - dexponents.sum(-2))[..., None]
