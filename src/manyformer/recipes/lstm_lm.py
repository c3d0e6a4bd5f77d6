"""A recurrent language model, the floor of language models with attention."""

from manyformer.mixers.lstm import LSTM
from manyformer.models import LanguageModel, TokenEmbedding
from manyformer.recipes.baselines import language_model
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import init_std
from manyformer.tasks.language_modelling import LANGUAGE_MODELLING


@recipe(
    "LSTM language model",
    paper="Hochreiter and Schmidhuber 1997, Long Short-Term Memory, Neural Computation 9(8)",
    summary="A recurrent language model without attention, to compare with.",
    task=LANGUAGE_MODELLING,
    cost="O(l d^2) per layer, one step after another; O(d^2) per generated token, at any length",
    reasons={
        "heads": "it has no attention",
        "attention_maps": "it has no attention",
    },
)
def lstm_lm(vocab: int = 256, dim: int = 512, depth: int = 2, dropout: float = 0.0) -> LanguageModel:
    """Layers of long short-term memory with forget gates, whose biases begin at 1; the embedding is tied to the output.

    As in `transformer-lm`, each layer is a residual branch behind a layer norm, which the first recurrent language
    models did not have. There are no positions."""
    embed = TokenEmbedding(vocab, dim, std=init_std(dim), dropout=dropout)
    return language_model(embed, depth, lambda number: {"mixer": LSTM(dim)}, dropout=dropout)
