"""BigBird: a window, a few global tokens, and random blocks that make any two tokens near neighbours."""

from functools import partial

from torch import nn

from manyformer.attention import Attention
from manyformer.core import Layer
from manyformer.errors import UserError
from manyformer.feedforward import FeedForward
from manyformer.kernels import Softmax
from manyformer.masks import Blocks, Causal, First, Global, Mask, RandomBlocks, To
from manyformer.models import Embedding, Head, LanguageModel, MaskedLM
from manyformer.position import Learned
from manyformer.recipes.bert import masked_encoder
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import shrink_outputs, small_std, stack

PAPER = "Zaheer et al. 2020, Big Bird: Transformers for Longer Sequences, arXiv:2007.14062"


@recipe(
    "BigBird",
    paper=PAPER,
    new="Random blocks beside a window and global tokens: any two tokens are a few steps apart.",
    task="masked",
    cost="O(l b d + l d^2) per layer, b keys in a handful of blocks",
    because={
        "causal": "every token sees both sides: that is the point",
        "streams": "a later token changes all earlier outputs, so nothing can be kept",
        "cross": "it reads one sequence only",
    },
    small={"block": 4, "random": 1, "longest": 128},
)
def bigbird(
    vocab: int = 50358,
    dim: int = 768,
    depth: int = 12,
    heads: int = 12,
    hidden: int | None = None,
    longest: int = 4096,
    block: int = 64,
    random: int | None = 3,
    dropout: float = 0.1,
) -> MaskedLM:
    """BERT with three blocks around each, the first block global, and `random` others for each block, head and layer.

    Sections 2 and 3, internal global tokens (ITC). The paper's last block is global, too; here it is not, because where
    a text ends must not change what is computed at its beginning. Random blocks are drawn once by seed, never twice
    the same and never one that is seen anyway, for texts of `longest` tokens: in shorter ones some lie beyond the end.
    """
    masks = iter(both_sides(block, random or 0, _blocks(longest, block), layer) for layer in range(depth))
    position = Learned(dim, longest, std=small_std(dim))

    def mixer() -> Layer:
        return Attention(dim, heads, Softmax(next(masks)))

    return masked_encoder(vocab, dim, depth, heads, hidden, dropout, embedded=position, mixer=mixer)


@recipe(
    "BigBird language model",
    paper=PAPER,
    new="Random blocks of the past alone: the pattern as a language model that truly sees no future.",
    task="language-model",
    causal=True,
    streams=True,
    cost="O(l b d + l d^2) per layer, b keys in a handful of blocks",
    because={"cross": "a language model reads one sequence only"},
    small={"block": 4, "random": 1, "longest": 128},
)
def bigbird_lm(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    hidden: int | None = None,
    longest: int = 4096,
    block: int = 64,
    random: int | None = 3,
    dropout: float = 0.1,
) -> LanguageModel:
    """`transformer-lm` whose blocks see the block before, the first one, and `random` earlier ones.

    Released causal forms draw random blocks from both sides and so see the future. All that a token sees is decided
    before it is read: tokens of the own block up to itself, and blocks that have ended.
    """
    masks = iter(past(block, random or 0, _blocks(longest, block), layer) for layer in range(depth))
    std = small_std(dim)

    def layer() -> dict[str, Layer]:
        return {
            "attention": Attention(dim, heads, Softmax(next(masks))),
            "ff": FeedForward(dim, hidden, activation=nn.GELU()),
        }

    embed = Embedding(vocab, dim, position=Learned(dim, longest, std=std), std=std, dropout=dropout)
    body = stack(depth, layer, order="pre", norm=partial(nn.LayerNorm, dim), dropout=dropout)
    shrink_outputs(body, depth, std=std)
    return LanguageModel(embed, body, Head(dim, vocab, tied=embed.token))


def both_sides(block: int, random: int, blocks: int, seed: int) -> Mask:
    """The blocks around, the first one in both directions, and random ones."""
    near = Blocks(block, before=block, after=block) | Global(First(block))
    return near | RandomBlocks(block, random, blocks, seed=seed, lead=1) if random else near


def past(block: int, random: int, blocks: int, seed: int) -> Mask:
    """The block before, the first one, and random earlier ones."""
    near = Blocks(block, before=block) | To(First(block))
    if not random:
        return Causal() & near
    return Causal() & (near | RandomBlocks(block, random, blocks, seed=seed, lead=1, past=True))


def _blocks(longest: int, block: int) -> int:
    if longest % block:
        raise UserError(f"longest ({longest}) must be a multiple of block ({block})")
    return longest // block
