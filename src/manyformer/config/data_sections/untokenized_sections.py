"""Data without tokens: recorded episodes, environments that a policy acts in, graphs."""

from collections.abc import Container, Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, JsonValue

from manyformer.config.data_sections.data_section import (
    DataPaths,
    DataSection,
    ExpectedData,
    OpenFraction,
    register_section,
)
from manyformer.config.section import PathText, PositiveInt, SettingConflict, accepted_forms

ASSUMED_OBSERVATIONS = 4
ASSUMED_ACTIONS = 2
"""The assumed widths of observations and actions, unknown until the data is read or the environment made: those of
CartPole."""

MAX_EPISODES = 100_000
"""The most episodes that are generated, or played side by side."""


@register_section
class TrajectoriesData(DataSection):
    """Recorded episodes of actions, for models that imitate them."""

    kind: Literal["trajectories"] = "trajectories"
    """Recorded episodes of actions."""
    path: DataPaths
    """A NumPy archive (.npz) with arrays observations, actions, rewards and lengths, `minari:NAME` (a local Minari data
    set), `generated:NAME` (recorded in our own environment graph-walk or stitch-maze), or a list of these."""
    generated: Annotated[PositiveInt, Field(le=MAX_EPISODES)] = 1000
    """Number of episodes of each `generated:NAME`."""
    valid: OpenFraction = 0.1
    """The fraction of the episodes held out as validation data."""
    length: PositiveInt = 20
    """Time steps in a window; a model's action depends on so many."""
    top: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Use only the episodes with the highest returns, as many as hold this fraction of all time steps, at least one."""
    reward: Literal["each-step", "last-step"] = "each-step"
    """Rewards as they were recorded, or the return of the episode at its last step and 0 before (delayed reward)."""
    actions: PositiveInt | None = None
    """Number of discrete actions; null means one more than the largest recorded. Continuous actions have none."""

    environment: PathText | None = None
    """The environment that `manyformer evaluate` plays the model in: one of our own, or an id of gymnasium; null scores
    recorded actions alone."""
    wanted: (
        Annotated[float | tuple[float, ...], accepted_forms("a number or a list of numbers: the returns to ask for")]
        | None
    ) = None
    """The return that the model is asked for when it is played, or several; a model without returns acts alike for
    all."""
    episodes: Annotated[PositiveInt, Field(le=MAX_EPISODES)] = 100
    """Number of episodes that are played for each wanted return, side by side."""

    swept: ClassVar[tuple[str, ...]] = ("length", "wanted")

    def conflicts(self) -> Iterator[SettingConflict]:
        if self.environment is not None and self.wanted in (None, ()):
            yield SettingConflict(("wanted",), "is needed: the returns to ask for", ("data.environment",))
        if self.environment is None and self.wanted is not None:
            yield SettingConflict(("wanted",), "is for playing in an environment", ("data.environment",))

    def expected_keywords(self, parameters: Container[str]) -> ExpectedData:
        keywords = {"observations": ASSUMED_OBSERVATIONS, "actions": self.actions or ASSUMED_ACTIONS}
        keywords["window"] = self.length
        assumption = f"as if for {ASSUMED_OBSERVATIONS} observed numbers; the data decides"
        return ExpectedData(keywords, assumption, self.length).among(parameters)


ClosedFraction = Annotated[float, Field(ge=0, le=1)]
RowCount = Annotated[PositiveInt, Field(le=MAX_EPISODES)]


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


ASSUMED_NODES = 2708
ASSUMED_FEATURES = 1433
ASSUMED_CLASSES = 7
"""The assumed numbers of nodes, features of a node and labels, unknown until the data is read: those of Cora."""


@register_section
class GraphsData(DataSection):
    """Graphs, for models that label their nodes or each of them as a whole."""

    kind: Literal["graphs"] = "graphs"
    """Graphs."""
    path: PathText
    """A NumPy archive (.npz) with arrays edges, labels and features, or a text file with the names of two joined nodes
    in each line."""
    nodes: PathText | None = None
    """For edges in a text file: a text file with a node in each line: its name, its features, its label."""
    directed: bool = False
    """Whether an edge joins its nodes in one direction alone; false reads every edge in both."""
    feature_scale: Literal["none", "sum"] = "none"
    """Features as they are, or divided by their sum in each node."""
    laplacian: Annotated[int, Field(ge=0, le=256)] = 0
    """Number of eigenvectors of the graph's Laplacian that are a node's position, for models that read them."""
    valid: OpenFraction = 0.1
    """The fraction of the labelled nodes or graphs held out as validation data, where the archive names none."""

    def expected_keywords(self, parameters: Container[str]) -> ExpectedData:
        keywords = {"features": ASSUMED_FEATURES, "classes": ASSUMED_CLASSES, "laplacian": self.laplacian}
        assumption = f"as if for Cora's {ASSUMED_FEATURES:,} features and {ASSUMED_CLASSES} labels; the data decides"
        return ExpectedData(keywords, assumption, ASSUMED_NODES).among(parameters)
