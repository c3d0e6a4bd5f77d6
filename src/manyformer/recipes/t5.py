"""T5: a pre-norm encoder-decoder whose only positions are learned biases of scores by distance."""

from functools import partial
from typing import Annotated, Literal

from torch import nn

from manyformer.base.errors import UserError
from manyformer.models import ClassHead, EncoderDecoder, TokenEmbedding
from manyformer.models.tasks.translation import TRANSLATION
from manyformer.nn.attention.attention import Attention
from manyformer.nn.attention.kv_cache import CrossAttentionSource
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.feedforward import FeedForward, GatedFeedForward
from manyformer.nn.masks import Causal, Mask
from manyformer.nn.positions import T5BiasPosition
from manyformer.nn.positions.distance_bias import BiasDirection
from manyformer.nn.runtime.length_norms import RMSNorm
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.parts.baselines import stack
from manyformer.recipes.parts.keywords import DecoderDepth, NormEps, PositiveSize
from manyformer.recipes.parts.registry import recipe


@recipe(
    "T5",
    paper="Raffel et al. 2020, Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer, "
    "arXiv:1910.10683",
    summary="Every task is a text for a text; positions are learned biases by distance, one table for all layers.",
    task=TRANSLATION,
    family="softmax",
    cost="O(l^2 d + l d^2) per layer",
    tiny_keywords={"head_dim": 6, "buckets": 8, "max_distance": 20},
)
def t5(
    vocab: int = 32128,
    dim: int = 768,
    depth: int = 12,
    heads: int = 12,
    head_dim: Annotated[PositiveSize, "width of queries, keys and values of a head, whatever dim / heads is"] = 64,
    ff_dim: int | None = None,
    activation: Annotated[
        Literal["relu", "gated-gelu"],
        "feed-forward layers of T5 (relu), or of T5 1.1, one projection the gate (gated-gelu)",
    ] = "relu",
    output: Annotated[
        Literal["tied", "tied-unscaled", "untied"],
        "the output projection is the embedding (tied, T5), the same without its scale, or another matrix (T5 1.1)",
    ] = "tied",
    buckets: Annotated[PositiveSize, "number of ranges of distances that have one bias each, a multiple of 4"] = 32,
    max_distance: Annotated[PositiveSize, "distance from which on all keys have the same bias"] = 128,
    dropout: float = 0.1,
    *,
    decoder_depth: DecoderDepth = None,
    norm_eps: NormEps = 1e-6,
) -> EncoderDecoder:
    """Base of section 3.1.1 by default; T5 1.1 is `activation="gated-gelu"`, `output="untied"`, `ff_dim=2048`.

    Sections 2.1 and 3.1: RMS norms before branches, no biases of projections, unscaled scores of queries that begin
    smaller, one table of biases by distance for each side and none between them. `ff_dim` is 4 dim unless given. The
    tied output is scaled by dim^-0.5, here by an embedding that is stored scaled and scaled back where it comes in;
    "tied-unscaled" is what `transformers` makes of T5 1.1 from version 5 on.
    Differences: dropout applies to embeddings and branch outputs, in the paper also inside branches and after the last
    norms; the target begins with a start token instead of padding; and span corruption, the paper's pretraining, is no
    task here."""
    if buckets % 4 or max_distance <= buckets // 2:
        raise UserError(
            f"buckets ({buckets}) must be a multiple of 4, and max_distance ({max_distance}) above half of them, the "
            "distances that have a bucket each"
        )
    hidden = 4 * dim if ff_dim is None else ff_dim

    def attention(mask: Mask | None, position: T5BiasPosition | None, source: CrossAttentionSource | None) -> Attention:
        # no 1 / sqrt(e): the initialization of queries has it (see init_t5)
        kernel = SoftmaxKernel(mask, scale=1.0)
        return Attention(
            dim, heads, kernel, head_dim=head_dim, value_dim=head_dim, position=position, source=source, bias=False
        )

    def feed_forward() -> Layer:
        if activation == "relu":
            return FeedForward(dim, hidden, bias=False)
        return GatedFeedForward(dim, hidden, activation=nn.GELU(approximate="tanh"))

    def side(direction: BiasDirection) -> Layer:
        # one module for all layers of a side: they share its table
        position = T5BiasPosition(heads, buckets=buckets, max_distance=max_distance, direction=direction)
        nn.init.normal_(position.weight, std=dim**-0.5)
        is_decoder = direction == "past"

        def layer(number: int) -> dict[str, Layer]:
            if is_decoder:
                cross = {"cross": attention(None, None, CrossAttentionSource())}
            else:
                cross = {}
            return {
                "attention": attention(Causal() if is_decoder else None, position, None),
                **cross,
                "ff": feed_forward(),
            }

        layers = (decoder_depth or depth) if is_decoder else depth
        return stack(layers, layer, order="pre", norm=partial(RMSNorm, dim, eps=norm_eps), dropout=dropout)

    # encoder first: the order in which weights are drawn
    encoder = side("both")
    decoder = side("past")
    for part in (encoder, decoder):
        init_t5(part, head_dim)
    # stored at dim^-0.5 of the released embedding, so that the tied output needs no factor of its own
    scale = 1.0 if output == "tied-unscaled" else dim**0.5
    embed = TokenEmbedding(vocab, dim, scale=scale, std=dim**-0.5, dropout=dropout)
    head = ClassHead(dim, vocab, tied=None if output == "untied" else embed.token)
    if output == "untied":
        nn.init.normal_(head.weight, std=dim**-0.5)
    return EncoderDecoder(embed, encoder, embed, decoder, head)


def init_t5(side: nn.Module, head_dim: int) -> None:
    """Draw each matrix from N(0, 1 / inputs), those of queries with 1 / (inputs head_dim): scores are unscaled."""
    for name, module in side.named_modules():
        if isinstance(module, nn.Linear):
            inputs = module.in_features * (head_dim if name.endswith("q_proj") else 1)
            nn.init.normal_(module.weight, std=inputs**-0.5)
