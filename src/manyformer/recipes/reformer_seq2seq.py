"""The Reformer as an encoder-decoder: reversible layers on both sides, three branches in each of the decoder's."""

from typing import Annotated, Literal

from manyformer.attention import Attention
from manyformer.core import Layer
from manyformer.kernels import LSHKernel, SoftmaxKernel
from manyformer.masks import Causal
from manyformer.models import EncoderDecoder
from manyformer.recipes.baselines import encoder_decoder
from manyformer.recipes.keywords import FeedForwardChunk, PositiveSize
from manyformer.recipes.reformer import PAPER, BucketCount
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import ResidualStreams
from manyformer.tasks.translation import TRANSLATION


@recipe(
    "Reformer, encoder-decoder",
    paper=PAPER,
    summary="Two residual streams on each side let inputs be recomputed from outputs, those of cross-attention too.",
    task=TRANSLATION,
    cost="O(l^2 d + l d^2) per layer; activation memory does not grow with depth",
    tiny_keywords={"num_buckets": 2, "chunk_length": 8},
)
def reformer_seq2seq(
    vocab: int = 37000,
    source_vocab: int | None = None,
    dim: int = 512,
    depth: int = 6,
    heads: int = 8,
    ff_dim: int | None = None,
    kernel: Annotated[
        Literal["softmax", "lsh"],
        "self-attention of both sides: to all tokens, as the paper translates, or to those of the same hash bucket",
    ] = "softmax",
    num_buckets: BucketCount = 16,
    chunk_length: Annotated[PositiveSize, "number of sorted tokens in a chunk of kernel=lsh"] = 32,
    num_hashes: Annotated[PositiveSize, "number of hash rounds of kernel=lsh"] = 4,
    residual_streams: ResidualStreams = "reversible",
    ff_chunk: FeedForwardChunk = None,
    dropout: float = 0.1,
) -> EncoderDecoder:
    """The reversible Transformer of sections 3 and 5, pre-norm: self-attention, cross-attention and feed-forward add to
    the two streams in turn, and the streams are averaged at the end of each side.

    The paper translates with full attention, because sentences are shorter than 128 tokens. With `kernel="lsh"` tokens
    attend to those of their hash bucket, in the encoder also in the next chunk; buckets of the decoder each begin a new
    chunk, as in `reformer-strict`, so that it decodes token by token. Cross-attention is always to all tokens, whose
    keys are not the queries."""

    def attention(number: int, *, causal: bool) -> Layer:
        if kernel == "softmax":
            return Attention(dim, heads, SoftmaxKernel(Causal() if causal else None))
        lsh = LSHKernel(
            num_buckets=num_buckets,
            chunk_length=chunk_length,
            num_hashes=num_hashes,
            chunks_after=0 if causal else 1,
            variant="strict" if causal else "published",
        )
        return Attention(dim, heads, lsh, bias=False)

    return encoder_decoder(
        *(vocab, source_vocab, dim, depth, heads, ff_dim, dropout, "pre"),
        make_encoder_attention=lambda number: attention(number, causal=False),
        make_decoder_attention=lambda number: attention(number, causal=True),
        streams=residual_streams,
        ff_chunk=ff_chunk,
    )
