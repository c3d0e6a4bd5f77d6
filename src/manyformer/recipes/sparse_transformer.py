"""The Sparse Transformer: every token reaches every earlier one in two steps, by a window and by strides."""

from functools import partial
from typing import Literal, final

from jaxtyping import Float
from torch import Tensor, nn

from manyformer.attention import Attention
from manyformer.core import Chain, Layer, Pointwise
from manyformer.feedforward import FeedForward
from manyformer.kernels import SoftmaxKernel
from manyformer.masks import Mask, MaskByLayer, alternate_heads, alternate_layers, fixed_pattern, strided_pattern, union
from manyformer.models import ClassHead, LanguageModel
from manyformer.recipes.baselines import learned_embedding
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import branch, init_std, scale_residual_init

SparsePattern = Literal["strided", "fixed"]
PatternUse = Literal["merged", "interleaved", "heads"]


@recipe(
    "Sparse Transformer",
    paper="Child et al. 2019, Generating Long Sequences with Sparse Transformers, arXiv:1904.10509",
    summary="Two small sets of earlier positions, such that two steps lead anywhere: l sqrt(l) instead of l^2.",
    task="language-model",
    causal=True,
    incremental_decoding=True,
    cost="O(l sqrt(l) d + l d^2) per layer",
    reasons={"cross_attention": "a language model reads one sequence only"},
    tiny_keywords={"stride": 4, "summary": 1, "max_length": 128},
)
def sparse_transformer(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 30,
    heads: int = 8,
    ff_dim: int | None = None,
    max_length: int = 12288,
    stride: int = 128,
    summary: int = 32,
    pattern: SparsePattern = "fixed",
    pattern_use: PatternUse = "merged",
    dropout: float = 0.4,
) -> LanguageModel:
    """Pre-norm, x sigmoid(1.702 x), outputs of branches drawn smaller; defaults are those for enwik8.

    Sections 4.2, 5.2 and 5.4. "fixed" blocks of `stride` positions show their last `summary` to all later ones,
    "strided" ones every `stride`-th; they are merged in one head, taken in turn by layers, or dealt out to the heads.
    Positions have a learned vector each instead of one for the row and one for the column, and the paper's gradient
    checkpoints and half precision are up to the run.
    """
    sight = schedule(pattern, pattern_use, stride, summary, heads)
    std, norm = init_std(dim), partial(nn.LayerNorm, dim)

    def layer(number: int) -> Layer:
        parts: dict[str, Layer] = {
            "attention": Attention(dim, heads, SoftmaxKernel(sight(number))),
            "ff": FeedForward(dim, ff_dim, activation=SigmoidGELU()),
        }
        return Chain(**{name: branch(part, order="pre", norm=norm, dropout=dropout) for name, part in parts.items()})

    body = Chain(**{str(number): layer(number) for number in range(depth)}, norm=Pointwise(norm()))
    embed = learned_embedding(vocab, dim, max_length, dropout=dropout)
    scale_residual_init(body, depth, std=std)
    return LanguageModel(embed, body, ClassHead(dim, vocab, tied=embed.token))


@final
class SigmoidGELU(nn.Module):
    """x sigmoid(1.702 x), an approximation of GELU (Child et al. 2019, section 5.2)."""

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        return x * (1.702 * x).sigmoid()


def schedule(pattern: SparsePattern, use: PatternUse, stride: int, summary: int, heads: int) -> MaskByLayer:
    """The mask of each layer (section 4.3). With heads apart, each pair of heads has summaries of its own."""
    if pattern == "strided":
        pairs: list[tuple[Mask, Mask]] = [strided_pattern(stride)]
    else:
        verses = max(min(heads // 2, stride // summary), 1) if use == "heads" else 1
        pairs = [fixed_pattern(stride, summary, verse=verse) for verse in range(verses)]
    if use == "heads":
        mask = alternate_heads([one for pair in pairs for one in pair], heads)
        return lambda layer: mask
    if use == "merged":
        merged = union(pairs[0])
        return lambda layer: merged
    return alternate_layers(pairs[0])
