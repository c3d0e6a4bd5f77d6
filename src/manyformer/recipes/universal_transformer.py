"""The Universal Transformer: one layer applied repeatedly, with adaptive computation time for each token."""

from functools import partial
from typing import Annotated, Literal, NamedTuple, TypedDict, Unpack

from torch import nn

from manyformer.models import ClassHead, EncoderDecoder, LanguageModel, TextClassifier, TokenEmbedding
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.models.tasks.text_labels import CLASSIFICATION
from manyformer.models.tasks.translation import TRANSLATION
from manyformer.nn.attention.attention import Attention
from manyformer.nn.attention.kv_cache import CrossAttentionSource, HaltedTokenSource
from manyformer.nn.convolution.convolution_module import SeparableConv
from manyformer.nn.core import Chain, Layer, Pointwise
from manyformer.nn.depth import (
    AdaptiveComputation,
    FixedSteps,
    GravesHalting,
    HaltingUnit,
    ReleasedHalting,
    UniversalBlock,
)
from manyformer.nn.feed_forward.feedforward import FeedForward
from manyformer.nn.masks import Causal, Mask, Window
from manyformer.nn.positions import (
    LearnedStepSignal,
    NoStepSignal,
    PositionStepSignal,
    SinusoidalPosition,
    SinusoidalStepSignal,
    StepSignal,
)
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.parts.baselines import NormOrder, branch
from manyformer.recipes.parts.keywords import Default, PositiveSize
from manyformer.recipes.parts.registry import recipe

HaltingKind = Annotated[
    Literal["act", "act-released", "fixed"],
    "adaptive computation time as in the paper (act) or in its released code (act-released), or a fixed "
    "number of steps",
]
TransitionKind = Annotated[
    Literal["feedforward", "convolution"],
    "what follows attention in each step: a feed-forward layer, or two depthwise-separable convolutions",
]
StepSignalKind = Annotated[
    Literal["sinusoid", "learned", "none"], "encoding of the step's number: sines and cosines, learned, or none"
]

PAPER = "Dehghani et al. 2019, Universal Transformers, arXiv:1807.03819; Graves 2016, arXiv:1603.08983 (halting)"
SUMMARY = "One layer is applied repeatedly, as many times as each token needs."
COST = "O(t (l^2 d + l d^2)), t the steps that a token takes on average"
ROUNDING_CHANGES_STEPS = {
    "bfloat16": "rounding moves halting probabilities across the threshold, which changes the number of steps"
}
TINY = {"depth": 3}


class UniversalOptions(TypedDict, total=False):
    """The keywords that all forms of the Universal Transformer share."""

    norm_order: Annotated[NormOrder, Default("post")]
    halting: Annotated[HaltingKind, Default("act")]
    ponder_cost: Annotated[float, "weight in the loss of the mean number of steps", Default(0.01)]
    transition: Annotated[TransitionKind, Default("feedforward")]
    step_signal: Annotated[StepSignalKind, Default("sinusoid")]
    halting_bias: Annotated[
        float, "initial bias of the halting logit: 1 means two steps at first, -3 about twenty", Default(1.0)
    ]


class UniversalConfig(NamedTuple):
    """The configuration of the encoder and the decoder."""

    dim: int
    depth: int
    heads: int
    ff_dim: int | None
    dropout: float
    options: UniversalOptions

    def embedding(self, vocab: int) -> TokenEmbedding:
        # the block adds positions at every step
        return TokenEmbedding(vocab, self.dim, scale=self.dim**0.5, dropout=self.dropout)

    def body(self, mask: Mask | None, *, cross: bool) -> Layer:
        """The repeated layer with its halting, and the final norm."""
        order = self.options["norm_order"]
        residual = partial(branch, order=order, norm=partial(nn.LayerNorm, self.dim), dropout=self.dropout)
        source = None
        if self.options["halting"] != "fixed":
            # a halted token no longer changes: its keys and values are cached, and active tokens alone are computed
            source = HaltedTokenSource()
        attention = residual(Attention(self.dim, self.heads, SoftmaxKernel(mask), source=source))
        cross_attention = None
        if cross:
            cross_attention = residual(Attention(self.dim, self.heads, SoftmaxKernel(), source=CrossAttentionSource()))
        # a convolution of a decoder must not see the tokens to the right either
        transition = residual(self._make_transition(causal=mask is not None))
        block = UniversalBlock(attention, transition, cross=cross_attention)
        body = self._repeat(block, PositionStepSignal(SinusoidalPosition(self.dim), self._make_step_signal()))
        if order == "post":
            return body
        return Chain(steps=body, norm=Pointwise(nn.LayerNorm(self.dim)))

    def _make_step_signal(self) -> StepSignal:
        kind = self.options["step_signal"]
        if kind == "learned":
            return LearnedStepSignal(self.dim, self.depth)
        if kind == "none":
            return NoStepSignal(self.dim)
        return SinusoidalStepSignal(self.dim)

    def _repeat(self, block: UniversalBlock, timing: PositionStepSignal) -> Layer:
        if self.options["halting"] == "fixed":
            return FixedSteps(block, timing, self.depth)
        rule = GravesHalting() if self.options["halting"] == "act" else ReleasedHalting()
        ponder_cost = self.options["ponder_cost"]
        bias = self.options["halting_bias"]
        halting = HaltingUnit(self.dim, self.depth, rule=rule, ponder_cost=ponder_cost, bias=bias)
        return AdaptiveComputation(block, timing, halting)

    def _make_transition(self, *, causal: bool) -> Layer:
        if self.options["transition"] == "feedforward":
            return FeedForward(self.dim, self.ff_dim)
        ff_dim = 4 * self.dim if self.ff_dim is None else self.ff_dim
        # widths 3 and 5, as in the released code
        first = SeparableConv(self.dim, ff_dim, 3, causal=causal)
        return Chain(first=first, relu=Pointwise(nn.ReLU()), second=SeparableConv(ff_dim, self.dim, 5, causal=causal))


@recipe(
    "Universal Transformer",
    paper=PAPER,
    summary=SUMMARY,
    task=TRANSLATION,
    family="depth",
    cost=COST,
    reasons=ROUNDING_CHANGES_STEPS,
    tiny_keywords=TINY,
)
def universal_transformer(
    vocab: int = 37000,
    source_vocab: int | None = None,
    dim: int = 512,
    depth: int = 6,
    heads: int = 8,
    ff_dim: int | None = None,
    dropout: float = 0.1,
    **options: Unpack[UniversalOptions],
) -> EncoderDecoder:
    """One layer on each side, applied at most `depth` times; `ff_dim` is 4 dim unless given; embeddings are tied.

    Section 2. The released base model is wider (1024), with learned step signals; it is pre-norm (`norm_order="pre"`).
    Halting is Graves's adaptive computation time, with a remainder at the last step; `halting="act-released"` is
    Tensor2Tensor's variant. The released model allows 12 steps where a fixed model takes 6."""
    config = UniversalConfig(dim, depth, heads, ff_dim, dropout, options)
    embed = config.embedding(vocab)
    if source_vocab is None:
        embed_source = embed
    else:
        embed_source = config.embedding(source_vocab)
    encoder = config.body(None, cross=False)
    decoder = config.body(Causal(), cross=True)
    return EncoderDecoder(embed_source, encoder, embed, decoder, ClassHead(dim, vocab, tied=embed.token))


@recipe(
    "Universal Transformer language model",
    paper=PAPER,
    summary=SUMMARY,
    task=LANGUAGE_MODELLING,
    family="depth",
    cost=COST,
    reasons=ROUNDING_CHANGES_STEPS,
    tiny_keywords=TINY,
)
def universal_transformer_lm(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 6,
    heads: int = 8,
    ff_dim: int | None = None,
    dropout: float = 0.0,
    window: Annotated[
        PositiveSize | None, "number of positions in the attention window: a token and those before it; null means all"
    ] = None,
    **options: Unpack[UniversalOptions],
) -> LanguageModel:
    """The decoder alone, as in the paper's experiments on LAMBADA (section 3.4); `ff_dim` is 4 dim unless given.

    With a `window`, more distant tokens are reached in more steps; with `step_signal="none"` steps beyond those of
    training are computed like all others."""
    config = UniversalConfig(dim, depth, heads, ff_dim, dropout, options)
    embed = config.embedding(vocab)
    body = config.body(Causal() if window is None else Window(window), cross=False)
    return LanguageModel(embed, body, ClassHead(dim, vocab, tied=embed.token))


@recipe(
    "Universal Transformer classifier",
    paper=PAPER,
    summary=SUMMARY,
    task=CLASSIFICATION,
    family="depth",
    cost=COST,
    reasons=ROUNDING_CHANGES_STEPS,
    tiny_keywords=TINY,
)
def universal_transformer_classifier(
    vocab: int = 8000,
    classes: int = 2,
    dim: int = 256,
    depth: int = 6,
    heads: int = 4,
    ff_dim: int | None = None,
    dropout: float = 0.1,
    **options: Unpack[UniversalOptions],
) -> TextClassifier:
    """The encoder alone, with mean pooling and one projection; `ff_dim` is 4 dim unless given."""
    config = UniversalConfig(dim, depth, heads, ff_dim, dropout, options)
    body = config.body(None, cross=False)
    return TextClassifier(config.embedding(vocab), body, ClassHead(dim, classes, bias=True))
