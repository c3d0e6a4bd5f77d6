"""RNNsearch: the recurrent encoder-decoder with attention that the Transformer replaced."""

import math

import torch
from torch import nn

from manyformer.mixers import AttendingGRU, BidirectionalGRU
from manyformer.models import ClassHead, EncoderDecoder, TokenEmbedding
from manyformer.recipes.registry import recipe


@recipe(
    "Bahdanau",
    paper="Bahdanau et al. 2015, Neural Machine Translation by Jointly Learning to Align and Translate, "
    "arXiv:1409.0473",
    summary="Before each word the decoder looks for those of the source that matter, instead of remembering one vector.",
    task="translation",
    causal=True,
    incremental_decoding=True,
    cross_attention=True,
    cost="O(l s d + (l + s) d^2), one token after the other",
    tiny_keywords={"embedding_dim": 12, "align_dim": 10, "maxout": 14},
)
def bahdanau(
    vocab: int = 30000,
    source_vocab: int | None = None,
    dim: int = 1000,
    embedding_dim: int = 620,
    align_dim: int = 1000,
    maxout: int = 500,
    dropout: float = 0.0,
) -> EncoderDecoder:
    """RNNsearch with the sizes of appendix B.1: `dim` units in the decoder and in either direction of the encoder.

    Differences: one more token than words begins the target, gates and outputs have biases (left out of the paper's
    formulas), narrower models begin with larger weights (the paper's 0.01 at a width of 1000), alignments begin with
    energies of ordinary size instead of 0 (measured: from 0 they are found many times later), and there may be
    `dropout`, of word vectors and before the last projection.
    """
    spread = math.sqrt(1000 / dim)

    def embedding(size: int) -> TokenEmbedding:
        return TokenEmbedding(size, embedding_dim, std=0.01 * spread, dropout=dropout)

    encoder = BidirectionalGRU(embedding_dim, dim)
    decoder = AttendingGRU(embedding_dim, dim, 2 * dim, align=align_dim, out=maxout, dropout=dropout)
    head = ClassHead(maxout, vocab, bias=True)
    for part in (encoder, decoder, head):
        init_rnnsearch(part, std=0.01 * spread)
    return EncoderDecoder(embedding(source_vocab or vocab), encoder, embedding(vocab), decoder, head)


def init_rnnsearch(part: nn.Module, *, std: float) -> None:
    """Appendix B.1: orthogonal where states become states, N(0, std^2) elsewhere; of size 1 what scores give."""
    for name, weight in part.named_parameters():
        last = name.rpartition(".")[0]
        if weight.ndim == 1:
            nn.init.zeros_(weight)
        elif last.startswith("score."):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        elif last.endswith(("gates", "candidate")):
            for square in torch.split(weight.data, weight.shape[1]):
                nn.init.orthogonal_(square)
        else:
            nn.init.normal_(weight, std=std)
