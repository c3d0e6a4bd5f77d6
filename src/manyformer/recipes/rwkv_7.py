"""RWKV-7: a recurrent model whose memory removes and adds by keys and rates of their own."""

from typing import Annotated

from torch import nn

from manyformer.base.errors import UserError
from manyformer.models import ClassHead, LanguageModel, TokenEmbedding
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.core import Chain, Pointwise
from manyformer.nn.recurrent.rwkv_time_mixing import RWKVLayer, RWKVStack, RWKVTimeMixing, ShiftedFeedForward
from manyformer.nn.runtime.dropout import Dropout
from manyformer.recipes.parts.baselines import branch, init_std, scale_residual_init
from manyformer.recipes.parts.keywords import PositiveSize
from manyformer.recipes.parts.registry import recipe


@recipe(
    "RWKV-7",
    paper='Peng et al. 2025, RWKV-7 "Goose" with Expressive Dynamic State Evolution, arXiv:2503.14456',
    summary="A memory that decays each channel and corrects itself at once, by removal keys that differ from its keys.",
    task=LANGUAGE_MODELLING,
    family="linear",
    constant_state=True,
    cost="O(l d^2) per layer; O(d^2) per generated token, at any length",
    reasons={
        "heads": "its memories are those of a layer without gates of heads",
        "attention_maps": "the memory is corrected, not averaged",
    },
    tiny_keywords={"head_dim": 4},
)
def rwkv_7(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    head_dim: Annotated[PositiveSize, "width of a head, which must divide dim"] = 64,
    ff_dim: int | None = None,
    dropout: float = 0.0,
) -> LanguageModel:
    """Section 4: token shift, low-rank decays, rates and gates, and values mixed with those of the first layer.

    Matrices begin like those of our other recipes, vectors at the released code's values. Raises UserError unless
    `head_dim` divides `dim`."""
    if dim % head_dim:
        raise UserError(f"dim ({dim}) must be a multiple of head_dim ({head_dim})")

    def layer(number: int) -> RWKVLayer:
        # how much of the previous token is mixed in at first falls with the layer, as in the released code
        feedforward = ShiftedFeedForward(dim, ff_dim, power=(1 - number / depth) ** 4)
        ff = branch(feedforward, order="pre", norm=lambda: nn.LayerNorm(dim), dropout=dropout)
        return RWKVLayer(RWKVTimeMixing(dim, head_dim, number, depth), nn.LayerNorm(dim), ff, Dropout(dropout))

    std = init_std(dim)
    # the norm that RWKV has before its first layer
    embed = TokenEmbedding(vocab, dim, std=std, norm=nn.LayerNorm(dim), dropout=dropout)
    # layers are called one by one, because all of them read the values of the first
    stack = RWKVStack(**{str(number): layer(number) for number in range(depth)})
    body = Chain(layers=stack, norm=Pointwise(nn.LayerNorm(dim)))
    scale_residual_init(body, depth, std=std)
    return LanguageModel(embed, body, ClassHead(dim, vocab))
