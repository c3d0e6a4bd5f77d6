"""The Decision Transformer: actions that follow from a return to reach."""

from functools import partial
from typing import Annotated, Any

from torch import nn

from manyformer.base.errors import UserError
from manyformer.models import ClassHead, DecisionTransformer
from manyformer.models.decision_transformer import TrajectoryEmbedding, observation_statistics
from manyformer.models.head import BoundedActionHead, Bounds
from manyformer.models.tasks.language_modelling import CausalTask
from manyformer.models.tasks.trajectory_imitation import TRAJECTORIES
from manyformer.nn.attention.attention import Attention
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.feedforward import FeedForward
from manyformer.nn.masks import Causal
from manyformer.nn.runtime.training_hooks import uses_neighbours
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.parts.baselines import check_heads, init_std, stack
from manyformer.recipes.parts.keywords import PositiveSize
from manyformer.recipes.parts.registry import build, get_recipe, recipe

BodyKeyword = Annotated[
    str | None, "language model recipe whose causal layers are the body; null means the layers of GPT-2, with ReLU"
]
BodyKeywords = Annotated[dict[str, Any] | None, "keywords of that recipe except dim, depth and heads"]
ObservationMean = Annotated[
    tuple[float, ...] | None, "mean of each observed number in the training data, which decides it in a run; null is 0"
]
ObservationDeviation = Annotated[
    tuple[float, ...] | None, "standard deviation of each, which the data decides in a run; null is 1"
]
LowestAction = Annotated[
    Bounds | None, "lowest value of each number of continuous actions; the data decides it in a run, null is -1"
]
HighestAction = Annotated[Bounds | None, "highest value of each, which the data decides in a run; null is 1"]


@recipe(
    "Decision Transformer",
    paper="Chen et al. 2021, Decision Transformer: Reinforcement Learning via Sequence Modeling, arXiv:2106.01345",
    summary="A causal Transformer imitates the actions of recorded episodes, given the return that followed them.",
    task=TRAJECTORIES,
    family="softmax",
    cost="that of the body for 3 tokens per time step",
    reasons={"decode": "a time step has several tokens, which EpisodeDecoder decodes"},
    tiny_keywords={"observations": 3, "actions": 5, "window": 8, "max_episode_length": 64, "return_scale": 2.0},
)
def decision_transformer(
    observations: Annotated[PositiveSize, "number of observed numbers; the data decides it in a run"] = 4,
    actions: Annotated[
        PositiveSize, "number of discrete actions, or of numbers in a continuous one; the data decides it in a run"
    ] = 2,
    *,
    continuous: Annotated[bool, "actions are vectors of numbers; the data decides it in a run"] = False,
    dim: int = 128,
    depth: int = 3,
    heads: int = 1,
    ff_dim: int | None = None,
    dropout: float = 0.0,
    window: Annotated[PositiveSize, "number of time steps that an action depends on, its own one included"] = 20,
    max_episode_length: Annotated[
        PositiveSize, "time steps of an episode that have a learned vector of their own; later ones have the last"
    ] = 1000,
    return_scale: Annotated[float, "number that returns are divided by"] = 1.0,
    returns: Annotated[bool, "each time step has its return as a token; false is cloning of the behaviour"] = True,
    body: BodyKeyword = None,
    body_keywords: BodyKeywords = None,
    offset: Annotated[bool, "a learned vector added to every token, as in Hugging Face's model"] = False,
    observation_mean: ObservationMean = None,
    observation_std: ObservationDeviation = None,
    action_low: LowestAction = None,
    action_high: HighestAction = None,
) -> DecisionTransformer:
    """Tokens of return, observation and action, with learned vectors of time steps and GPT-2 without positions.

    Section 3, with the released code's single norm after the embedding. Without `returns` and with a `window` of 1 it
    is behavior cloning from the latest observation. Any causal language model may give the `body`, without its
    embedding, positions that are added to that, and its output."""
    if return_scale <= 0:
        raise UserError(f"return_scale ({return_scale}) must be above 0")
    if not continuous and (action_low is not None or action_high is not None):
        raise UserError("action_low and action_high are for continuous actions; these are discrete")
    # of the data, so that a run of another environment standardizes by its own
    statistics = observation_statistics(observations, observation_mean, observation_std)
    embed = TrajectoryEmbedding(
        statistics,
        actions,
        dim,
        max_episode_length=max_episode_length,
        return_scale=return_scale,
        has_returns=returns,
        has_offset=offset,
        dropout=dropout,
    )
    if continuous:
        head: BoundedActionHead | ClassHead = BoundedActionHead(dim, actions, action_low, action_high)
    else:
        head = ClassHead(dim, actions, bias=True)
    decodes_incrementally = True
    if body is None:
        if body_keywords:
            raise UserError(f"body_keywords ({', '.join(body_keywords)}) are for the recipe `body`, which is null")
        layers = _gpt2_layers(dim, depth, heads, ff_dim, dropout)
    else:
        sizes = {"dim": dim, "depth": depth, "heads": heads, "ff_dim": ff_dim, "dropout": dropout}
        # positions are time steps in the embedding: a body limited in length must hold the tokens of a window
        sizes["max_length"] = window * embed.tokens_per_step
        layers = _body_of(body, body_keywords or {}, sizes)
        decodes_incrementally = "incremental_decoding" in get_recipe(body).card.promises
    return DecisionTransformer(embed, layers, head, window=window, decodes_incrementally=decodes_incrementally)


def _gpt2_layers(dim: int, depth: int, heads: int, ff_dim: int | None, dropout: float) -> Layer:
    """The layers and the final norm of GPT-2, with ReLU as in the released code."""
    check_heads(dim, heads)

    def layer(number: int) -> dict[str, Layer]:
        return {"attention": Attention(dim, heads, SoftmaxKernel(Causal())), "ff": FeedForward(dim, ff_dim)}

    return stack(depth, layer, order="pre", norm=partial(nn.LayerNorm, dim), dropout=dropout, std=init_std(dim))


def _body_of(name: str, keywords: dict[str, Any], sizes: dict[str, Any]) -> Layer:
    """The layers of a causal language model's recipe. Raises UserError for a recipe that has none."""
    card = get_recipe(name).card
    parameters = get_recipe(name).signature.parameters
    if misplaced := sorted(sizes.keys() & keywords.keys() - {"max_length"}):
        raise UserError(f"body_keywords.{misplaced[0]} ({keywords[misplaced[0]]}) must be given as {misplaced[0]}")
    if "causal" not in card.promises:
        reason = card.reasons.get("causal", "")
        raise UserError(f"body ({name}) must be a recipe that promises to be causal, and it does not: {reason}")
    if not isinstance(card.task, CausalTask):
        raise UserError(f"body ({name}) must be the recipe of a language model, and it is for {card.task.title}")
    model: Any = build(name, **{key: value for key, value in sizes.items() if key in parameters} | keywords)
    # only the layers of the model are taken, so what else it computes would be lost in silence
    if model.auxiliary is not None:
        raise UserError(f"body ({name}) has losses of its intermediate layers, which need the tokens of a text")
    if uses_neighbours(model.body):
        raise UserError(f"body ({name}) attends to tokens retrieved from a text, which trajectories do not have")
    layers: Layer = model.body
    return layers
