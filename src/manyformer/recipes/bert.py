"""BERT: an encoder trained to predict masked tokens."""

from collections.abc import Callable
from functools import partial

from torch import nn

from manyformer.attention import Attention
from manyformer.core import Layer
from manyformer.feedforward import FeedForward
from manyformer.kernels import SoftmaxKernel
from manyformer.mixers.global_summaries import SummaryPrefixedLayer, SummaryTokens
from manyformer.models import ClassHead, MaskedLM, TokenEmbedding
from manyformer.models.contrastive_loss import PartContrastiveLoss
from manyformer.position import LearnedPosition, Position
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import init_std, scale_residual_init, stack
from manyformer.tasks.masked_language_modelling import MASKED_LM


@recipe(
    "BERT",
    paper="Devlin et al. 2019, BERT: Pre-training of Deep Bidirectional Transformers, arXiv:1810.04805",
    summary="Predicting masked tokens trains an encoder on the context of both sides at once.",
    task=MASKED_LM,
    cost="O(l^2 d + l d^2) per layer",
)
def bert(
    vocab: int = 30522,
    dim: int = 768,
    depth: int = 12,
    heads: int = 12,
    ff_dim: int | None = None,
    max_length: int = 512,
    dropout: float = 0.1,
) -> MaskedLM:
    """BERT base by default: post-norm, GELU, learned positions, a normalized embedding, and a head with a dense layer.

    Section 3 and appendix A.2. Not included: the next-sentence task and its sentence types, which Liu et al. (2019,
    arXiv:1907.11692) found not to help, and dropout of attention weights.
    """
    position = LearnedPosition(dim, max_length, std=init_std(dim))
    return masked_encoder(vocab, dim, depth, heads, ff_dim, dropout, position=position)


def masked_encoder(
    vocab: int,
    dim: int,
    depth: int,
    heads: int,
    ff_dim: int | None,
    dropout: float,
    *,
    position: Position | None = None,
    make_mixer: Callable[[int], Layer] | None = None,
    summaries: SummaryTokens | None = None,
    contrast: PartContrastiveLoss | None = None,
) -> MaskedLM:
    """BERT with `position` added to its embedding; `summaries` are prefixed to each text in all layers.

    `make_mixer` makes the layer that replaces standard attention in the layer of a number.
    """
    layer_norm = partial(nn.LayerNorm, dim, eps=1e-12)

    def layer(number: int) -> dict[str, Layer]:
        mixer = Attention(dim, heads, SoftmaxKernel()) if make_mixer is None else make_mixer(number)
        return {"attention": mixer, "ff": FeedForward(dim, ff_dim, activation=nn.GELU())}

    std = init_std(dim)
    embed = TokenEmbedding(vocab, dim, position=position, std=std, norm=layer_norm(), dropout=dropout)
    body: Layer = stack(depth, layer, order="post", norm=layer_norm, dropout=dropout)
    scale_residual_init(body, depth, std=std)
    if summaries is not None:
        body = SummaryPrefixedLayer(body, dim, summaries)
    transform = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), layer_norm())
    head = ClassHead(dim, vocab, tied=embed.token, transform=transform, bias=True)
    return MaskedLM(embed, body, head, contrast=contrast)
