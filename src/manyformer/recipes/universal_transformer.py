"""The Universal Transformer: one layer, again and again, for as long as each token needs."""

from functools import partial
from typing import Literal, NamedTuple

from torch import nn

from manyformer.attention import Attention
from manyformer.core import Chain, Layer, Pointwise
from manyformer.depth import (
    AdaptiveComputation,
    FixedSteps,
    GravesHalting,
    HaltingUnit,
    ReleasedHalting,
    UniversalBlock,
)
from manyformer.feedforward import FeedForward
from manyformer.kernels import SoftmaxKernel
from manyformer.masks import Causal, Window
from manyformer.mixers import SeparableConv
from manyformer.models import ClassHead, EncoderDecoder, LanguageModel, TextClassifier, TokenEmbedding
from manyformer.position import (
    LearnedStepSignal,
    NoStepSignal,
    PositionStepSignal,
    SinusoidalPosition,
    SinusoidalStepSignal,
    StepSignal,
)
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import NormOrder, branch
from manyformer.sources import CrossAttentionSource, HaltedTokenSource

HaltingKind = Literal["adaptive", "released", "fixed"]
TransitionKind = Literal["feedforward", "convolution"]
StepSignalKind = Literal["sinusoid", "learned", "none"]

PAPER = "Dehghani et al. 2019, Universal Transformers, arXiv:1807.03819; Graves 2016, arXiv:1603.08983 (halting)"
NEW = "One layer is applied again and again, as often as each token needs."
COST = "O(t (l^2 d + l d^2)), t the steps that a token takes on average"
UNSURE = "a probability near the threshold falls on its other side where numbers are rounded: another number of steps"
SMALL = {"depth": 3}


class UniversalConfig(NamedTuple):
    """How the sides of the model are made."""

    dim: int
    depth: int
    heads: int
    hidden: int | None
    dropout: float
    norm: NormOrder
    halting: HaltingKind
    ponder: float
    transition: TransitionKind
    signal: StepSignalKind
    bias: float = 1.0
    window: int | None = None

    def embedding(self, vocab: int) -> TokenEmbedding:
        # positions are added at every step
        return TokenEmbedding(vocab, self.dim, scale=self.dim**0.5, dropout=self.dropout)

    def body(self, *, causal: bool, cross: bool) -> Layer:
        """The layer that is repeated, how often, and what comes after."""
        around = partial(branch, order=self.norm, norm=partial(nn.LayerNorm, self.dim), dropout=self.dropout)
        source = HaltedTokenSource() if self.halting != "fixed" else None
        seen = None if not causal else Causal() if self.window is None else Window(self.window)
        own = Attention(self.dim, self.heads, SoftmaxKernel(seen), source=source)
        asked = Attention(self.dim, self.heads, SoftmaxKernel(), source=CrossAttentionSource()) if cross else None
        block = UniversalBlock(
            around(own), around(self._work(causal=causal)), cross=None if asked is None else around(asked)
        )
        body = self._often(block, PositionStepSignal(SinusoidalPosition(self.dim), self._signals()))
        return body if self.norm == "post" else Chain(steps=body, norm=Pointwise(nn.LayerNorm(self.dim)))

    def _signals(self) -> StepSignal:
        if self.signal == "none":
            return NoStepSignal(self.dim)
        return SinusoidalStepSignal(self.dim) if self.signal == "sinusoid" else LearnedStepSignal(self.dim, self.depth)

    def _often(self, block: UniversalBlock, timing: PositionStepSignal) -> Layer:
        if self.halting == "fixed":
            return FixedSteps(block, timing, self.depth)
        rule = GravesHalting() if self.halting == "adaptive" else ReleasedHalting()
        return AdaptiveComputation(
            block, timing, HaltingUnit(self.dim, self.depth, rule=rule, cost=self.ponder, bias=self.bias)
        )

    def _work(self, *, causal: bool) -> Layer:
        if self.transition == "feedforward":
            return FeedForward(self.dim, self.hidden)
        hidden = 4 * self.dim if self.hidden is None else self.hidden
        first = SeparableConv(self.dim, hidden, 3, causal=causal)
        return Chain(first=first, relu=Pointwise(nn.ReLU()), second=SeparableConv(hidden, self.dim, 5, causal=causal))


@recipe(
    "Universal Transformer",
    paper=PAPER,
    summary=NEW,
    task="translation",
    causal=True,
    incremental_decoding=True,
    cross_attention=True,
    cost=COST,
    reasons={"bfloat16": UNSURE},
    tiny_keywords=SMALL,
)
def universal_transformer(
    vocab: int = 37000,
    source_vocab: int | None = None,
    dim: int = 512,
    depth: int = 6,
    heads: int = 8,
    ff_dim: int | None = None,
    dropout: float = 0.1,
    norm_order: NormOrder = "post",
    halting: HaltingKind = "adaptive",
    ponder_cost: float = 0.01,
    transition: TransitionKind = "feedforward",
    step_signal: StepSignalKind = "sinusoid",
    halting_bias: float = 1.0,
) -> EncoderDecoder:
    """One layer on either side, at most `depth` times; `ff_dim` is 4 dim unless given, all embeddings are one matrix.

    Section 2. The released base model is wider (1024), with signals of steps that are learned; its norms stand before
    the branches (`norm_order="pre"`). Sums that halt are Graves's, with a remainder at the last step;
    `halting="released"` does what Tensor2Tensor does. It allows 12 steps where a fixed model takes 6."""
    chosen = UniversalConfig(
        dim, depth, heads, ff_dim, dropout, norm_order, halting, ponder_cost, transition, step_signal, halting_bias
    )
    embed = chosen.embedding(vocab)
    embed_source = embed if source_vocab is None else chosen.embedding(source_vocab)
    encoder, decoder = chosen.body(causal=False, cross=False), chosen.body(causal=True, cross=True)
    return EncoderDecoder(embed_source, encoder, embed, decoder, ClassHead(dim, vocab, tied=embed.token))


@recipe(
    "Universal Transformer language model",
    paper=PAPER,
    summary=NEW,
    task="language-model",
    causal=True,
    incremental_decoding=True,
    cost=COST,
    reasons={"cross_attention": "a language model reads one sequence only", "bfloat16": UNSURE},
    tiny_keywords=SMALL,
)
def universal_transformer_lm(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 6,
    heads: int = 8,
    ff_dim: int | None = None,
    dropout: float = 0.0,
    norm_order: NormOrder = "post",
    halting: HaltingKind = "adaptive",
    ponder_cost: float = 0.01,
    transition: TransitionKind = "feedforward",
    step_signal: StepSignalKind = "sinusoid",
    halting_bias: float = 1.0,
    window: int | None = None,
) -> LanguageModel:
    """The decoder alone, as in the paper's experiments on LAMBADA (section 3.4); `ff_dim` is 4 dim unless given.

    With a `window`, what is further away is reached by more steps; with `step_signal="none"` steps that were never
    taken in training look like those that were."""
    chosen = UniversalConfig(
        dim,
        depth,
        heads,
        ff_dim,
        dropout,
        norm_order,
        halting,
        ponder_cost,
        transition,
        step_signal,
        halting_bias,
        window,
    )
    embed = chosen.embedding(vocab)
    return LanguageModel(embed, chosen.body(causal=True, cross=False), ClassHead(dim, vocab, tied=embed.token))


@recipe(
    "Universal Transformer classifier",
    paper=PAPER,
    summary=NEW,
    task="classification",
    cost=COST,
    reasons={
        "causal": "a label may depend on the whole text",
        "incremental_decoding": "a later token changes all earlier outputs, so nothing can be kept",
        "cross_attention": "it reads one sequence only",
        "bfloat16": UNSURE,
    },
    tiny_keywords=SMALL,
)
def universal_transformer_classifier(
    vocab: int = 8000,
    classes: int = 2,
    dim: int = 256,
    depth: int = 6,
    heads: int = 4,
    ff_dim: int | None = None,
    dropout: float = 0.1,
    norm_order: NormOrder = "post",
    halting: HaltingKind = "adaptive",
    ponder_cost: float = 0.01,
    transition: TransitionKind = "feedforward",
    step_signal: StepSignalKind = "sinusoid",
    halting_bias: float = 1.0,
) -> TextClassifier:
    """The encoder alone, with mean pooling and one projection; `ff_dim` is 4 dim unless given."""
    chosen = UniversalConfig(
        dim, depth, heads, ff_dim, dropout, norm_order, halting, ponder_cost, transition, step_signal, halting_bias
    )
    body = chosen.body(causal=False, cross=False)
    return TextClassifier(chosen.embedding(vocab), body, ClassHead(dim, classes, bias=True))
