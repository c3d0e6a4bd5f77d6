"""How a causal memory takes in a token: by adding, by fading and adding, or by correcting what it already says."""

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from manyformer.ops import delta, linear
from manyformer.ops.runs import running_max

Form = Literal["quadratic", "chunked", "recurrent"]


class Tokens(NamedTuple):
    """Features of queries and keys, values and gates of the same tokens; `log` as in `Features`.

    `real` and `run` (see `manyformer.ops.runs`) are None where there is no padding and one document a row.
    """

    a: Float[Tensor, "b h l r"]
    c: Float[Tensor, "b h l r"]
    v: Float[Tensor, "b h l f"]
    log: Float[Tensor, "b h l"] | None
    gate: Float[Tensor, "b h l"] | None
    real: Bool[Tensor, "b l"] | None
    run: Int[Tensor, "b l"] | None


class Memory(NamedTuple):
    """What is kept of all keys and values so far: a matrix a head, and the logarithm of its scale where it has one."""

    matrix: Float[Tensor, "b h r f"] | None = None
    level: Float[Tensor, "b h"] | None = None


class Written(NamedTuple):
    """Outputs, the memory after the last token, and the weights where every pair was written out."""

    y: Float[Tensor, "b h l f"]
    memory: Memory
    weights: Float[Tensor, "b h l l"] | None = None


class Rule(nn.Module, ABC):
    """How a memory takes in tokens and is read; `gates` numbers a token and head are asked of the stream for it.

    `forms` are the ways of computing that there are; the first is the definition.
    """

    gates: int = 0
    forms: frozenset[Form]

    @abstractmethod
    def forward(self, tokens: Tokens, memory: Memory, *, form: Form, chunk: int, floor: float) -> Written: ...


@final
class Sum(Rule):
    """Every token adds the outer product of its key's features and its value (Katharopoulos et al. 2020)."""

    forms = frozenset({"quadratic", "chunked", "recurrent"})

    def forward(self, tokens: Tokens, memory: Memory, *, form: Form, chunk: int, floor: float) -> Written:
        return _summed(tokens, memory, None, None, form=form, chunk=chunk, floor=floor)


@final
class Gated(Rule):
    """M_t = g_t M_(t-1) + (1 - g_t) c_t v_t^T, g a sigmoid of the stream (Peng et al. 2021, section 3.2).

    The gates begin around sigmoid(`start`), mostly open, so that the memory reaches back from the beginning.
    """

    gates = 1
    forms = frozenset({"quadratic", "chunked", "recurrent"})

    def __init__(self, *, start: float = 2.0) -> None:
        super().__init__()
        self.start = start

    def forward(self, tokens: Tokens, memory: Memory, *, form: Form, chunk: int, floor: float) -> Written:
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
class Delta(Rule):
    """The delta rule of fast weights (Schlag et al. 2021, section 4.2): M_t = M_(t-1) + b_t c_t (v_t - c_t^T M_(t-1)).

    A token replaces the part b, a sigmoid of the stream, of what the memory says for its key. Features are divided by
    their sum (section 4.3), queries' too, and outputs are not normalised any more.
    """

    gates = 1
    forms = frozenset({"chunked", "recurrent"})

    def forward(self, tokens: Tokens, memory: Memory, *, form: Form, chunk: int, floor: float) -> Written:
        assert tokens.gate is not None
        strength = torch.sigmoid(tokens.gate)
        if tokens.real is not None:
            strength = strength.masked_fill(~tokens.real[:, None], 0.0)
        a, c = (x / x.sum(-1, keepdim=True).clamp(min=floor) for x in (tokens.a, tokens.c))
        if form == "chunked":
            y, matrix = delta.chunked(a, c, tokens.v, strength, tokens.run, memory.matrix, chunk=chunk)
        else:
            y, matrix = delta.recurrent(a, c, tokens.v, strength, tokens.run, memory.matrix)
        return Written(y, Memory(matrix))


def _summed(
    tokens: Tokens,
    memory: Memory,
    weight: Tensor | None,
    decay: Tensor | None,
    *,
    form: Form,
    chunk: int,
    floor: float,
) -> Written:
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
        y, matrix, pairs = linear.quadratic(a, c, columns, decay, run)
        weights = pairs if weight is None else pairs * weight[:, :, None]
        total = weights.sum(-1, keepdim=True)
        return Written(linear.over_weights(y, floor), Memory(matrix, level), weights / total.clamp(min=floor))
    if form == "chunked":
        y, matrix = linear.chunked(a, c, columns, decay, run, memory.matrix, chunk=chunk)
    else:
        y, matrix = linear.recurrent(a, c, columns, decay, run, memory.matrix)
    return Written(linear.over_weights(y, floor), Memory(matrix, level))


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
