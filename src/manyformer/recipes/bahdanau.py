"""RNNsearch: the recurrent encoder-decoder with attention that the Transformer replaced."""

import math
from typing import Annotated, Literal

import torch
from torch import nn

from manyformer.models import ClassHead, EncoderDecoder, TokenEmbedding
from manyformer.models.tasks.translation import TRANSLATION
from manyformer.nn.core import Layer
from manyformer.nn.recurrent.gru import AttendingGRU, BidirectionalGRU, FixedVectorGRU, ForwardGRU
from manyformer.recipes.parts.keywords import PositiveSize
from manyformer.recipes.parts.registry import recipe


@recipe(
    "Bahdanau",
    paper="Bahdanau et al. 2015, Neural Machine Translation by Jointly Learning to Align and Translate, "
    "arXiv:1409.0473",
    summary="Before each token the decoder attends to the source, instead of relying on one vector for all of it.",
    task=TRANSLATION,
    family="recurrent",
    constant_state=True,
    cost="O(l s d + (l + s) d^2), one token after the other",
    reasons={
        "heads": "one alignment reads the source",
        "one_graph": "a recurrent network takes one token after another",
    },
    tiny_keywords={"embedding_dim": 12, "align_dim": 10, "maxout": 14},
)
def bahdanau(
    vocab: int = 30000,
    source_vocab: int | None = None,
    dim: int = 1000,
    embedding_dim: Annotated[PositiveSize, "width of token embeddings"] = 620,
    align_dim: Annotated[PositiveSize, "width of the hidden layer that computes alignment scores"] = 1000,
    maxout: Annotated[PositiveSize, "number of maxout units before the output projection"] = 500,
    context: Annotated[
        Literal["attention", "fixed-vector"],
        "what the decoder reads of the source at each step: the tokens it attends to, or one vector for all of it",
    ] = "attention",
    dropout: float = 0.0,
) -> EncoderDecoder:
    """RNNsearch with the sizes of appendix B.1: `dim` units in the decoder and in either direction of the encoder.

    Differences: the target begins with a start token; gates and outputs have biases (left out of the paper's formulas);
    narrower models begin with larger weights (the paper's 0.01 at a width of 1000); alignment energies begin at unit
    scale instead of 0 (measured: from 0 alignments take many times as many steps to appear); and there may be
    `dropout`, of token embeddings and before the last projection.

    `context="fixed-vector"` is RNNencdec, the model that the paper compares with (section 4.2; Cho et al. 2014,
    arXiv:1406.1078): `dim` units in one direction of the encoder, whose last state the decoder reads at every step.
    `align_dim` is then without effect."""
    # a sum over dim inputs then has the scale that 0.01 gives it at the paper's width
    std_scale = math.sqrt(1000 / dim)

    def embedding(size: int) -> TokenEmbedding:
        return TokenEmbedding(size, embedding_dim, std=0.01 * std_scale, dropout=dropout)

    encoder: Layer
    decoder: Layer
    if context == "attention":
        encoder = BidirectionalGRU(embedding_dim, dim)
        # the annotation of a source token joins the states of both directions: 2 dim
        decoder = AttendingGRU(embedding_dim, dim, 2 * dim, align_dim=align_dim, out_dim=maxout, dropout=dropout)
    else:
        encoder = ForwardGRU(embedding_dim, dim)
        decoder = FixedVectorGRU(embedding_dim, dim, dim, out_dim=maxout, dropout=dropout)
    head = ClassHead(maxout, vocab, bias=True)
    for module in (encoder, decoder, head):
        init_rnnsearch(module, std=0.01 * std_scale)
    return EncoderDecoder(embedding(source_vocab or vocab), encoder, embedding(vocab), decoder, head)


def init_rnnsearch(module: nn.Module, *, std: float) -> None:
    """Initialize as in appendix B.1: recurrent matrices orthogonal, others N(0, std^2), scores at unit scale."""
    for name, weight in module.named_parameters():
        module_name = name.rpartition(".")[0]
        if weight.ndim == 1:
            nn.init.zeros_(weight)
        elif module_name.startswith("score."):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        elif module_name.endswith(("gates", "candidate")):
            # the matrices of the gates stand one below the other, and each is orthogonal by itself
            for square in torch.split(weight.data, weight.shape[1]):
                # torch has no decomposition of half precision
                square.copy_(nn.init.orthogonal_(square.to(torch.promote_types(square.dtype, torch.float32))))
        else:
            nn.init.normal_(weight, std=std)
