"""The Differential Transformer: attention is the difference of two softmaxes."""

from manyformer.base.errors import UserError
from manyformer.models import LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.attention.attention import Attention
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.feedforward import GatedFeedForward
from manyformer.nn.kernels.composed_kernels import DifferentialKernel
from manyformer.nn.masks import Causal
from manyformer.nn.positions import RotaryPosition
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.parts.baselines import head_width, rms_decoder
from manyformer.recipes.parts.keywords import HeadDim, NormEps, RopeBase, TiedOutput
from manyformer.recipes.parts.registry import recipe


@recipe(
    "Differential Transformer",
    paper="Ye et al. 2024, Differential Transformer, arXiv:2410.05258",
    summary="Attention as the difference of two softmaxes, by which what both attend to cancels.",
    task=LANGUAGE_MODELLING,
    family="softmax",
    cost="O(l^2 d + l d^2) per layer",
    reasons={
        "convex_weights": "weights are differences, which add up to less than 1",
        "removable_heads": "heads are pairs, computed from one another",
    },
    tiny_keywords={"heads": 4, "kv_heads": 2},
)
def diff_transformer(
    vocab: int = 32000,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    kv_heads: int | None = None,
    head_dim: HeadDim = None,
    ff_dim: int | None = None,
    rope_base: RopeBase = 10_000.0,
    *,
    norm_eps: NormEps = 1e-5,
    tied: TiedOutput = False,
    dropout: float = 0.0,
) -> LanguageModel:
    """Section 2, smaller than published: 3B has dim=3072, depth=28, heads=24 of width 128, of which 2 are a pair.

    `heads` counts softmaxes: the paper's h differential heads are 2 h here. Pairs are heads i and i + h, as in the
    class of `transformers`; the authors' code pairs neighbors and has a weight in the norm. `ff_dim` is 8/3 dim unless
    given. Raises UserError for odd numbers of heads."""
    for name, count in (("heads", heads), ("kv_heads", heads if kv_heads is None else kv_heads)):
        if count % 2:
            raise UserError(f"{name} ({count}) must be even: each head of differential attention is a pair")
    width = head_width(dim, heads, head_dim)
    # both softmaxes of a pair are rotated alike, so that their difference compares the same distances
    rotary = RotaryPosition(width, pairs="halves", base=rope_base)

    def layer(number: int) -> dict[str, Layer]:
        attention = Attention(
            dim,
            heads,
            # lambda begins at 0.8 - 0.6 exp(-0.3 number), so the kernel needs to know its layer (section 2.1)
            DifferentialKernel(SoftmaxKernel(Causal()), width, number, eps=norm_eps),
            kv_heads=kv_heads,
            head_dim=width,
            value_dim=width,
            position=rotary,
            bias=False,
        )
        return {"attention": attention, "ff": GatedFeedForward(dim, ff_dim)}

    return rms_decoder(vocab, dim, depth, layer, dropout=dropout, norm_eps=norm_eps, tied=tied)
