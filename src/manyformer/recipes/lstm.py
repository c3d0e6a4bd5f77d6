"""Long short-term memory: a recurrent language model and a recurrent policy, the baselines of those with attention."""

from manyformer.base.spaces import parse_observations
from manyformer.models import LanguageModel, PolicyModel, TokenEmbedding
from manyformer.models.observation_embedding import ObservationEmbedding
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.models.tasks.policy import POLICY
from manyformer.nn.core import Chain
from manyformer.nn.recurrent.lstm import LSTM
from manyformer.recipes.gtrxl import TINY_POLICY
from manyformer.recipes.parts.baselines import init_std, language_model
from manyformer.recipes.parts.keywords import ActionCount, ContinuousActions, ObservationShape, PreviousInputs
from manyformer.recipes.parts.registry import recipe


@recipe(
    "LSTM language model",
    paper="Hochreiter and Schmidhuber 1997, Long Short-Term Memory, Neural Computation 9(8)",
    summary="A recurrent language model without attention, to compare with.",
    task=LANGUAGE_MODELLING,
    family="recurrent",
    constant_state=True,
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
    # no positions: the order of tokens is that in which the cells read them
    embed = TokenEmbedding(vocab, dim, std=init_std(dim), dropout=dropout)
    return language_model(embed, depth, lambda number: {"mixer": LSTM(dim)}, dropout=dropout)


@recipe(
    "LSTM policy",
    paper="Hochreiter and Schmidhuber 1997, Long Short-Term Memory, Neural Computation 9(8)",
    summary="A recurrent policy with the inputs and heads of the gated Transformer-XL, to compare with.",
    task=POLICY,
    family="recurrent",
    constant_state=True,
    cost="O(l d^2) per layer, one step after another",
    reasons={
        "heads": "it has no attention",
        "one_graph": "a recurrent network takes one token after another",
    },
    tiny_keywords=TINY_POLICY,
)
def lstm_policy(
    observations: ObservationShape = 8,
    actions: ActionCount = 4,
    dim: int = 256,
    depth: int = 1,
    *,
    continuous: ContinuousActions = False,
    previous_inputs: PreviousInputs = True,
) -> PolicyModel:
    """Layers of long short-term memory with forget gates, whose biases begin at 1, without residual sums or norms.

    Each learns from whole rollouts, from the state that it had at their first step, and forgets where an episode ends.
    """
    space = parse_observations(observations)
    embed = ObservationEmbedding(space, dim, actions=actions, continuous=continuous, previous_inputs=previous_inputs)
    # bare layers: gradients pass through the memory cells alone, as in recurrent policies before attention
    body = Chain(**{str(number): LSTM(dim) for number in range(depth)})
    return PolicyModel(embed, body, actions, continuous=continuous)
