"""A recurrent policy, the baseline of policies with attention."""

from manyformer.core import Chain
from manyformer.mixers.lstm import LSTM
from manyformer.models import PolicyModel
from manyformer.models.observation_embedding import ObservationEmbedding
from manyformer.recipes.gtrxl import TINY_POLICY
from manyformer.recipes.keywords import ActionCount, ContinuousActions, ObservationShape, PreviousInputs
from manyformer.recipes.registry import recipe
from manyformer.spaces import parse_observations
from manyformer.tasks.policy import POLICY


@recipe(
    "LSTM policy",
    paper="Hochreiter and Schmidhuber 1997, Long Short-Term Memory, Neural Computation 9(8)",
    summary="A recurrent policy with the inputs and heads of the gated Transformer-XL, to compare with.",
    task=POLICY,
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
    body = Chain(**{str(number): LSTM(dim) for number in range(depth)})
    return PolicyModel(embed, body, actions, continuous=continuous)
