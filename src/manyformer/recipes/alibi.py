"""ALiBi: a language model with linear distance biases instead of positions, which extrapolates to longer texts."""

from manyformer.models import LanguageModel, TokenEmbedding
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.masks import Causal
from manyformer.nn.positions import AlibiPosition
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.parts.baselines import NormOrder, attention_layers, init_std, language_model
from manyformer.recipes.parts.registry import recipe


@recipe(
    "ALiBi",
    paper="Press et al. 2022, Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation, "
    "arXiv:2108.12409",
    summary="A penalty linear in distance replaces positions, so the model extrapolates beyond the length it was "
    "trained on.",
    task=LANGUAGE_MODELLING,
    family="softmax",
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
