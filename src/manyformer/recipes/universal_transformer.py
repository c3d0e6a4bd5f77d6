"""The Universal Transformer: one layer, again and again, for as long as each token needs."""

from functools import partial
from typing import Literal, NamedTuple

from torch import nn

from manyformer.attention import Attention
from manyformer.core import Chain, Layer, Pointwise
from manyformer.depth import Adaptive, Block, Graves, Halting, Released, Repeated
from manyformer.feedforward import FeedForward
from manyformer.kernels import Softmax
from manyformer.masks import Causal, Window
from manyformer.mixers import SeparableConv
from manyformer.models import Classifier, Embedding, EncoderDecoder, Head, LanguageModel
from manyformer.position import LearnedSteps, NoSteps, Sinusoid, SinusoidSteps, Steps, Timing
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import NormOrder, branch
from manyformer.sources import Encoded, Still

Halts = Literal["adaptive", "released", "fixed"]
Transition = Literal["feedforward", "convolution"]
Signal = Literal["sinusoid", "learned", "none"]

PAPER = "Dehghani et al. 2019, Universal Transformers, arXiv:1807.03819; Graves 2016, arXiv:1603.08983 (halting)"
NEW = "One layer is applied again and again, as often as each token needs."
COST = "O(t (l^2 d + l d^2)), t the steps that a token takes on average"
UNSURE = "a probability near the threshold falls on its other side where numbers are rounded: another number of steps"
SMALL = {"depth": 3}


class Choices(NamedTuple):
    """How the sides of the model are made."""

    dim: int
    depth: int
    heads: int
    hidden: int | None
    dropout: float
    norm: NormOrder
    halting: Halts
    ponder: float
    transition: Transition
    signal: Signal
    bias: float = 1.0
    window: int | None = None

    def embedding(self, vocab: int) -> Embedding:
        # positions are added at every step
        return Embedding(vocab, self.dim, scale=self.dim**0.5, dropout=self.dropout)

    def body(self, *, causal: bool, cross: bool) -> Layer:
        """The layer that is repeated, how often, and what comes after."""
        around = partial(branch, order=self.norm, norm=partial(nn.LayerNorm, self.dim), dropout=self.dropout)
        source = Still() if self.halting != "fixed" else None
        seen = None if not causal else Causal() if self.window is None else Window(self.window)
        own = Attention(self.dim, self.heads, Softmax(seen), source=source)
        asked = Attention(self.dim, self.heads, Softmax(), source=Encoded()) if cross else None
        block = Block(around(own), around(self._work(causal=causal)), cross=None if asked is None else around(asked))
        body = self._often(block, Timing(Sinusoid(self.dim), self._signals()))
        return body if self.norm == "post" else Chain(steps=body, norm=Pointwise(nn.LayerNorm(self.dim)))

    def _signals(self) -> Steps:
        if self.signal == "none":
            return NoSteps(self.dim)
        return SinusoidSteps(self.dim) if self.signal == "sinusoid" else LearnedSteps(self.dim, self.depth)

    def _often(self, block: Block, timing: Timing) -> Layer:
        if self.halting == "fixed":
            return Repeated(block, timing, self.depth)
        rule = Graves() if self.halting == "adaptive" else Released()
        return Adaptive(block, timing, Halting(self.dim, self.depth, rule=rule, cost=self.ponder, bias=self.bias))

    def _work(self, *, causal: bool) -> Layer:
        if self.transition == "feedforward":
            return FeedForward(self.dim, self.hidden)
        hidden = 4 * self.dim if self.hidden is None else self.hidden
        first = SeparableConv(self.dim, hidden, 3, causal=causal)
        return Chain(first=first, relu=Pointwise(nn.ReLU()), second=SeparableConv(hidden, self.dim, 5, causal=causal))


@recipe(
    "Universal Transformer",
    paper=PAPER,
    new=NEW,
    task="translation",
    causal=True,
    streams=True,
    cross=True,
    cost=COST,
    because={"bfloat16": UNSURE},
    small=SMALL,
)
def universal_transformer(
    vocab: int = 37000,
    source_vocab: int | None = None,
    dim: int = 512,
    depth: int = 6,
    heads: int = 8,
    hidden: int | None = None,
    dropout: float = 0.1,
    norm: NormOrder = "post",
    halting: Halts = "adaptive",
    ponder: float = 0.01,
    transition: Transition = "feedforward",
    signal: Signal = "sinusoid",
    bias: float = 1.0,
) -> EncoderDecoder:
    """One layer on either side, at most `depth` times; `hidden` is 4 dim unless given, all embeddings are one matrix.

    Section 2. The released base model is wider (1024), with signals of steps that are learned; its norms stand before
    the branches (`norm="pre"`). Sums that halt are Graves's, with a remainder at the last step; `halting="released"`
    does what Tensor2Tensor does. It allows 12 steps where a fixed model takes 6.
    """
    chosen = Choices(dim, depth, heads, hidden, dropout, norm, halting, ponder, transition, signal, bias)
    embed = chosen.embedding(vocab)
    embed_source = embed if source_vocab is None else chosen.embedding(source_vocab)
    encoder, decoder = chosen.body(causal=False, cross=False), chosen.body(causal=True, cross=True)
    return EncoderDecoder(embed_source, encoder, embed, decoder, Head(dim, vocab, tied=embed.token))


@recipe(
    "Universal Transformer language model",
    paper=PAPER,
    new=NEW,
    task="language-model",
    causal=True,
    streams=True,
    cost=COST,
    because={"cross": "a language model reads one sequence only", "bfloat16": UNSURE},
    small=SMALL,
)
def universal_transformer_lm(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 6,
    heads: int = 8,
    hidden: int | None = None,
    dropout: float = 0.0,
    norm: NormOrder = "post",
    halting: Halts = "adaptive",
    ponder: float = 0.01,
    transition: Transition = "feedforward",
    signal: Signal = "sinusoid",
    bias: float = 1.0,
    window: int | None = None,
) -> LanguageModel:
    """The decoder alone, as in the paper's experiments on LAMBADA (section 3.4); `hidden` is 4 dim unless given.

    With a `window`, what is further away is reached by more steps; with `signal="none"` steps that were never taken
    in training look like those that were.
    """
    chosen = Choices(dim, depth, heads, hidden, dropout, norm, halting, ponder, transition, signal, bias, window)
    embed = chosen.embedding(vocab)
    return LanguageModel(embed, chosen.body(causal=True, cross=False), Head(dim, vocab, tied=embed.token))


@recipe(
    "Universal Transformer classifier",
    paper=PAPER,
    new=NEW,
    task="classification",
    cost=COST,
    because={
        "causal": "a label may depend on the whole text",
        "streams": "a later token changes all earlier outputs, so nothing can be kept",
        "cross": "it reads one sequence only",
        "bfloat16": UNSURE,
    },
    small=SMALL,
)
def universal_transformer_classifier(
    vocab: int = 8000,
    classes: int = 2,
    dim: int = 256,
    depth: int = 6,
    heads: int = 4,
    hidden: int | None = None,
    dropout: float = 0.1,
    norm: NormOrder = "post",
    halting: Halts = "adaptive",
    ponder: float = 0.01,
    transition: Transition = "feedforward",
    signal: Signal = "sinusoid",
    bias: float = 1.0,
) -> Classifier:
    """The encoder alone, with mean pooling and one projection; `hidden` is 4 dim unless given."""
    chosen = Choices(dim, depth, heads, hidden, dropout, norm, halting, ponder, transition, signal, bias)
    body = chosen.body(causal=False, cross=False)
    return Classifier(chosen.embedding(vocab), body, Head(dim, classes, bias=True))
