"""BigBird: attention to a window, a few global tokens and random blocks."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, TypedDict, Unpack

from manyformer.base.errors import UserError
from manyformer.models import EncoderDecoder, LanguageModel, MaskedLM
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.models.tasks.masked_language_modelling import MASKED_LM
from manyformer.models.tasks.translation import TRANSLATION
from manyformer.nn.attention.attention import Attention
from manyformer.nn.attention.global_summaries import LeadingSummaries
from manyformer.nn.core import SUMMARY_ROLE, Layer
from manyformer.nn.kernels.kernel import Kernel
from manyformer.nn.masks import (
    Causal,
    FirstTokens,
    GlobalTokens,
    LocalBlocks,
    Mask,
    RandomBlocks,
    VisibleToAll,
    WithRole,
    four_piece_pattern,
)
from manyformer.nn.positions import LearnedPosition, RelativeLabelPosition
from manyformer.nn.softmax.softmax_kernel import LengthSwitchedKernel, SoftmaxKernel
from manyformer.recipes.bert import ENCODER_ACTIVATIONS, EncoderActivation, masked_encoder
from manyformer.recipes.parts.baselines import (
    NormOrder,
    encoder_decoder,
    gelu_layers,
    language_model,
    learned_embedding,
)
from manyformer.recipes.parts.keywords import (
    BlockLength,
    Default,
    MaxRelativeDistance,
    NormEps,
    PositiveSize,
    SentenceTypeCount,
)
from manyformer.recipes.parts.registry import recipe

PAPER = "Zaheer et al. 2020, Big Bird: Transformers for Longer Sequences, arXiv:2007.14062"

TINY = {"block": 4, "random": 1, "max_length": 128}

RandomBlockCount = Annotated[PositiveSize | None, "number of random blocks that each block attends to"]


class BigBirdOptions(TypedDict, total=False):
    """The keywords that all forms of BigBird share, except the one with external tokens, which has other defaults."""

    max_length: Annotated[int, Default(4096)]
    block: Annotated[BlockLength, Default(64)]
    random: Annotated[RandomBlockCount, Default(3)]
    dropout: Annotated[float, Default(0.1)]


@recipe(
    "BigBird",
    paper=PAPER,
    summary="Random blocks in addition to a window and global tokens: a few layers connect any two tokens.",
    task=MASKED_LM,
    family="sparse",
    cost="O(l b d + l d^2) per layer, b keys in a handful of blocks",
    tiny_keywords=TINY,
)
def bigbird(
    vocab: int = 50358,
    dim: int = 768,
    depth: int = 12,
    heads: int = 12,
    ff_dim: int | None = None,
    sentence_types: SentenceTypeCount = None,
    norm_eps: NormEps = 1e-12,
    activation: EncoderActivation = "gelu",
    full_length: Annotated[
        PositiveSize | None, "rows of up to so many tokens, with padding, have full attention; null means none"
    ] = None,
    **options: Unpack[BigBirdOptions],
) -> MaskedLM:
    """BERT whose blocks attend to themselves, both neighbors, the first (global) block, and `random` other blocks.

    Sections 2 and 3, internal global tokens (ITC). The paper's last block is global, too; here it is not, so that the
    length of a text does not change what is computed at its beginning. Random blocks are drawn once for each block,
    head and layer, without repetition and only among blocks that the rest of the pattern leaves out, for texts of
    `max_length` tokens: in shorter texts some of them lie beyond the end. A call can mark more tokens as global by
    their roles. The released models have two `sentence_types`, `activation="gelu-tanh"`, and a `full_length` of (5 + 2
    random) block tokens."""

    # a block pattern of a short text covers it anyway, so released models compute that densely
    def make_kernel(mask: Mask) -> Kernel:
        if full_length is None:
            return SoftmaxKernel(mask)
        return LengthSwitchedKernel(mask, full_length)

    return masked_encoder(
        vocab,
        dim,
        depth,
        heads,
        ff_dim,
        options["dropout"],
        max_length=options["max_length"],
        sentence_types=sentence_types,
        make_attention=_attention(bidirectional_pattern, dim, heads, options, make_kernel),
        norm_eps=norm_eps,
        make_activation=ENCODER_ACTIVATIONS[activation],
    )


@recipe(
    "BigBird with external tokens",
    paper=PAPER,
    summary="Additional global tokens before the text, and relative position labels.",
    task=MASKED_LM,
    family="sparse",
    cost="O(l (b + g) d + (l + g) d^2) per layer, b keys in a handful of blocks",
    reasons={"pair_weights": "summaries stand among the tokens"},
    tiny_keywords={**TINY, "summaries": 3, "max_relative_distance": 3},
)
def bigbird_etc(
    vocab: int = 50358,
    dim: int = 768,
    depth: int = 12,
    heads: int = 12,
    ff_dim: int | None = None,
    max_length: int = 4116,
    block: BlockLength = 84,
    random: RandomBlockCount = None,
    summaries: Annotated[PositiveSize, "number of global summary tokens before each document"] = 256,
    max_relative_distance: MaxRelativeDistance = 12,
    dropout: float = 0.1,
) -> MaskedLM:
    """BigBird's ETC variant: `summaries` global tokens before the text, three local blocks, and relative labels.

    Section 2 and appendix E, whose base model has no random blocks. Each global token has a learned vector; the paper
    leaves their content to the task. Positions are relative labels alone, so texts may be longer than `max_length`,
    beyond which there are no random blocks."""
    # random blocks are drawn among so many, once, when the model is built
    num_blocks = _count_blocks(max_length, block)

    def attention(number: int) -> Layer:
        # text to text; the other three pieces, from and to summaries, are complete
        l2l: Mask = LocalBlocks(block, lookback=block, lookahead=block) | GlobalTokens(WithRole())
        if random:
            l2l |= RandomBlocks(block, random, num_blocks, seed=number)
        mask = four_piece_pattern(WithRole(SUMMARY_ROLE), l2l=l2l)
        position = RelativeLabelPosition(dim // heads, heads, max_relative_distance, cross_labels=1)
        return Attention(dim, heads, SoftmaxKernel(mask), position=position)

    summary_tokens = LeadingSummaries(summaries)
    return masked_encoder(vocab, dim, depth, heads, ff_dim, dropout, make_attention=attention, summaries=summary_tokens)


@recipe(
    "BigBird encoder-decoder",
    paper=PAPER,
    summary="A long source encoded at linear cost, a short target decoded with full attention.",
    task=TRANSLATION,
    family="sparse",
    cost="O(s b d + t^2 d + s t d + (s + t) d^2) per layer for s source and t target tokens, b keys in a few blocks",
    tiny_keywords=TINY,
)
def bigbird_seq2seq(
    vocab: int = 96103,
    source_vocab: int | None = None,
    dim: int = 768,
    depth: int = 12,
    heads: int = 12,
    ff_dim: int | None = None,
    norm_order: NormOrder = "post",
    **options: Unpack[BigBirdOptions],
) -> EncoderDecoder:
    """`transformer` with learned positions whose encoder is that of `bigbird`, section 4.1 and appendix E.5."""
    attention = _attention(bidirectional_pattern, dim, heads, options)
    sizes = (vocab, source_vocab, dim, depth, heads, ff_dim, options["dropout"], norm_order)
    # token vectors are scaled to unit variance here, other than in BERT, so positions begin at that scale too
    make_position = partial(LearnedPosition, dim, options["max_length"], std=1.0)
    return encoder_decoder(*sizes, make_position=make_position, make_encoder_attention=attention)


@recipe(
    "BigBird language model",
    paper=PAPER,
    summary="Random blocks of the past alone: the pattern as a strictly causal language model.",
    task=LANGUAGE_MODELLING,
    family="sparse",
    cost="O(l b d + l d^2) per layer, b keys in a handful of blocks",
    tiny_keywords=TINY,
)
def bigbird_lm(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    ff_dim: int | None = None,
    **options: Unpack[BigBirdOptions],
) -> LanguageModel:
    """`transformer-lm` whose blocks attend to the previous block, the first one, and `random` earlier ones.

    Released causal implementations draw random blocks from both sides and so attend to the future. Here a token attends
    to the tokens of its block up to itself, and to complete earlier blocks."""
    embed = learned_embedding(vocab, dim, options["max_length"], dropout=options["dropout"])
    layer = gelu_layers(dim, ff_dim, _attention(causal_pattern, dim, heads, options))
    return language_model(embed, depth, layer, dropout=options["dropout"])


def _attention(
    pattern: Callable[[int, int, int, int], Mask],
    dim: int,
    heads: int,
    options: BigBirdOptions,
    make_kernel: Callable[[Mask], Kernel] = SoftmaxKernel,
) -> Callable[[int], Layer]:
    """A function from a layer's number to its attention, with other random blocks in each layer."""
    block = options["block"]
    random = options["random"] or 0
    num_blocks = _count_blocks(options["max_length"], block)
    # the layer's number is the seed: blocks that one layer does not connect, another one does
    return lambda number: Attention(dim, heads, make_kernel(pattern(block, random, num_blocks, number)))


def bidirectional_pattern(block: int, random: int, num_blocks: int, seed: int) -> Mask:
    """The mask of an encoder: neighboring blocks, the first block in both directions, and random blocks."""
    local_mask = LocalBlocks(block, lookback=block, lookahead=block) | GlobalTokens(FirstTokens(block) | WithRole())
    if random:
        # the first block is global already, so drawing it would waste a random block
        return local_mask | RandomBlocks(block, random, num_blocks, seed=seed, skip_first=1)
    return local_mask


def causal_pattern(block: int, random: int, num_blocks: int, seed: int) -> Mask:
    """The causal mask: the previous block, the first block, and random earlier blocks."""
    local_mask = LocalBlocks(block, lookback=block) | VisibleToAll(FirstTokens(block))
    if not random:
        return Causal() & local_mask
    return Causal() & (local_mask | RandomBlocks(block, random, num_blocks, seed=seed, skip_first=1, past_only=True))


def _count_blocks(max_length: int, block: int) -> int:
    if max_length % block:
        raise UserError(f"max_length ({max_length}) must be a multiple of block ({block})")
    return max_length // block
