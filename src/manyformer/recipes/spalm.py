"""SPALM: Transformer-XL that also attends to tokens retrieved by similar contexts from a datastore."""

from manyformer.models import LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.attention.kv_cache import SegmentMemorySource
from manyformer.nn.attention.neighbour_attention import NeighbourAttention
from manyformer.nn.core import Chain, Layer
from manyformer.nn.masks import Causal
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.parts.baselines import NormOrder
from manyformer.recipes.parts.keywords import ClampLength, MemoryLength
from manyformer.recipes.parts.registry import recipe
from manyformer.recipes.transformer_xl import BiasSharing, XLAttentionMaker, xl_model, xl_positions


@recipe(
    "SPALM",
    paper="Yogatama et al. 2021, Adaptive Semiparametric Language Models, TACL 9, arXiv:2102.02557",
    summary="A gate mixes, for each token, Transformer-XL with the tokens that followed similar contexts in a "
    "datastore.",
    task=LANGUAGE_MODELLING,
    family="memory",
    constant_state=True,
    cost="O(l (l + m) d + l d^2) per layer, m tokens of memory; k retrieved tokens cost O(l k d) once",
    reasons={"gradients": "the gate gets no gradient without retrieved tokens: neighbours come with the data"},
    # decoding step by step equals one pass as long as the memory holds all tokens
    tiny_keywords={"memory_length": 512},
)
def spalm(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 12,
    heads: int = 8,
    ff_dim: int | None = None,
    memory_length: MemoryLength = 512,
    clamp_length: ClampLength = None,
    bias_sharing: BiasSharing = "all-layers",
    dropout: float = 0.1,
    norm_order: NormOrder = "post",
) -> LanguageModel:
    """Transformer-XL (see `transformer_xl`) with a gate on its output; without retrieved tokens it is Transformer-XL.

    Retrieved tokens come with the data (`data.neighbours`, made by `manyformer datastore neighbours` with another,
    frozen model), as token ids: they are embedded by the model's own embedding, which is trained."""

    def attention(number: int, make_attention: XLAttentionMaker) -> Layer:
        return make_attention(SoftmaxKernel(Causal()), SegmentMemorySource(memory_length, dim))

    positions = xl_positions(dim, heads, clamp_length, bias_sharing, dropout)
    model = xl_model(vocab, dim, depth, heads, ff_dim, attention, positions, dropout, norm_order)
    assert isinstance(model.body, Chain)
    # behind the last layer: the gate mixes the output vector with a sum of embeddings of retrieved tokens
    model.body.add_module("recall", NeighbourAttention(dim))
    return model
