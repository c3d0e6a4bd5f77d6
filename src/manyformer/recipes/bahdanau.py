"""RNNsearch: the recurrent encoder-decoder with attention that the Transformer replaced."""

import math

import torch
from torch import nn

from manyformer.mixers import AttendingGRU, BidirectionalGRU
from manyformer.models import Embedding, EncoderDecoder, Head
from manyformer.recipes.registry import recipe


@recipe(
    "Bahdanau",
    paper="Bahdanau et al. 2015, Neural Machine Translation by Jointly Learning to Align and Translate, "
    "arXiv:1409.0473",
    new="Before each word the decoder looks for those of the source that matter, instead of remembering one vector.",
    task="translation",
    causal=True,
    streams=True,
    cross=True,
    cost="O(l s d + (l + s) d^2), one token after the other",
    small={"words": 12, "align": 10, "maxout": 14},
)
def bahdanau(
    vocab: int = 30000,
    source_vocab: int | None = None,
    dim: int = 1000,
    words: int = 620,
    align: int = 1000,
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

    def embedding(size: int) -> Embedding:
        return Embedding(size, words, std=0.01 * spread, dropout=dropout)

    encoder = BidirectionalGRU(words, dim)
    decoder = AttendingGRU(words, dim, 2 * dim, align=align, out=maxout, dropout=dropout)
    head = Head(maxout, vocab, bias=True)
    for part in (encoder, decoder, head):
        start(part, std=0.01 * spread)
    return EncoderDecoder(embedding(source_vocab or vocab), encoder, embedding(vocab), decoder, head)


def start(part: nn.Module, *, std: float) -> None:
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
