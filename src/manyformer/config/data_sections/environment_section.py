"""Environments that a policy acts in while it is trained."""

from collections.abc import Container
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from manyformer.config.data_sections.data_section import DataSection, ExpectedData, register_section
from manyformer.config.section import PathText, PositiveInt

ASSUMED_OBSERVATIONS, ASSUMED_ACTIONS = 4, 2
"""The assumed sizes of observations and actions, unknown until the environment is made."""

MAX_ROWS = 100_000
"""The most episodes that are played side by side."""

ClosedFraction = Annotated[float, Field(ge=0, le=1)]
RowCount = Annotated[PositiveInt, Field(le=MAX_ROWS)]


@register_section
class EnvironmentData(DataSection):
    """Episodes that a policy plays in an environment, new ones for every rollout."""

    kind: Literal["environment"] = "environment"
    """Episodes in an environment."""
    environment: PathText = "memory-length"
    """One of our own tasks (memory-length, t-maze-passive, t-maze-active, repeat-previous, hidden-velocity-cartpole),
    or the id of an environment of gymnasium, such as CartPole-v1."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Options of the environment, such as `length` of memory-length, or keywords of `gymnasium.make`."""
    rows: RowCount = 32
    """How many copies of the environment are played side by side."""
    steps: PositiveInt = 128
    """Steps of each row in a rollout. The policy then learns from `rows` times `steps` steps, in batches of whole rows
    with at most batch.tokens steps."""
    passes: PositiveInt = 4
    """How often the policy learns from each rollout before the next one is played."""
    discount: ClosedFraction = 0.99
    """Gamma: what a reward is worth one step earlier."""
    gae_lambda: ClosedFraction = 0.95
    """Lambda of generalized advantage estimation: 0 trusts the value of the next step, 1 the rewards alone."""
    clip: Annotated[float, Field(gt=0)] = 0.2
    """Epsilon of the clipped objective: how far the probability of an action may move from that of the rollout."""
    value_weight: Annotated[float, Field(ge=0)] = 0.5
    """Weight of the squared error of values in the loss."""
    entropy_weight: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the entropy of actions in the loss, which keeps a policy from settling too early."""
    normalize_advantages: bool = True
    """Scale the advantages of each batch to mean 0 and deviation 1, unless they are nearly equal."""
    valid: RowCount = 100
    """Held-out episodes for validation, and as many others for the test, always the same ones."""

    @property
    def row_length(self) -> int:
        return self.steps

    def expected_keywords(self, parameters: Container[str]) -> ExpectedData:
        keywords = {"observations": ASSUMED_OBSERVATIONS, "actions": ASSUMED_ACTIONS, "continuous": False}
        assumption = f"as if for observations of {ASSUMED_OBSERVATIONS} numbers and {ASSUMED_ACTIONS} actions"
        return ExpectedData(keywords, f"{assumption}; the environment decides", self.steps).among(parameters)
