"""DeltaProduct: attention whose tokens have several keys and values, with which they correct a memory one by one."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.nn.attention.attention import AttentionState, MultiHeadLayer, split_heads
from manyformer.nn.attention.output_stages import OutputStage
from manyformer.nn.convolution.depthwise_convolution import ShortConvolution
from manyformer.nn.core import Context, LayerOutput, State
from manyformer.nn.kernels.kernel import KernelCall
from manyformer.nn.linear import ScaledFeatures, UnitLengthFeatures
from manyformer.nn.linear.decay_gates import SoftplusDecay
from manyformer.nn.linear.delta_rules import HouseholderProductRule
from manyformer.nn.linear.linear_kernel import LinearKernel
from manyformer.nn.linear.recurrent_rules import GateProjections
from manyformer.nn.masks import Causal
from manyformer.nn.positions.position import NoPosition
from manyformer.nn.runtime.head_selection import (
    HeadProjection,
    HeadSelection,
    head_channels,
    select_head_inputs,
    select_head_outputs,
    select_outputs,
)
from manyformer.nn.runtime.training_hooks import FusedRows


@final
class DeltaProductAttention(MultiHeadLayer, FusedRows):
    """Gated DeltaProduct (Siems et al. 2025, arXiv:2502.10297, section 3): `steps` corrections of the memory a token.

    A token has one query and `steps` keys and values of each head, which pass one short convolution along the tokens.
    `max_strength` 2 lets each step reflect the memory, so that a token can rotate it. See `HouseholderProductRule`."""

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        steps: int,
        head_dim: int,
        value_dim: int,
        conv_size: int,
        max_strength: float,
        output_stage: OutputStage,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.steps = steps
        self.head_dim = head_dim
        self.value_dim = value_dim
        self.q_proj = nn.Linear(dim, heads * head_dim, bias=False)
        # the keys of all heads for the first step, then for the second, ..., then values in the same order
        self.kv_proj = nn.Linear(dim, steps * heads * (head_dim + value_dim), bias=False)
        self.short_convolution = ShortConvolution(self.q_proj.out_features + self.kv_proj.out_features, conv_size)
        projections = GateProjections(decay=HeadProjection(dim, heads, 1), strength=HeadProjection(dim, heads, steps))
        rule = HouseholderProductRule(
            SoftplusDecay(heads),
            projections,
            steps=steps,
            key_dim=head_dim,
            value_dim=value_dim,
            max_strength=max_strength,
        )
        # keys of one token are divided by their lengths one by one, which the rule does
        features = UnitLengthFeatures(head_dim**-0.5)
        self.kernel = LinearKernel(features, Causal(), key_features=ScaledFeatures(), rule=rule)
        self.output_stage = output_stage
        self.out_proj = nn.Linear(heads * value_dim, dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize each projection, and those of the keys and values of each step, with Glorot's distribution."""
        for weight in (self.q_proj.weight, self.out_proj.weight, *torch.split(self.kv_proj.weight.data, self._kv_rows)):
            nn.init.xavier_uniform_(weight)

    @property
    def _kv_rows(self) -> list[int]:
        """The rows of `kv_proj` for the keys, and for the values, of each step."""
        return [self.heads * self.head_dim] * self.steps + [self.heads * self.value_dim] * self.steps

    def row_parts(self) -> dict[str, tuple[int, ...]]:
        return {"kv_proj.weight": tuple(self._kv_rows)}

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        convolved = self.short_convolution.init_state(batch, device=device, dtype=dtype)
        return AttentionState((), self.kernel.init_state(batch, device=device, dtype=dtype), convolved)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        _, kernel_state, convolved = (None, None, None) if state is None else state
        parts = [self.q_proj(x), self.kv_proj(x)]
        (q, keys_values), convolved = self.short_convolution(parts, ctx.positions, convolved)
        by_head = [split_heads(part, self.heads) for part in torch.split(keys_values, self._kv_rows, -1)]
        *earlier_keys, k = by_head[: self.steps]
        *earlier_values, v = by_head[self.steps :]
        assert self.kernel.gate_projection is not None
        gates = self.kernel.gate_projection(x).to(v.dtype)
        # the rule reads what the earlier steps write as gates behind the value of the last one
        written = torch.cat([v, gates, *earlier_keys, *earlier_values], -1)
        q = split_heads(q, self.heads)
        call = KernelCall(q, k, written, ctx.positions, ctx.positions, NoPosition(), kernel_state, ctx.watch)
        y, kernel_state, loss = self.kernel(call)
        y = self.out_proj(self.merge_heads(self.output_stage(y, x)))
        return LayerOutput(y, None if state is None else AttentionState((), kernel_state, convolved), loss)

    def select_projections(self, selection: HeadSelection) -> None:
        channels = []
        first = 0
        for rows in self._kv_rows:
            channels += [first + channel for channel in head_channels(selection.heads, rows // selection.total)]
            first += rows
        queries = self.q_proj.out_features
        query_channels = head_channels(selection.heads, self.head_dim)
        select_head_outputs(self.q_proj, selection)
        select_outputs(self.kv_proj, channels)
        self.short_convolution.keep_channels([*query_channels, *(queries + channel for channel in channels)])
        select_head_inputs(self.out_proj, selection)

    def extra_repr(self) -> str:
        return f"{self.heads} heads, {self.steps} steps"
