"""ALiBi: a language model with linear distance biases instead of positions, which extrapolates to longer texts."""

from manyformer.kernels import SoftmaxKernel
from manyformer.masks import Causal
from manyformer.models import LanguageModel, TokenEmbedding
from manyformer.position import AlibiPosition
from manyformer.recipes.baselines import NormOrder, attention_layers, init_std, language_model
from manyformer.recipes.registry import recipe
from manyformer.tasks.language_modelling import LANGUAGE_MODELLING


@recipe(
    "ALiBi",
    paper="Press et al. 2022, Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation, "
    "arXiv:2108.12409",
    summary="A penalty linear in distance replaces positions, so the model extrapolates beyond the length it was "
    "trained on.",
    task=LANGUAGE_MODELLING,
    cost="O(l^2 d + l d^2) per layer",
)
def alibi(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    ff_dim: int | None = None,
    dropout: float = 0.0,
    norm_order: NormOrder = "pre",
) -> LanguageModel:
    """`transformer-lm` with linear biases instead of learned positions, and so without a maximum length. Section 3.

    The paper replaces the positions of existing models: here that of `transformer-lm`, there that of Baevski and Auli
    (2019) with 16 layers of width 1024."""
    # it has no weights, so one module serves all layers
    position = AlibiPosition(heads)
    layer = attention_layers(dim, heads, ff_dim, lambda number: SoftmaxKernel(Causal()), position=position)
    # nothing is added to token vectors
    embed = TokenEmbedding(vocab, dim, std=init_std(dim), dropout=dropout)
    return language_model(embed, depth, layer, dropout=dropout, norm_order=norm_order)
