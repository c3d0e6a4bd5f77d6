"""Update rules of the recurrent memory in causal linear attention: sum, gated sum and delta rule."""

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from manyformer.nn.linear import linear_attention, matrix_recurrence
from manyformer.nn.linear.linear_attention import divide_by_normalizer
from manyformer.nn.ops.document_rows import running_max

RecurrenceForm = Literal["quadratic", "chunked", "recurrent", "fla"]
"""All pairs, chunks of tokens, token by token, or chunks by the kernels of fla-core."""


class TokenFeatures(NamedTuple):
    """Features of queries and keys, values and gates of the same tokens; `log_scale` as in `FeatureValues`.

    `valid` and `run` (see `manyformer.nn.ops.document_rows`) are None where there is no padding and one document a row.
    `dtype` is the type of the layer's queries, keys and values, in which fla-core forms products.
    """

    query_features: Float[Tensor, "b h l r"]
    key_features: Float[Tensor, "b h l r"]
    v: Float[Tensor, "b h l f"]
    log_scale: Float[Tensor, "b h l"] | None
    gate: Float[Tensor, "b h l n"] | None
    valid: Bool[Tensor, "b l"] | None
    run: Int[Tensor, "b l"] | None
    dtype: torch.dtype = torch.float32


class RecurrentMemory(NamedTuple):
    """The sum over all keys and values so far: one matrix per head, and the logarithm of its scale if it has one."""

    matrix: Float[Tensor, "b h r f"] | None = None
    log_scale: Float[Tensor, "b h"] | None = None


class MemoryResult(NamedTuple):
    """Outputs, the memory after the last token, and the weights if the form computed all pairs."""

    y: Float[Tensor, "b h l f"]
    memory: RecurrentMemory
    weights: Float[Tensor, "b h l l"] | None = None


class MemoryRule(nn.Module, ABC):
    """The update and readout of a memory, with `gate_dim` gate channels per token and head.

    The layer projects them with its values unless the rule has a `gate_projection` (see `Kernel`).
    One channel may gate a whole memory; `head_dim` channels each row of it (see
    `manyformer.nn.linear.matrix_recurrence`).

    `forms` are the supported algorithms; "quadratic", where supported, is the definition.
    """

    gate_dim: int = 0
    forms: frozenset[RecurrenceForm]

    def __init__(self) -> None:
        super().__init__()
        self.gate_projection: nn.Module | None = None

    @property
    def has_decay_per_head(self) -> bool:
        """Whether a memory decays by one number, which takes other kernels than one number for each channel."""
        return False

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
        return _weighted_mean(tokens, memory, None, None, form=form, chunk=chunk, floor=floor)


@final
class GatedRule(MemoryRule):
    """M_t = g_t M_(t-1) + (1 - g_t) c_t v_t^T, g a sigmoid of the layer's input (Peng et al. 2021, section 3.2).

    `gate_bias` is added before the sigmoid, so that gates are initially about sigmoid(`gate_bias`): mostly open, with a
    long memory.
    """

    gate_dim = 1
    forms = frozenset({"quadratic", "chunked", "recurrent"})

    def __init__(self, *, gate_bias: float = 2.0) -> None:
        super().__init__()
        self.gate_bias = gate_bias

    def forward(
        self, tokens: TokenFeatures, memory: RecurrentMemory, *, form: RecurrenceForm, chunk: int, floor: float
    ) -> MemoryResult:
        assert tokens.gate is not None
        gate = tokens.gate + self.gate_bias
        decay = F.logsigmoid(gate)
        if tokens.valid is not None:
            # padding does not change the memory
            decay = decay.masked_fill(~tokens.valid[:, None, :, None], 0.0)
        return _weighted_mean(tokens, memory, torch.sigmoid(-gate[..., 0]), decay, form=form, chunk=chunk, floor=floor)

    def extra_repr(self) -> str:
        return f"gate_bias={self.gate_bias}"


@final
class DeltaRule(MemoryRule):
    """The delta rule of fast weights (Schlag et al. 2021, section 4.2): M_t = M_(t-1) + b_t c_t (v_t - c_t^T M_(t-1)).

    A token replaces the share b, a sigmoid of the layer's input, of the value that the memory returns for its key.
    Features of keys and queries are divided by their sum (section 4.3), and outputs are not normalized.
    """

    gate_dim = 1
    forms = frozenset({"chunked", "recurrent"})

    def forward(
        self, tokens: TokenFeatures, memory: RecurrentMemory, *, form: RecurrenceForm, chunk: int, floor: float
    ) -> MemoryResult:
        assert tokens.gate is not None
        strength = torch.sigmoid(tokens.gate[..., 0])
        if tokens.valid is not None:
            # padding corrects nothing
            strength = strength.masked_fill(~tokens.valid[:, None], 0.0)
        query_features, key_features = (
            x / x.sum(-1, keepdim=True).clamp(min=floor) for x in (tokens.query_features, tokens.key_features)
        )
        inputs = query_features, key_features, tokens.v, None, tokens.run, memory.matrix
        if form == "chunked":
            y, matrix = matrix_recurrence.chunked(*inputs, strength=strength, chunk=chunk)
        else:
            y, matrix = matrix_recurrence.recurrent(*inputs, strength=strength)
        return MemoryResult(y, RecurrentMemory(matrix))


def _weighted_mean(
    tokens: TokenFeatures,
    memory: RecurrentMemory,
    weight: Tensor | None,
    decay: Tensor | None,
    *,
    form: RecurrenceForm,
    chunk: int,
    floor: float,
) -> MemoryResult:
    """The weighted mean of values; the sum of the weights is computed as an additional value column."""
    query_features = tokens.query_features
    key_features = tokens.key_features
    v = tokens.v
    valid = tokens.valid
    run = tokens.run
    log_scale = memory.log_scale
    if tokens.log_scale is not None:
        scale, scale_decay, log_scale = _rescale(tokens.log_scale, valid, run, log_scale)
        weight = scale if weight is None else weight * scale
        if decay is None:
            decay = scale_decay[..., None]
        else:
            decay = decay + scale_decay[..., None]
    if valid is not None:
        if weight is None:
            weight = valid[:, None].to(v.dtype)
        else:
            weight = weight.masked_fill(~valid[:, None], 0.0)
    # the sum of the weights is the memory of a value that is always 1
    columns = F.pad(v, (0, 1), value=1.0)
    if weight is not None:
        columns = columns * weight[..., None]
    if form == "quadratic":
        assert memory.matrix is None
        y, matrix, pairs = linear_attention.quadratic(query_features, key_features, columns, decay, run)
        if weight is None:
            weights = pairs
        else:
            weights = pairs * weight[:, :, None]
        shares = weights / weights.sum(-1, keepdim=True).clamp(min=floor)
        return MemoryResult(divide_by_normalizer(y, floor), RecurrentMemory(matrix, log_scale), shares)
    inputs = query_features, key_features, columns, decay, run, memory.matrix
    if form == "chunked":
        y, matrix = linear_attention.chunked(*inputs, chunk=chunk)
    else:
        y, matrix = matrix_recurrence.recurrent(*inputs)
    return MemoryResult(divide_by_normalizer(y, floor), RecurrentMemory(matrix, log_scale))


def _rescale(
    token_scale: Tensor, valid: Tensor | None, run: Tensor | None, previous: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Scales exp(token_scale) relative to the maximum so far, the log decay of the memory, and the last maximum.

    The maximum is over earlier tokens only, as in an online softmax, so that no later token can change an earlier
    output even by rounding. It cancels between numerator and denominator of every mean, so it needs no gradient.
    """
    # the maximum is a scale, and cancels: it has no gradient
    if valid is None:
        detached = token_scale.detach()
    else:
        detached = token_scale.detach().masked_fill(~valid[:, None], -torch.inf)
    if previous is None:
        previous = torch.full_like(detached[..., 0], -torch.inf)
    log_scale = running_max(detached, run, previous)
    earlier = torch.cat([previous[..., None], log_scale[..., :-1]], dim=-1)
    # at the first token of a document there is no memory to decay
    is_first = earlier == -torch.inf
    if run is not None:
        is_first = is_first | (run != F.pad(run[:, :-1], (1, 0)))[:, None]
    scale_decay = (earlier - log_scale).masked_fill(is_first, 0.0)
    scale = (token_scale - log_scale).masked_fill(log_scale == -torch.inf, -torch.inf).exp()
    # a copy: a view would keep the whole tensor alive, and the state must not grow with the number of tokens
    return scale, scale_decay, log_scale[..., -1].clone()
