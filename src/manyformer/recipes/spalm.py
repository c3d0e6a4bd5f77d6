"""SPALM: Transformer-XL that also attends to what followed like contexts in a text that it looks into."""

from manyformer.core import Chain, Layer
from manyformer.kernels import Softmax
from manyformer.masks import Causal
from manyformer.mixers import Recall
from manyformer.models import LanguageModel
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import NormOrder
from manyformer.recipes.transformer_xl import Biases, Parts, xl_model, xl_positions
from manyformer.sources import Remembered


@recipe(
    "SPALM",
    paper="Yogatama et al. 2021, Adaptive Semiparametric Language Models, TACL 9, arXiv:2102.02557",
    new="A gate decides for each token between Transformer-XL and the tokens that followed like contexts elsewhere.",
    task="language-model",
    causal=True,
    streams=True,
    cost="O(l (l + m) d + l d^2) per layer, m tokens remembered; k looked-up tokens cost O(l k d) once",
    because={
        "cross": "a language model reads one sequence only",
        "gradients": "the gate is idle where nothing was looked up: neighbours come with the data",
    },
    # streaming is one pass as long as the memory holds everything
    small={"remembered": 512},
)
def spalm(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 12,
    heads: int = 8,
    hidden: int | None = None,
    remembered: int = 512,
    clamp: int | None = None,
    biases: Biases = "shared",
    dropout: float = 0.1,
    norm: NormOrder = "post",
) -> LanguageModel:
    """Transformer-XL (see `transformer_xl`) whose output passes the gate; with nothing looked up it is Transformer-XL.

    What is looked up comes with the data (`data.neighbours`, made by `manyformer datastore neighbours` with a model
    that is trained before and stays as it is), as token numbers: their embeddings are the model's own, and learn.
    """

    def attention(parts: Parts) -> Layer:
        return parts.attention(Softmax(Causal()), Remembered(remembered, dim))

    positions = xl_positions(dim, heads, clamp, biases, dropout)
    model = xl_model(vocab, dim, depth, heads, hidden, attention, positions, dropout, norm)
    assert isinstance(model.body, Chain)
    model.body.add_module("recall", Recall(dim))
    return model
