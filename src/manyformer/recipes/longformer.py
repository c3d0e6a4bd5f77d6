"""Longformer: windows and a few global tokens, as an encoder and as a language model."""

from functools import partial

from torch import nn

from manyformer.attention import Attention
from manyformer.core import Chain, Layer, Pointwise
from manyformer.errors import UserError
from manyformer.feedforward import FeedForward
from manyformer.kernels import Softmax
from manyformer.masks import First, Heads, Mask, Role, Window, around, growing
from manyformer.mixers.global_local import GlobalLocal
from manyformer.models import Embedding, Head, LanguageModel, MaskedLM
from manyformer.position import Learned, Rotary
from manyformer.recipes.bert import masked_encoder
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import branch, shrink_outputs, small_std

PAPER = "Beltagy et al. 2020, Longformer: The Long-Document Transformer, arXiv:2004.05150"


@recipe(
    "Longformer",
    paper=PAPER,
    new="A window for every token, and a few tokens that see all and are seen by all, with projections of their own.",
    task="masked",
    cost="O(l (w + g) d + l d^2) per layer",
    because={
        "causal": "every token sees both sides: that is the point",
        "streams": "a later token changes all earlier outputs, so nothing can be kept",
        "cross": "it reads one sequence only",
    },
    small={"window": 3, "globals": 2},
)
def longformer(
    vocab: int = 50265,
    dim: int = 768,
    depth: int = 12,
    heads: int = 12,
    hidden: int | None = None,
    longest: int = 4096,
    window: int = 256,
    globals: int | None = 1,
    dropout: float = 0.1,
) -> MaskedLM:
    """An encoder like `bert` whose tokens see `window` positions on either side; the first `globals` are global.

    Sections 3.1 and 5; the paper's "window size 512" is 256 on either side. Which tokens are global is up to the task:
    for classification the first one; a call may name others by their roles, such as those of a question. Weights are
    not copied from RoBERTa.
    """
    tokens = Role() if globals is None else First(globals) | Role()
    model = masked_encoder(
        vocab,
        dim,
        depth,
        heads,
        hidden,
        dropout,
        embedded=Learned(dim, longest, std=small_std(dim)),
        mixer=lambda: GlobalLocal(dim, heads, around(window), tokens),
    )
    for module in model.modules():
        if isinstance(module, GlobalLocal):
            module.copy_projections()
    return model


@recipe(
    "Longformer language model",
    paper=PAPER,
    new="Windows that grow from the bottom layer to the top one, some heads with gaps: context at a linear price.",
    task="language-model",
    causal=True,
    streams=True,
    cost="O(l w d + l d^2) per layer",
    because={"cross": "a language model reads one sequence only"},
    small={"window": 3, "top": 5, "dilated": 1, "depth": 3},
)
def longformer_lm(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 12,
    heads: int = 8,
    hidden: int | None = None,
    window: int = 64,
    top: int | None = 512,
    dilated: int | None = 2,
    dropout: float = 0.2,
) -> LanguageModel:
    """Causal windows from `window` tokens in the lowest layer to `top` in the highest, sections 3.1 and 4.1.

    In the upper half of the layers, `dilated` heads see every second, third, and at the top every fourth position
    (appendix A). The paper trains in stages, with windows and sequences twice as long in each: windows are no weights,
    so a run with larger ones may `start` with the weights of one with smaller. Positions are rotary where the paper has
    Transformer-XL's, whose scores would need all pairs of positions in a window written out.
    """
    if dilated is not None and dilated > heads:
        raise UserError(f"dilated ({dilated}) heads are more than there are heads ({heads})")
    sizes = growing(depth, window, window if top is None else top)
    std, rotary = small_std(dim), Rotary(dim // heads)
    norm = partial(nn.LayerNorm, dim)

    def layer(number: int) -> Layer:
        mask = sight(sizes(number), number, depth, dilated or 0)
        parts: dict[str, Layer] = {
            "attention": Attention(dim, heads, Softmax(mask), position=rotary),
            "ff": FeedForward(dim, hidden, activation=nn.GELU()),
        }
        return Chain(**{name: branch(part, order="pre", norm=norm, dropout=dropout) for name, part in parts.items()})

    layers = {str(number): layer(number) for number in range(depth)}
    body = Chain(**layers, norm=Pointwise(norm()))
    embed = Embedding(vocab, dim, std=std, dropout=dropout)
    shrink_outputs(body, depth, std=std)
    return LanguageModel(embed, body, Head(dim, vocab, tied=embed.token))


def sight(size: int, number: int, depth: int, dilated: int) -> Mask:
    """The mask of a layer: its first `dilated` heads have gaps of 1, 2 and 3 in the three parts of the upper half."""
    above = number - depth // 2
    if above < 0 or not dilated:
        return Window(size)
    gaps = 1 + 3 * above // (depth - depth // 2)
    return Heads(dict.fromkeys(range(dilated), Window(size, dilation=gaps + 1)), rest=Window(size))
