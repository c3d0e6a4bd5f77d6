"""Longformer: window attention with a few global tokens, as an encoder and as a language model."""

from functools import partial
from typing import Annotated, Literal

from torch import nn

from manyformer.base.errors import UserError
from manyformer.models import ClassHead, LanguageModel, MaskedLM, TokenEmbedding
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.models.tasks.masked_language_modelling import MASKED_LM
from manyformer.nn.attention.attention import Attention
from manyformer.nn.attention.global_local import GlobalLocalAttention
from manyformer.nn.core import Layer
from manyformer.nn.masks import FirstTokens, Mask, PerHead, Window, WithRole, growing_windows, symmetric_window
from manyformer.nn.positions import RotaryPosition
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.bert import masked_encoder
from manyformer.recipes.parts.baselines import attention_layers, gelu_layers, init_std, scale_residual_init, stack
from manyformer.recipes.parts.keywords import NormEps, PositiveSize, SentenceTypeCount, WindowOnEachSide
from manyformer.recipes.parts.registry import recipe
from manyformer.recipes.transformer_xl import xl_positions

PAPER = "Beltagy et al. 2020, Longformer: The Long-Document Transformer, arXiv:2004.05150"


@recipe(
    "Longformer",
    paper=PAPER,
    summary="Window attention, and a few global tokens that attend to all and are attended to by all, with their own "
    "projections.",
    task=MASKED_LM,
    family="sparse",
    cost="O(l (w + g) d + l d^2) per layer",
    tiny_keywords={"window": 3, "global_tokens": 2},
)
def longformer(
    vocab: int = 50265,
    dim: int = 768,
    depth: int = 12,
    heads: int = 12,
    ff_dim: int | None = None,
    max_length: int = 4096,
    window: WindowOnEachSide = 256,
    global_tokens: Annotated[
        PositiveSize | None,
        "number of tokens at the start of a document that attend globally; null means only those that a call marks",
    ] = 1,
    sentence_types: SentenceTypeCount = None,
    dropout: float = 0.1,
    norm_eps: NormEps = 1e-12,
) -> MaskedLM:
    """An encoder like `bert` with attention to `window` positions on each side; the first `global_tokens` are global.

    Sections 3.1 and 5; the paper's "window size 512" is 256 on each side. The task decides which tokens are global: for
    classification the first one; a call can mark others by their roles, such as those of a question. Weights are not
    copied from RoBERTa, whose `norm_eps` of 1e-5 the released models have."""
    global_mask = WithRole() if global_tokens is None else FirstTokens(global_tokens) | WithRole()

    # kept until all weights are drawn: projections of global tokens begin as copies of the others (section 5)
    layers: list[GlobalLocalAttention] = []

    def attention(number: int) -> Layer:
        layers.append(GlobalLocalAttention(dim, heads, symmetric_window(window), global_mask))
        return layers[-1]

    model = masked_encoder(
        vocab,
        dim,
        depth,
        heads,
        ff_dim,
        dropout,
        max_length=max_length,
        sentence_types=sentence_types,
        make_attention=attention,
        norm_eps=norm_eps,
    )
    for layer in layers:
        # the encoder has drawn all matrices anew
        layer.copy_projections()
    return model


@recipe(
    "Longformer language model",
    paper=PAPER,
    summary="Windows that grow from the lowest layer to the topmost, some heads dilated: long context at linear cost.",
    task=LANGUAGE_MODELLING,
    family="sparse",
    constant_state=True,
    cost="O(l w d + l d^2) per layer",
    tiny_keywords={"window": 3, "top_window": 5, "dilated_heads": 1, "depth": 3},
)
def longformer_lm(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 12,
    heads: int = 8,
    ff_dim: int | None = None,
    window: Annotated[
        PositiveSize, "number of positions in the attention window of the lowest layer: a token and those before it"
    ] = 64,
    top_window: Annotated[
        PositiveSize | None, "window of the topmost layer, interpolated from the lowest; null means the same"
    ] = 512,
    dilated_heads: Annotated[
        PositiveSize | None, "number of heads with a dilated window, in the upper half of the layers"
    ] = 2,
    dropout: float = 0.2,
    position: Annotated[
        Literal["rotary", "transformer-xl"],
        "rotated queries and keys, or the paper's projected sinusoids of distances in the scores, which cost more",
    ] = "rotary",
) -> LanguageModel:
    """Causal windows from `window` tokens in the lowest layer to `top_window` in the highest, sections 3.1 and 4.1.

    In the upper half of the layers, `dilated_heads` heads attend to every second, third, and at the top every fourth
    position (appendix A). The paper trains in stages, with windows and sequences twice as long in each: windows are not
    weights, so a run with larger ones can `init_from` one with smaller. Positions are rotary unless `position` is
    "transformer-xl", as in the paper: its scores are products of each query with a vector for each distance."""
    if dilated_heads is not None and dilated_heads > heads:
        raise UserError(f"dilated_heads ({dilated_heads}) must be at most heads ({heads})")
    # low layers collect local detail and high ones combine it: the paper's ablation (table 4)
    window_of_layer = growing_windows(depth, window, window if top_window is None else top_window)
    std = init_std(dim)

    def kernel(number: int) -> SoftmaxKernel:
        return SoftmaxKernel(layer_mask(window_of_layer(number), number, depth, dilated_heads or 0))

    if position == "rotary":
        layer = attention_layers(dim, heads, ff_dim, kernel, position=RotaryPosition(dim // heads))
    else:
        make_position = xl_positions(dim, heads, None, "all-layers", dropout)
        layer = gelu_layers(
            dim,
            ff_dim,
            lambda number: Attention(dim, heads, kernel(number), position=make_position(), bias=False),
        )
    body = stack(depth, layer, order="pre", norm=partial(nn.LayerNorm, dim), dropout=dropout)
    embed = TokenEmbedding(vocab, dim, std=std, dropout=dropout)
    scale_residual_init(body, depth, std=std)
    return LanguageModel(embed, body, ClassHead(dim, vocab, tied=embed.token))


def layer_mask(size: int, number: int, depth: int, dilated_heads: int) -> Mask:
    """The mask of a layer: in the three thirds of the upper half `dilated_heads` heads have dilation 2, 3 and 4."""
    layers_above_middle = number - depth // 2
    if layers_above_middle < 0 or not dilated_heads:
        return Window(size)
    # the number of positions left out between two that are seen: 1, 2 and 3 from the middle to the top
    gaps = 1 + 3 * layers_above_middle // (depth - depth // 2)
    return PerHead(dict.fromkeys(range(dilated_heads), Window(size, dilation=gaps + 1)), default=Window(size))
