"""Data other than text alone: recorded episodes, environments, graphs, recordings, examples of several parts."""

from collections.abc import Container, Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, JsonValue

from manyformer.config.data_sections.data_section import (
    ColumnSpec,
    DataPaths,
    DataSection,
    ExpectedData,
    HeaderSpec,
    OpenFraction,
    SplitSpec,
    register_section,
)
from manyformer.config.data_sections.text_sections import TokenizedData, WordTokenizerKind
from manyformer.config.section import Fraction, PathText, PositiveFloat, PositiveInt, SettingConflict, accepted_forms

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


MIN_RATE = 1000
MAX_RATE = 768_000
"""The lowest and the highest sampling rate of a recording, in Hz."""
SampleRate = Annotated[int, Field(ge=MIN_RATE, le=MAX_RATE)]
GroupValues = Annotated[
    Annotated[tuple[int | PathText, ...], Field(min_length=1)], accepted_forms("a list of values of data.group")
]
CountRange = Annotated[
    tuple[PositiveInt, PositiveInt], accepted_forms("a list of two: the least and the most recordings")
]
SecondsRange = Annotated[
    tuple[Annotated[float, BeforeValidator(float), Field(ge=0, le=60)], Annotated[float, BeforeValidator(float)]],
    accepted_forms("a list of two: the least and the most seconds"),
]
LabelNames = Annotated[tuple[PathText, ...], accepted_forms("a list of names")]

DEFAULT_VALID = 0.1
ASSUMED_LABELS = 10
ASSUMED_VOCABULARY = 32
"""The assumed numbers of labels and of characters, unknown until the data is read."""
FRAMES_PER_RECORDING = 100
"""The assumed number of frames of a recording: those of a second."""


@register_section
class AudioData(TokenizedData):
    """Recordings, for models that label or transcribe them."""

    kind: Literal["audio"] = "audio"
    """Recordings."""
    path: DataPaths
    """A folder with one folder of files (wav, flac, ogg, mp3) for each label, a TSV, CSV or JSONL table of files and
    their labels or texts, a NumPy archive (.npz) with arrays samples and lengths, or a list of these."""
    audio: ColumnSpec | None = None
    """The column of a table with the files, relative to the folder of the table; null means the first column of a TSV
    or CSV without a header, and `path` elsewhere."""
    label: ColumnSpec | None = None
    """The column of a table, or the array of an archive, with the labels or the texts that are said; null means the
    second column of a TSV or CSV without a header, and `label` (or `text`, for transcription) elsewhere."""
    header: HeaderSpec = None
    names: LabelNames | None = None
    """The names of labels that are numbers: that of 0, of 1, and so on."""
    valid: SplitSpec | None = None
    """Validation data: the fraction of the recordings held out, or a path; null means 0.1 without data.valid_groups."""
    test: DataPaths | None = None
    """Test data, scored by `manyformer evaluate` alone: a path."""
    group: ColumnSpec | None = None
    """A column or array, such as the speaker, by whose values recordings are held out; `folder` in a folder of files
    is the first folder below it."""
    valid_groups: GroupValues | None = None
    """Values of data.group: recordings that have one of them are validation data."""
    test_groups: GroupValues | None = None
    """Values of data.group: recordings that have one of them are test data."""
    sample_rate: SampleRate = 16_000
    """Samples in a second, to which all recordings are resampled."""
    archive_rate: SampleRate | None = None
    """Samples in a second of an archive without an array `sample_rate`."""
    mels: Annotated[int, Field(ge=1, le=512)] = 80
    """Number of mel bands of a frame."""
    window: Annotated[PositiveFloat, Field(le=1000)] = 25.0
    """Length of a frame in milliseconds."""
    hop: Annotated[PositiveFloat, Field(le=1000)] = 10.0
    """Milliseconds from a frame to the next."""
    max_seconds: PositiveFloat = 30.0
    """Longer recordings are left out of training, and their number is reported."""
    frequency_masks: Annotated[int, Field(ge=0, le=64)] = 0
    """SpecAugment, in training: the number of masks of adjacent mel bands."""
    frequency_mask_width: Annotated[int, Field(ge=1, le=512)] = 27
    """SpecAugment: the most mel bands that a mask covers."""
    time_masks: Annotated[int, Field(ge=0, le=64)] = 0
    """SpecAugment, in training: the number of masks of adjacent frames."""
    time_mask_width: PositiveInt = 100
    """SpecAugment: the most frames that a mask covers."""
    time_mask_share: Fraction = 0.2
    """SpecAugment: the largest share of a recording's frames that a mask covers."""
    joined: CountRange | None = None
    """For transcription: the least and the most recordings that are joined at random to an utterance, with a space
    between their texts; null joins none. Held-out utterances are always the same."""
    silence: SecondsRange = (0.0, 0.3)
    """The least and the most seconds of silence before, between and after joined recordings."""
    tokenizer: WordTokenizerKind = "char"  # type: ignore[assignment]
    """For transcription: what a token is: one character, one byte, a word, or a byte pair of a trained vocabulary."""

    default_vocab = 1000

    @classmethod
    def fill(cls, settings: dict[str, Any]) -> dict[str, Any]:
        # a default would contradict groups that are held out
        if settings.get("valid") is None and settings.get("valid_groups") is None:
            settings["valid"] = DEFAULT_VALID
        # the base class fills in the vocabulary of its own default, a bpe tokenizer
        return super().fill({"tokenizer": "char", **settings})

    def conflicts(self) -> Iterator[SettingConflict]:
        yield from super().conflicts()
        for split in ("valid", "test"):
            groups = f"{split}_groups"
            if getattr(self, groups) is None:
                continue
            if getattr(self, split) is not None:
                yield SettingConflict((groups,), f"is another way to name {split} data", (f"data.{split}",))
            if self.group is None:
                yield SettingConflict((groups,), "are values of data.group, which is missing", ("data.group",))
        if self.group is not None and self.valid_groups is None and self.test_groups is None:
            yield SettingConflict(("group",), "needs values that are held out", ("data.valid_groups",))
        if self.joined is not None and self.joined[0] > self.joined[1]:
            yield SettingConflict(("joined",), f"must ascend, and is {self.joined[0]} to {self.joined[1]}")
        if self.silence[0] > self.silence[1]:
            yield SettingConflict(("silence",), f"must ascend, and is {self.silence[0]} to {self.silence[1]}")
        if self.hop > self.window:
            yield SettingConflict(("hop",), "leaves out samples between frames; set it to at most", ("data.window",))

    @property
    def row_length(self) -> int:
        return FRAMES_PER_RECORDING

    def expected_keywords(self, parameters: Container[str]) -> ExpectedData:
        keywords = {"mels": self.mels, "classes": ASSUMED_LABELS, "vocab": ASSUMED_VOCABULARY}
        assumption = f"as if for {ASSUMED_LABELS} labels, or {ASSUMED_VOCABULARY} characters; the data decides"
        return ExpectedData(keywords, assumption, FRAMES_PER_RECORDING).among(parameters)


ModalityName = Literal["image", "sound", "text"]
ModalityNames = Annotated[
    Annotated[tuple[ModalityName, ...], Field(min_length=1)], accepted_forms("a list of image, sound and text")
]

ASSUMED_SIDE = 140
ASSUMED_WORDS = 1000
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
                # None where the model does not read the part
                keywords |= values if part in self.parts else dict.fromkeys(values)
        assumption = f"as if for gray images of {side} x {side}; the data decides the sizes"
        return ExpectedData(keywords, assumption, 1).among(parameters)
