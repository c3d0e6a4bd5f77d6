"""Recorded episodes of actions, for models that imitate them."""

from collections.abc import Container, Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from manyformer.config.data_sections.data_section import (
    DataPaths,
    DataSection,
    ExpectedData,
    OpenFraction,
    register_section,
)
from manyformer.config.section import PathText, PositiveInt, SettingConflict, accepted_forms

ASSUMED_OBSERVATIONS, ASSUMED_ACTIONS = 4, 2
"""The assumed widths of observations and actions, unknown until the data is read: those of CartPole."""

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
        return ExpectedData({name: keywords[name] for name in keywords if name in parameters}, assumption, self.length)
