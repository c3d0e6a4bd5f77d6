"""The Forgetting Transformer: a decoder whose heads decay their attention by learned gates, without positions."""

from manyformer.models import LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.attention.attention import Attention
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.feedforward import GatedFeedForward
from manyformer.nn.softmax.forgetting_kernel import ForgettingKernel
from manyformer.recipes.parts.baselines import NormOrder, check_heads, rms_decoder
from manyformer.recipes.parts.registry import recipe


@recipe(
    "Forgetting Transformer",
    paper="Lin et al. 2025, Forgetting Transformer: Softmax Attention with a Forget Gate, arXiv:2503.02130",
    summary="A forget gate for each token and head makes attention decay by content, which replaces positions.",
    task=LANGUAGE_MODELLING,
    family="softmax",
    cost="O(l^2 d + l d^2) per layer",
    reasons={"attention_dropout": "gates change the weights of softmax in a kernel of its own"},
)
def fox(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    kv_heads: int | None = None,
    ff_dim: int | None = None,
    dropout: float = 0.0,
    norm_order: NormOrder = "pre",
) -> LanguageModel:
    """FoX in the paper's first block, that of Llama: RMSNorm, SwiGLU, no biases, and gates instead of rotary positions.

    Section 3. The "Pro" block, which adds a norm of queries and keys, an output gate and a shift of keys and values, is
    not built. `ff_dim` is 8/3 dim unless given."""
    check_heads(dim, heads)

    def layer(number: int) -> dict[str, Layer]:
        # adds the logarithms of all gates between query and key to their score, like ALiBi with learned slopes
        kernel = ForgettingKernel(dim, kv_heads or heads)
        return {
            "attention": Attention(dim, heads, kernel, kv_heads=kv_heads, bias=False),
            "ff": GatedFeedForward(dim, ff_dim),
        }

    return rms_decoder(vocab, dim, depth, layer, dropout=dropout, norm_order=norm_order, norm_eps=None)
