"""Examples of several parts, for models that describe, compare or label them."""

from collections.abc import Container
from typing import Annotated, Literal

from pydantic import Field

from manyformer.config.data_sections.data_section import ExpectedData, OpenFraction, register_section
from manyformer.config.data_sections.tokenized_sections import TokenizedData, WordTokenizerKind
from manyformer.config.section import Fraction, PathText, PositiveFloat, accepted_forms

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
        expected = {name: value for name, value in keywords.items() if name in parameters}
        return ExpectedData(expected, f"as if for gray images of {side} x {side}; the data decides the sizes", 1)
