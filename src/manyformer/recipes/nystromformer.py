"""Nystroemformer: an encoder whose attention matrix is rebuilt from the means of neighboring tokens."""

from typing import Annotated

from manyformer.models import MaskedLM
from manyformer.models.tasks.masked_language_modelling import MASKED_LM
from manyformer.nn.low_rank.nystrom_kernel import NystromKernel
from manyformer.recipes.parts.baselines import NormOrder, attention_layers, learned_embedding, masked_lm
from manyformer.recipes.parts.keywords import PositiveSize
from manyformer.recipes.parts.registry import recipe


@recipe(
    "Nystroemformer",
    paper="Xiong et al. 2021, Nystroemformer: A Nystroem-Based Algorithm for Approximating Self-Attention, "
    "arXiv:2102.03902",
    summary="Means of neighbouring tokens are landmarks, from which the whole attention matrix is rebuilt.",
    task=MASKED_LM,
    family="low-rank",
    cost="O(l landmarks d + landmarks^3 + l d^2) per layer",
    reasons={
        "causal": "landmarks are means of all tokens, so later ones cannot be masked",
        "attention_dropout": "landmarks approximate the weights of softmax",
        "convex_weights": "the inverse of the landmarks' matrix has entries of any sign",
        "pair_weights": "weights are those of tokens and landmarks",
    },
    tiny_keywords={"landmarks": 6, "inverse_steps": 8, "convolution": 3},
)
def nystromformer(
    vocab: int = 30522,
    dim: int = 768,
    depth: int = 12,
    heads: int = 12,
    ff_dim: int | None = None,
    max_length: int = 512,
    landmarks: Annotated[PositiveSize, "number of landmarks, the means of as many runs of tokens"] = 64,
    inverse_steps: Annotated[PositiveSize, "steps of the iteration that inverts the landmarks' matrix"] = 6,
    convolution: Annotated[
        PositiveSize | None, "odd number of neighbouring values added with learned weights; null means none"
    ] = 33,
    dropout: float = 0.1,
    norm_order: NormOrder = "post",
) -> MaskedLM:
    """`bert` with Nystroem attention; a document of at most `landmarks` tokens has plain softmax. Sections 3 and 5.

    Each document has its own landmarks, of its tokens alone, so that padding and packing change nothing."""

    def kernel(number: int) -> NystromKernel:
        # softmax(Q K'^T) (softmax(Q' K'^T))^+ softmax(Q' K^T) V with landmarks Q', K' and an iterated inverse
        return NystromKernel(heads, landmarks, iterations=inverse_steps, convolution=convolution)

    embed = learned_embedding(vocab, dim, max_length, dropout=dropout)
    layer = attention_layers(dim, heads, ff_dim, kernel)
    return masked_lm(embed, depth, layer, dropout=dropout, norm_order=norm_order)
