"""How a causal memory takes in a token: by adding, by fading and adding, or by correcting what it already says."""

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from manyformer.ops import delta_rule, linear_attention
from manyformer.ops.segment_runs import running_max

RecurrenceForm = Literal["quadratic", "chunked", "recurrent"]


class TokenFeatures(NamedTuple):
    """Features of queries and keys, values and gates of the same tokens; `log` as in `FeatureValues`.

    `real` and `run` (see `manyformer.ops.segment_runs`) are None where there is no padding and one document a row.
    """

    query_features: Float[Tensor, "b h l r"]
    key_features: Float[Tensor, "b h l r"]
    v: Float[Tensor, "b h l f"]
    log: Float[Tensor, "b h l"] | None
    gate: Float[Tensor, "b h l"] | None
    real: Bool[Tensor, "b l"] | None
    run: Int[Tensor, "b l"] | None


class RecurrentMemory(NamedTuple):
    """What is kept of all keys and values so far: a matrix a head, and the logarithm of its scale where it has one."""

    matrix: Float[Tensor, "b h r f"] | None = None
    level: Float[Tensor, "b h"] | None = None


class MemoryResult(NamedTuple):
    """Outputs, the memory after the last token, and the weights where every pair was written out."""

    y: Float[Tensor, "b h l f"]
    memory: RecurrentMemory
    weights: Float[Tensor, "b h l l"] | None = None


class MemoryRule(nn.Module, ABC):
    """How a memory takes in tokens and is read; `gates` numbers a token and head are asked of the stream for it.

    `forms` are the ways of computing that there are; the first is the definition.
    """

    gates: int = 0
    forms: frozenset[RecurrenceForm]

    @abstractmethod
    def forward(
        self, tokens: TokenFeatures, memory: RecurrentMemory, *, form: RecurrenceForm, chunk: int, floor: float
    ) -> MemoryResult: ...


@final
class SumRule(MemoryRule):
    """Every token adds the outer product of its key's features and its value (Katharopoulos et al. 2020)."""

    forms = frozenset({"quadratic", "chunked", "recurrent"})

    def forward(
        self, tokens: TokenFeatures, memory: RecurrentMemory, *, form: RecurrenceForm, chunk: int, floor: float
    ) -> MemoryResult:
        return _summed(tokens, memory, None, None, form=form, chunk=chunk, floor=floor)


@final
class GatedRule(MemoryRule):
    """M_t = g_t M_(t-1) + (1 - g_t) c_t v_t^T, g a sigmoid of the stream (Peng et al. 2021, section 3.2).

    The gates begin around sigmoid(`start`), mostly open, so that the memory reaches back from the beginning.
    """

    gates = 1
    forms = frozenset({"quadratic", "chunked", "recurrent"})

    def __init__(self, *, start: float = 2.0) -> None:
        super().__init__()
        self.start = start

    def forward(
        self, tokens: TokenFeatures, memory: RecurrentMemory, *, form: RecurrenceForm, chunk: int, floor: float
    ) -> MemoryResult:
        assert tokens.gate is not None
        gate = tokens.gate + self.start
        decay = F.logsigmoid(gate)
        if tokens.real is not None:
            # padding leaves the memory as it is
            decay = decay.masked_fill(~tokens.real[:, None], 0.0)
        return _summed(tokens, memory, torch.sigmoid(-gate), decay, form=form, chunk=chunk, floor=floor)

    def extra_repr(self) -> str:
        return f"start={self.start}"


@final
class DeltaRule(MemoryRule):
    """The delta rule of fast weights (Schlag et al. 2021, section 4.2): M_t = M_(t-1) + b_t c_t (v_t - c_t^T M_(t-1)).

    A token replaces the part b, a sigmoid of the stream, of what the memory says for its key. Features are divided by
    their sum (section 4.3), queries' too, and outputs are not normalised any more.
    """

    gates = 1
    forms = frozenset({"chunked", "recurrent"})

    def forward(
        self, tokens: TokenFeatures, memory: RecurrentMemory, *, form: RecurrenceForm, chunk: int, floor: float
    ) -> MemoryResult:
        assert tokens.gate is not None
        strength = torch.sigmoid(tokens.gate)
        if tokens.real is not None:
            strength = strength.masked_fill(~tokens.real[:, None], 0.0)
        a, c = (x / x.sum(-1, keepdim=True).clamp(min=floor) for x in (tokens.query_features, tokens.key_features))
        if form == "chunked":
            y, matrix = delta_rule.chunked(a, c, tokens.v, strength, tokens.run, memory.matrix, chunk=chunk)
        else:
            y, matrix = delta_rule.recurrent(a, c, tokens.v, strength, tokens.run, memory.matrix)
        return MemoryResult(y, RecurrentMemory(matrix))


def _summed(
    tokens: TokenFeatures,
    memory: RecurrentMemory,
    weight: Tensor | None,
    decay: Tensor | None,
    *,
    form: RecurrenceForm,
    chunk: int,
    floor: float,
) -> MemoryResult:
    """A weighted mean of values: the weights' own sum is one more column of the values."""
    a, c, v, log, _, real, run = tokens
    level = memory.level
    if log is not None:
        scale, fall, level = _levelled(log, real, run, level)
        weight = scale if weight is None else weight * scale
        decay = fall if decay is None else decay + fall
    if real is not None:
        weight = real[:, None].to(v.dtype) if weight is None else weight.masked_fill(~real[:, None], 0.0)
    columns = F.pad(v, (0, 1), value=1.0)
    columns = columns if weight is None else columns * weight[..., None]
    if form == "quadratic":
        assert memory.matrix is None
        y, matrix, pairs = linear_attention.quadratic(a, c, columns, decay, run)
        weights = pairs if weight is None else pairs * weight[:, :, None]
        total = weights.sum(-1, keepdim=True)
        return MemoryResult(
            linear_attention.divide_by_normalizer(y, floor),
            RecurrentMemory(matrix, level),
            weights / total.clamp(min=floor),
        )
    if form == "chunked":
        y, matrix = linear_attention.chunked(a, c, columns, decay, run, memory.matrix, chunk=chunk)
    else:
        y, matrix = linear_attention.recurrent(a, c, columns, decay, run, memory.matrix)
    return MemoryResult(linear_attention.divide_by_normalizer(y, floor), RecurrentMemory(matrix, level))


def _levelled(
    log: Tensor, real: Tensor | None, run: Tensor | None, before: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights exp(log) relative to the largest so far, how that makes the memory shrink, and the largest after all.

    Only the past sets the scale, as in an online softmax, so that no later token can move an earlier output even by a
    rounding. The scale is in both parts of every mean and cancels: it needs no gradient.
    """
    fixed = log.detach() if real is None else log.detach().masked_fill(~real[:, None], -torch.inf)
    before = torch.full_like(fixed[..., 0], -torch.inf) if before is None else before
    level = running_max(fixed, run, before)
    earlier = torch.cat([before[..., None], level[..., :-1]], dim=-1)
    # where nothing has been kept so far there is nothing to shrink
    fresh = earlier == -torch.inf
    if run is not None:
        fresh = fresh | (run != F.pad(run[:, :-1], (1, 0)))[:, None]
    fall = (earlier - level).masked_fill(fresh, 0.0)
    scale = (log - level).masked_fill(level == -torch.inf, -torch.inf).exp()
    # a copy: a part of it would keep all of it, and what is kept must not grow with the tokens that have been
    return scale, fall, level[..., -1].clone()
