"""The gated Transformer-XL: a policy with a memory, for reinforcement learning."""

from functools import partial
from typing import Annotated, Literal

from torch import nn

from manyformer.base.spaces import parse_observations
from manyformer.models import PolicyModel
from manyformer.models.observation_embedding import ObservationEmbedding
from manyformer.models.tasks.policy import POLICY
from manyformer.nn.attention.attention import Attention
from manyformer.nn.attention.kv_cache import SegmentMemorySource
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.feedforward import FeedForward
from manyformer.nn.masks import Window
from manyformer.nn.positions import TransformerXLBiases, TransformerXLPosition
from manyformer.nn.residual import DEFAULT_GATE_BIAS, Residual, make_join
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.parts.baselines import check_heads, stack
from manyformer.recipes.parts.keywords import (
    ActionCount,
    ContinuousActions,
    GateBias,
    MemoryLength,
    ObservationShape,
    PreviousInputs,
    ResidualGate,
)
from manyformer.recipes.parts.registry import recipe

PolicyNormOrder = Annotated[
    Literal["pre", "post"],
    "norm before each branch and ReLU after it, so that the stream stays an identity map (pre), or Transformer-XL's "
    "norm after each sum, without that ReLU (post)",
]

TINY_POLICY = {"observations": 5, "actions": 3}
TINY_MEMORY = {"memory_length": 5}


@recipe(
    "Gated Transformer-XL",
    paper="Parisotto et al. 2020, Stabilizing Transformers for Reinforcement Learning, arXiv:1910.06764",
    summary="Transformer-XL as a policy, whose branches are joined by gates that begin as the identity.",
    task=POLICY,
    family="memory",
    constant_state=True,
    cost="O(l m d + l d^2) per layer, m steps of memory",
    tiny_keywords={**TINY_POLICY, **TINY_MEMORY},
)
def gtrxl(
    observations: ObservationShape = 8,
    actions: ActionCount = 4,
    dim: int = 256,
    depth: int = 12,
    heads: int = 8,
    ff_dim: int | None = None,
    memory_length: MemoryLength = 512,
    gate: ResidualGate = "gru",
    gate_bias: GateBias = DEFAULT_GATE_BIAS,
    norm_order: PolicyNormOrder = "pre",
    *,
    continuous: ContinuousActions = False,
    previous_inputs: PreviousInputs = True,
) -> PolicyModel:
    """GTrXL of section 3 with the depth and memory of the paper's experiments; `ff_dim` is 4 dim unless given.

    `gate="residual"` is the paper's TrXL-I, and with `norm_order="post"` also the canonical Transformer-XL. Every step
    sees the `memory_length` steps before it, and only those of its episode, in acting and in learning alike. The memory
    holds the unnormalized inputs of the layers. There is no final norm. Heads have width dim / heads, the paper's 64;
    its training algorithm is V-MPO, ours PPO."""
    check_heads(dim, heads)
    norm = partial(nn.LayerNorm, dim)
    biases = TransformerXLBiases(heads, dim // heads)

    def branch(inner: Layer) -> Residual:
        # with a large bias a gate begins near the identity: the policy can react before memory is learned (section 3.2)
        join = make_join(gate, dim, gate_bias=gate_bias)
        if norm_order == "post":
            return Residual(inner, join=join, post_norm=norm())
        # a ReLU after each branch, before its gate: the stream itself is never rectified
        return Residual(inner, join=join, inner_norm=nn.ReLU())

    def layer(number: int) -> dict[str, Layer]:
        pre_norm = norm() if norm_order == "pre" else None
        attention = Attention(
            dim,
            heads,
            # a step and the memory_length before it, whether these stand in the segment or in the memory
            SoftmaxKernel(Window(memory_length + 1)),
            position=TransformerXLPosition(dim, heads, biases=biases),
            # acting carries the inputs of layers, as learning does, so that both see the same numbers
            source=SegmentMemorySource(memory_length, dim, evaluation_state="inputs"),
            pre_norm=pre_norm,
            bias=False,
        )
        feedforward = branch(FeedForward(dim, ff_dim))
        feedforward.pre_norm = norm() if norm_order == "pre" else None
        return {"attention": branch(attention), "ff": feedforward}

    space = parse_observations(observations)
    embed = ObservationEmbedding(space, dim, actions=actions, continuous=continuous, previous_inputs=previous_inputs)
    # branches are complete, so the order only leaves out the final norm
    body = stack(depth, layer, order="post", norm=norm, dropout=0.0)
    return PolicyModel(embed, body, actions, continuous=continuous)
