"""The linear Transformer: a language model whose attention is computed as a recurrent memory."""

from typing import Annotated, Literal

from manyformer.models import LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.linear import DPFPFeatures, EluPlusOneFeatures
from manyformer.nn.linear.linear_kernel import LinearKernel
from manyformer.nn.linear.memory_rules import DeltaRule
from manyformer.nn.masks import Causal
from manyformer.recipes.parts.baselines import NormOrder, attention_layers, language_model, sinusoidal_embedding
from manyformer.recipes.parts.registry import recipe


@recipe(
    "Linear Transformer",
    paper="Katharopoulos et al. 2020, Transformers are RNNs, arXiv:2006.16236; Schlag et al. 2021, arXiv:2102.11174",
    summary="Feature maps replace exp(q.k), so key-value sums are shared: linear training, decoding with a state of "
    "fixed size.",
    task=LANGUAGE_MODELLING,
    family="linear",
    constant_state=True,
    cost="O(l d^2) per layer; O(d^2) per generated token, at any length",
    reasons={"attention_dropout": "keys and values are summed before any weight exists"},
)
def linear_transformer(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    ff_dim: int | None = None,
    dropout: float = 0.0,
    norm_order: NormOrder = "pre",
    update_rule: Annotated[
        Literal["sum", "delta"], "how a token updates the recurrent memory: summed (sum), or by the delta rule (delta)"
    ] = "sum",
) -> LanguageModel:
    """elu(x) + 1 as features; sinusoids, else as `transformer-lm`, where the paper's models are post-norm.

    Section 3. `update_rule="delta"` is the fast-weight programmer of Schlag et al. (2021, section 4.2): a token
    replaces the value that the memory returns for its key, and features are DPFP, products of neighboring channels.
    What it loses against softmax depends on the frame as well: 0.19 nats with learned positions, 0.08 with sinusoids,
    in a small model of tinyshakespeare (one seed)."""

    def kernel(number: int) -> LinearKernel:
        if update_rule == "delta":
            # a value is replaced at its key alone if features hardly overlap, as the sparse ones of DPFP
            return LinearKernel(DPFPFeatures(), Causal(), rule=DeltaRule())
        # y_i = phi(q_i)^T S_i / phi(q_i)^T z_i with sums S and z over the past (section 3.4)
        return LinearKernel(EluPlusOneFeatures(), Causal())

    embed = sinusoidal_embedding(vocab, dim, dropout=dropout)
    layer = attention_layers(dim, heads, ff_dim, kernel)
    return language_model(embed, depth, layer, dropout=dropout, norm_order=norm_order)
