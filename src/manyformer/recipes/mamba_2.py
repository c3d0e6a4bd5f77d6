"""Mamba-2: a state space model as linear attention with a decay of each head, without feed-forward layers."""

from typing import Annotated

from manyformer.base.errors import UserError
from manyformer.models import LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.core import Layer
from manyformer.recipes.parts.baselines import rms_decoder
from manyformer.recipes.parts.keywords import (
    PositiveSize,
    ShortConvolutionSize,
    ValueExpansion,
)
from manyformer.recipes.parts.recurrent_layers import SIGNED_SUMS, RecurrentSizes, state_space_attention
from manyformer.recipes.parts.registry import recipe


@recipe(
    "Mamba-2",
    paper="Dao and Gu 2024, Transformers are SSMs, arXiv:2405.21060",
    summary="A state space model with one decay per head and step, computed as a decayed sum of keys and values.",
    task=LANGUAGE_MODELLING,
    family="linear",
    constant_state=True,
    cost="O(l d (d + state)) per layer; O(d (d + state)) per generated token, at any length",
    reasons={**SIGNED_SUMS, "removable_heads": "one norm acts on the outputs of all heads"},
    tiny_keywords={"state_dim": 6},
)
def mamba_2(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 16,
    heads: int = 16,
    groups: Annotated[PositiveSize, "heads of queries and keys (C and B), each shared by adjacent heads"] = 1,
    state_dim: Annotated[PositiveSize, "width of queries and keys: rows of the memory of a head"] = 128,
    expansion: ValueExpansion = 2,
    conv_size: ShortConvolutionSize = 4,
    dropout: float = 0.0,
) -> LanguageModel:
    """Section 7: a short convolution of values, keys and queries, a skip, a gate, and a norm of each group after it.

    Layers are such mixers alone. Heads have width expansion * dim / heads, the paper's 64. Raises UserError if heads
    do not divide."""
    inner = expansion * dim
    if inner % heads or heads % groups:
        raise UserError(f"heads ({heads}) must divide expansion * dim ({inner}) and be a multiple of groups ({groups})")
    sizes = RecurrentSizes(dim, heads, state_dim, inner // heads, groups)

    def layer(number: int) -> dict[str, Layer]:
        return {"attention": state_space_attention(sizes, conv_size=conv_size)}

    return rms_decoder(vocab, dim, depth, layer, dropout=dropout)
