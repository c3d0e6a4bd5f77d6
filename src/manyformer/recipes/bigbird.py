"""BigBird: attention to a window, a few global tokens and random blocks."""

from functools import partial
from typing import Annotated

from manyformer.attention import Attention
from manyformer.core import SUMMARY_ROLE, Layer
from manyformer.errors import UserError
from manyformer.kernels import SoftmaxKernel
from manyformer.masks import (
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
from manyformer.mixers.global_summaries import LeadingSummaries
from manyformer.models import EncoderDecoder, LanguageModel, MaskedLM
from manyformer.position import LearnedPosition, RelativeLabelPosition
from manyformer.recipes.baselines import attention_layers, language_model, learned_embedding
from manyformer.recipes.bert import masked_encoder
from manyformer.recipes.keywords import BlockLength, MaxRelativeDistance, PositiveSize
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import NormOrder
from manyformer.recipes.transformer import encoder_decoder
from manyformer.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.tasks.masked_language_modelling import MASKED_LM
from manyformer.tasks.translation import TRANSLATION

PAPER = "Zaheer et al. 2020, Big Bird: Transformers for Longer Sequences, arXiv:2007.14062"

RandomBlockCount = Annotated[PositiveSize | None, "number of random blocks that each block attends to"]


@recipe(
    "BigBird",
    paper=PAPER,
    summary="Random blocks in addition to a window and global tokens: a few layers connect any two tokens.",
    task=MASKED_LM,
    cost="O(l b d + l d^2) per layer, b keys in a handful of blocks",
    tiny_keywords={"block": 4, "random": 1, "max_length": 128},
)
def bigbird(
    vocab: int = 50358,
    dim: int = 768,
    depth: int = 12,
    heads: int = 12,
    ff_dim: int | None = None,
    max_length: int = 4096,
    block: BlockLength = 64,
    random: RandomBlockCount = 3,
    dropout: float = 0.1,
) -> MaskedLM:
    """BERT whose blocks attend to themselves, both neighbours, the first (global) block, and `random` other blocks.

    Sections 2 and 3, internal global tokens (ITC). The paper's last block is global, too; here it is not, so that the
    length of a text does not change what is computed at its beginning. Random blocks are drawn once for each block,
    head and layer, without repetition and only among blocks that the rest of the pattern leaves out, for texts of
    `max_length` tokens: in shorter texts some of them lie beyond the end. A call can mark more tokens as global by
    their roles."""
    num_blocks = _count_blocks(max_length, block)

    def attention(number: int) -> Layer:
        return Attention(dim, heads, SoftmaxKernel(bidirectional_pattern(block, random or 0, num_blocks, number)))

    return masked_encoder(vocab, dim, depth, heads, ff_dim, dropout, max_length=max_length, make_attention=attention)


@recipe(
    "BigBird with external tokens",
    paper=PAPER,
    summary="Additional global tokens before the text, and relative position labels.",
    task=MASKED_LM,
    cost="O(l (b + g) d + (l + g) d^2) per layer, b keys in a handful of blocks",
    tiny_keywords={"block": 4, "random": 1, "max_length": 128, "summaries": 3, "max_relative_distance": 3},
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
    beyond which there are no random blocks.
    """
    num_blocks = _count_blocks(max_length, block)

    def attention(number: int) -> Layer:
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
    cost="O(s b d + t^2 d + s t d + (s + t) d^2) per layer for s source and t target tokens, b keys in a few blocks",
    tiny_keywords={"block": 4, "random": 1, "max_length": 128},
)
def bigbird_seq2seq(
    vocab: int = 96103,
    source_vocab: int | None = None,
    dim: int = 768,
    depth: int = 12,
    heads: int = 12,
    ff_dim: int | None = None,
    max_length: int = 4096,
    block: BlockLength = 64,
    random: RandomBlockCount = 3,
    dropout: float = 0.1,
    norm_order: NormOrder = "post",
) -> EncoderDecoder:
    """`transformer` with learned positions whose encoder is that of `bigbird`, section 4.1 and appendix E.5."""
    num_blocks = _count_blocks(max_length, block)

    def encoder_attention(number: int) -> Layer:
        return Attention(dim, heads, SoftmaxKernel(bidirectional_pattern(block, random or 0, num_blocks, number)))

    sizes = (vocab, source_vocab, dim, depth, heads, ff_dim, dropout, norm_order)
    make_position = partial(LearnedPosition, dim, max_length, std=1.0)
    return encoder_decoder(*sizes, make_position=make_position, make_encoder_attention=encoder_attention)


@recipe(
    "BigBird language model",
    paper=PAPER,
    summary="Random blocks of the past alone: the pattern as a strictly causal language model.",
    task=LANGUAGE_MODELLING,
    cost="O(l b d + l d^2) per layer, b keys in a handful of blocks",
    tiny_keywords={"block": 4, "random": 1, "max_length": 128},
)
def bigbird_lm(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    ff_dim: int | None = None,
    max_length: int = 4096,
    block: BlockLength = 64,
    random: RandomBlockCount = 3,
    dropout: float = 0.1,
) -> LanguageModel:
    """`transformer-lm` whose blocks attend to the previous block, the first one, and `random` earlier ones.

    Released causal implementations draw random blocks from both sides and so attend to the future. Here a token attends
    to the tokens of its block up to itself, and to complete earlier blocks.
    """
    num_blocks = _count_blocks(max_length, block)

    def kernel(number: int) -> SoftmaxKernel:
        return SoftmaxKernel(causal_pattern(block, random or 0, num_blocks, number))

    embed = learned_embedding(vocab, dim, max_length, dropout=dropout)
    return language_model(embed, depth, attention_layers(dim, heads, ff_dim, kernel), dropout=dropout)


def bidirectional_pattern(block: int, random: int, num_blocks: int, seed: int) -> Mask:
    """The mask of an encoder: neighbouring blocks, the first block in both directions, and random blocks."""
    local_mask = LocalBlocks(block, lookback=block, lookahead=block) | GlobalTokens(FirstTokens(block) | WithRole())
    return local_mask | RandomBlocks(block, random, num_blocks, seed=seed, skip_first=1) if random else local_mask


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
