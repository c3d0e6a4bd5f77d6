"""Data in NumPy archives: recorded episodes, graphs, and examples of several parts."""

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
from manyformer.config.data_sections.tokenized_sections import TokenizedData, WordTokenizerKind
from manyformer.config.section import Fraction, PathText, PositiveFloat, PositiveInt, SettingConflict, accepted_forms

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
        return ExpectedData(keywords, assumption, self.length).among(parameters)


ASSUMED_NODES, ASSUMED_FEATURES, ASSUMED_CLASSES = 2708, 1433, 7
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


ModalityName = Literal["image", "sound", "text"]
ModalityNames = Annotated[
    Annotated[tuple[ModalityName, ...], Field(min_length=1)], accepted_forms("a list of image, sound and text")
]

ASSUMED_SIDE, ASSUMED_WORDS = 140, 1000
"""The assumed height and width of images and size of the vocabulary, unknown until the data is read."""


@register_section
class ModalitiesData(TokenizedData):
    """Examples of several parts: an image, a recording, a text, a label."""

    kind: Literal["modalities"] = "modalities"
    """Examples of several parts."""
    path: PathText
    """A NumPy archive (.npz) with two at least of the arrays images, samples (beside lengths and sample_rate), texts
    and labels."""
    parts: ModalityNames | None = None
    """The parts that a model reads, in this order; null means all of the archive."""
    valid: OpenFraction = 0.1
    """The fraction of the examples held out as validation data, where the archive names none."""
    part_dropout: Fraction = 0.0
    """In training, the probability that a part of an example is missing; one of its parts always stays."""
    mels: Annotated[int, Field(ge=1, le=512)] = 80
    """Number of mel bands of a frame of sound."""
    window: Annotated[PositiveFloat, Field(le=1000)] = 25.0
    """Length of a frame of sound in milliseconds."""
    hop: Annotated[PositiveFloat, Field(le=1000)] = 10.0
    """Milliseconds from a frame of sound to the next."""
    tokenizer: WordTokenizerKind = "word"  # type: ignore[assignment]
    """What a token of a text is: a word, one character, one byte, or a byte pair of a trained vocabulary."""

    default_vocab = 1000

    @property
    def row_length(self) -> int:
        return 1

    def expected_keywords(self, parameters: Container[str]) -> ExpectedData:
        side = ASSUMED_SIDE
        sizes = {"image": {"height": side, "width": side, "channels": 1}, "sound": {"mels": self.mels}}
        keywords: dict[str, int | None] = {}
        for part, values in {**sizes, "text": {"vocab": ASSUMED_WORDS}}.items():
            if self.parts is None:
                keywords |= values if part == "image" else {}
            else:
                keywords |= values if part in self.parts else dict.fromkeys(values)
        assumption = f"as if for gray images of {side} x {side}; the data decides the sizes"
        return ExpectedData(keywords, assumption, 1).among(parameters)
