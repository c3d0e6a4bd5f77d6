"""Images as tokens: one for each level of brightness."""

from collections.abc import Iterable
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from manyformer.data.tokenizer import SPECIALS, TokenIds, Tokenizer
from manyformer.errors import UserError
from manyformer.pixel_order import pixel_order

FIRST = len(SPECIALS)
"""The token of level 0."""


class ImageShape(NamedTuple):
    """How large images are; `channels` is 1 for grey ones, 3 for colours."""

    height: int
    width: int
    channels: int

    @property
    def values(self) -> int:
        """Numbers in an image."""
        return self.height * self.width * self.channels

    def __str__(self) -> str:
        colours = "grey" if self.channels == 1 else f"{self.channels} channels"
        return f"{self.height} x {self.width}, {colours}"


@final
class PixelTokenizer(Tokenizer):
    """One token a level of brightness; an image is its values in their order, the channels of a pixel together.

    The order is row by row, or `block` by block of (rows, columns) and row by row within each. As a text, levels are
    numbers with spaces between them. It knows the shape of the images that it is for. Raises UserError where blocks do
    not divide them.
    """

    kind = "levels"

    def __init__(self, levels: int, shape: ImageShape, block: tuple[int, int] | None = None) -> None:
        self.levels, self.shape = levels, shape
        # one row at a time is a block, too
        self.block = (1, shape.width) if block is None else block
        self.order = pixel_order(shape, self.block)

    @property
    def vocab(self) -> int:
        return FIRST + self.levels

    def encode_array(self, text: str) -> TokenIds:
        try:
            found = np.array([int(word) for word in text.split()], dtype=np.int32)
        except ValueError:
            raise UserError(
                f"an image is written as levels from 0 to {self.levels - 1}, not as {text[:40]!r}"
            ) from None
        if found.size and (found.min() < 0 or found.max() >= self.levels):
            raise UserError(f"levels go from 0 to {self.levels - 1}, and {text[:40]!r} has others")
        return found + np.int32(FIRST)

    def piece(self, token: int) -> bytes:
        return b"%d " % (token - FIRST)

    def content(self) -> dict[str, Any]:
        return {"levels": self.levels, **self.shape._asdict(), "block": list(self.block)}

    @classmethod
    def restore(cls, content: dict[str, Any]) -> "PixelTokenizer":
        rows, columns = content.get("block", (1, content["width"]))
        return cls(
            content["levels"], ImageShape(content["height"], content["width"], content["channels"]), (rows, columns)
        )

    @classmethod
    def learn(cls, texts: Iterable[str], size: int | None) -> "PixelTokenizer":
        raise UserError("levels are those of images (data.kind=images); texts have other tokens: char, byte or bpe")

    def quantise(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Brightness from 0 to 255 as levels."""
        return (pixels.astype(np.uint16) * self.levels // 256).astype(np.uint8)

    def brightness(self, levels: NDArray[Any]) -> NDArray[np.uint8]:
        """Levels as brightness from 0 to 255, the highest being 255."""
        table = (np.arange(self.levels) * 255 // (self.levels - 1)).astype(np.uint8)
        return np.take(table, levels)

    def image(self, tokens: Iterable[int]) -> NDArray[np.uint8]:
        """The image (h, w, c) of these tokens, in brightness; special ones and what is missing are 0."""
        values = np.zeros(self.shape.values, dtype=np.int64)
        given = np.fromiter((int(token) for token in tokens), dtype=np.int64)[: self.shape.values]
        values[self.order[: len(given)]] = np.clip(given - FIRST, 0, self.levels - 1)
        return self.brightness(values).reshape(self.shape)

    def tokens(self, image: NDArray[np.uint8]) -> list[int]:
        """The tokens of an image (h, w, c) in brightness, those that begin and end it not among them."""
        found: list[int] = (self.quantise(image).ravel()[self.order].astype(np.int64) + FIRST).tolist()
        return found
