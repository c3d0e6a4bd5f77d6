"""Images, for classifiers, or as sequences of brightness levels for language models."""

from collections.abc import Container
from typing import Annotated, Literal

from pydantic import Field

from manyformer.config.data_sections.data_section import (
    SPECIAL_TOKENS,
    BlockSize,
    DataPaths,
    DataSection,
    ExpectedData,
    SplitSpec,
    register_section,
)
from manyformer.config.section import PositiveInt

ASSUMED_SIZE = 28
"""The assumed height and width of images, unknown until the data is read: those of MNIST."""
DEFAULT_REDUCTION = 4
"""How many times smaller the source of super-resolution is (Parmar et al. 2018, section 5.3)."""
ASSUMED_LABELS = 10
"""The assumed number of image labels."""


@register_section
class ImagesData(DataSection):
    """Images, for image classifiers, or as sequences of brightness levels for language models."""

    kind: Literal["images"] = "images"
    """Images."""
    path: DataPaths
    """A NumPy archive (.npz) with arrays such as train_x and train_y, an IDX file of images as MNIST has them (also
    gzipped; labels are read from the file next to it), a folder of IDX files, a folder of image files in one folder for
    each label, or a list of these."""
    valid: SplitSpec = 0.1
    """Validation data: the fraction of the images held out, or a path."""
    test: DataPaths | None = None
    """Test data, scored by `manyformer evaluate` alone: a path; null means the test images that `path` comes with."""
    size: Annotated[PositiveInt, Field(le=8192)] | None = None
    """Height and width that all images are scaled to; null leaves them as they are."""
    channels: Literal[1, 3] | None = None
    """1 converts all images to grayscale, 3 to RGB; null leaves them as they are."""
    levels: Annotated[int, Field(ge=2, le=256)] = 256
    """Number of brightness levels; for language models, the tokens."""
    block: BlockSize | None = None
    """For language models, rows and columns of the blocks in which images are read: block by block, row by row in each
    block; null reads the image row by row."""

    reduction: Annotated[int, Field(ge=2, le=64)] | None = None
    """For super-resolution, how many times smaller the source is than the image in height and width; null means 4. A
    pixel of the source is the mean of so many times so many pixels."""

    @property
    def source_reduction(self) -> int:
        """How many times smaller the source of super-resolution is."""
        if self.reduction is None:
            return DEFAULT_REDUCTION
        return self.reduction

    def expected_keywords(self, parameters: Container[str]) -> ExpectedData:
        size = self.size or ASSUMED_SIZE
        channels = self.channels or 1
        values = size * size * channels
        # without blocks, a row of the image is one
        rows, columns = self.block or (1, size)
        keywords = {"height": size, "width": size, "channels": channels, "vocab": self.levels + SPECIAL_TOKENS}
        keywords |= {"classes": ASSUMED_LABELS, "max_length": values, "block_height": rows, "block_width": columns}
        keywords |= {"reduction": self.source_reduction}
        colors = "grayscale" if channels == 1 else "color"
        assumption = f"as if for {colors} images of {size} x {size} with {ASSUMED_LABELS} labels; the data decides"
        return ExpectedData(keywords, assumption, values).among(parameters)
