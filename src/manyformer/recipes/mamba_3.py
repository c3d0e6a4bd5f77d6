"""Mamba-3: a state space model with trapezoidal steps, and memories that turn keys and queries as they go."""

from typing import Annotated

from manyformer.base.errors import UserError
from manyformer.models import LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.feedforward import GatedFeedForward
from manyformer.nn.recurrent.mamba_3_mixer import Mamba3Mixer
from manyformer.recipes.parts.baselines import rms_decoder
from manyformer.recipes.parts.keywords import (
    PositiveSize,
    ValueExpansion,
)
from manyformer.recipes.parts.registry import recipe


@recipe(
    "Mamba-3",
    paper="Lahoti et al. 2026, Mamba-3: Improved Sequence Modeling using State Space Principles, arXiv:2603.15569",
    summary="Mamba-2 without its convolution, with a rule of second order between two tokens and complex memories.",
    task=LANGUAGE_MODELLING,
    family="linear",
    constant_state=True,
    cost="O(l d (d + state)) per layer; O(d (d + state)) per generated token, at any length",
    reasons={
        "heads": "its heads share keys and queries, and are no attention",
        "attention_dropout": "a memory forms no weights of softmax",
        "attention_maps": "it sums two memories, of which no weights of pairs of tokens are formed",
    },
    tiny_keywords={"state_dim": 8},
)
def mamba_3(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 16,
    state_dim: Annotated[PositiveSize, "width of queries and keys, a multiple of 4: rows of a head's memory"] = 128,
    expansion: ValueExpansion = 2,
    ff_dim: int | None = None,
    dropout: float = 0.0,
) -> LanguageModel:
    """The form of rank 1, with SwiGLU after each mixer; the form of several inputs and outputs (MIMO) is not built.

    Heads have width expansion * dim / heads, the paper's 64. Raises UserError if widths do not divide."""
    inner = expansion * dim
    if inner % heads:
        raise UserError(f"heads ({heads}) must divide expansion * dim ({inner})")
    if state_dim % 4:
        raise UserError(f"state_dim ({state_dim}) must be a multiple of 4: half of the channels are rotated in pairs")

    def layer(number: int) -> dict[str, Layer]:
        mixer = Mamba3Mixer(dim, heads, value_dim=inner // heads, state_dim=state_dim)
        return {"mixer": mixer, "ff": GatedFeedForward(dim, ff_dim)}

    return rms_decoder(vocab, dim, depth, layer, dropout=dropout)
