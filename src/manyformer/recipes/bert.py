"""BERT: an encoder that learns by filling in masked tokens."""

from collections.abc import Callable
from functools import partial

from torch import nn

from manyformer.attention import Attention
from manyformer.core import Layer
from manyformer.feedforward import FeedForward
from manyformer.kernels import Softmax
from manyformer.mixers.summaries import Summaries, Summarised
from manyformer.models import Embedding, Head, MaskedLM
from manyformer.models.contrast import Contrast
from manyformer.position import Learned, Position
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import shrink_outputs, small_std, stack


@recipe(
    "BERT",
    paper="Devlin et al. 2019, BERT: Pre-training of Deep Bidirectional Transformers, arXiv:1810.04805",
    new="Hiding a seventh of the tokens lets an encoder learn from both sides at once.",
    task="masked",
    cost="O(l^2 d + l d^2) per layer",
    because={
        "causal": "every token sees both sides: that is the point",
        "streams": "a later token changes all earlier outputs, so nothing can be kept",
        "cross": "it reads one sequence only",
    },
)
def bert(
    vocab: int = 30522,
    dim: int = 768,
    depth: int = 12,
    heads: int = 12,
    hidden: int | None = None,
    longest: int = 512,
    dropout: float = 0.1,
) -> MaskedLM:
    """BERT base by default: post-norm, GELU, learned positions, a normed embedding, and a head with its own layer.

    Section 3 and appendix A.2. Left out are the next-sentence task and its sentence types, which Liu et al. (2019,
    arXiv:1907.11692) found to help nothing, and dropout of attention weights.
    """
    position = Learned(dim, longest, std=small_std(dim))
    return masked_encoder(vocab, dim, depth, heads, hidden, dropout, embedded=position)


def masked_encoder(
    vocab: int,
    dim: int,
    depth: int,
    heads: int,
    hidden: int | None,
    dropout: float,
    *,
    embedded: Position | None = None,
    attended: Callable[[], Position | None] = lambda: None,
    mixer: Callable[[], Layer] | None = None,
    summaries: Summaries | None = None,
    contrast: Contrast | None = None,
) -> MaskedLM:
    """BERT with a position at its embedding, or one made by `attended` inside the attention of each layer.

    `mixer` makes another layer that takes the place of attention. `summaries` stand before each text inside all layers.
    """
    layer_norm = partial(nn.LayerNorm, dim, eps=1e-12)

    def layer() -> dict[str, Layer]:
        return {
            "attention": Attention(dim, heads, Softmax(), position=attended()) if mixer is None else mixer(),
            "ff": FeedForward(dim, hidden, activation=nn.GELU()),
        }

    std = small_std(dim)
    embed = Embedding(vocab, dim, position=embedded, std=std, norm=layer_norm(), dropout=dropout)
    body: Layer = stack(depth, layer, order="post", norm=layer_norm, dropout=dropout)
    shrink_outputs(body, depth, std=std)
    if summaries is not None:
        body = Summarised(body, dim, summaries)
    transform = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), layer_norm())
    head = Head(dim, vocab, tied=embed.token, transform=transform, bias=True)
    return MaskedLM(embed, body, head, contrast=contrast)
