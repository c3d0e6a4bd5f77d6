"""FNet: an encoder that mixes tokens by a Fourier transform."""

from functools import partial

from torch import nn

from manyformer.attention import Attention
from manyformer.core import Chain, Layer, Residual
from manyformer.feedforward import FeedForward
from manyformer.kernels import Softmax
from manyformer.mixers import Fourier
from manyformer.models import Embedding, Head, MaskedLM
from manyformer.position import Learned
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import branch, shrink_outputs, small_std


@recipe(
    "FNet",
    paper="Lee-Thorp et al. 2021, FNet: Mixing Tokens with Fourier Transforms, arXiv:2105.03824",
    new="A Fourier transform, which has nothing to learn, mixes tokens nearly as well as attention.",
    task="masked",
    cost="O(l log(l) d + l d^2) per layer",
    because={
        "causal": "a Fourier transform is a sum over all tokens, later ones too",
        "streams": "a later token changes all earlier outputs, so nothing can be kept",
        "cross": "it reads one sequence only",
    },
)
def fnet(
    vocab: int = 32000,
    dim: int = 768,
    depth: int = 12,
    hidden: int | None = None,
    longest: int = 512,
    attending: int | None = None,
    heads: int = 12,
    dropout: float = 0.1,
) -> MaskedLM:
    """FNet base by default: `bert` without its attention, and a projection of the embedded words; sections 3 and 4.1.

    `attending` makes the paper's FNet-Hybrid: so many of the topmost layers attend, with `heads`. The paper fills all
    rows up to one length and lets the padding mix in; here each document is transformed at its own length. GELU is the
    exact one. Left out are sentence types and the next-sentence task.
    """
    norm = partial(nn.LayerNorm, dim, eps=1e-12)
    std = small_std(dim)
    position = Learned(dim, longest, std=std)
    # the projection follows the norm, as in the published code, and matters where words are narrower than the stream
    inward = nn.Sequential(norm(), nn.Linear(dim, dim))
    embed = Embedding(vocab, dim, position=position, std=std, norm=inward, dropout=dropout)

    def mixer(number: int) -> Residual:
        attends = number >= depth - (attending or 0)
        inner: Layer = Attention(dim, heads, Softmax()) if attends else Fourier()
        # the transform has no dropout in the paper
        return branch(inner, order="post", norm=norm, dropout=dropout if attends else 0.0)

    def layer(number: int) -> Chain:
        ff = FeedForward(dim, hidden, activation=nn.GELU())
        return Chain(mixer=mixer(number), ff=branch(ff, order="post", norm=norm, dropout=dropout))

    body = Chain(**{str(number): layer(number) for number in range(depth)})
    shrink_outputs(body, depth, std=std)
    transform = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), norm())
    return MaskedLM(embed, body, Head(dim, vocab, tied=embed.token, transform=transform, bias=True))
