"""A tokenizer of images: one token per brightness level of a pixel channel."""

from collections.abc import Iterable
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from manyformer.base.errors import UserError
from manyformer.data.tokenizers.tokenizer import SPECIALS, NativeTokenizer, TokenIds
from manyformer.nn.structures import pixel_order

FIRST_LEVEL_TOKEN = len(SPECIALS)
"""The token of level 0."""


class ImageShape(NamedTuple):
    """The shape (h, w, c) of images; `channels` is 1 for grayscale and 3 for color."""

    height: int
    width: int
    channels: int

    @property
    def values(self) -> int:
        """The number of values in an image, h * w * c."""
        return self.height * self.width * self.channels

    def __str__(self) -> str:
        channels = "grey"
        if self.channels != 1:
            channels = f"{self.channels} channels"
        return f"{self.height} x {self.width}, {channels}"


@final
class PixelTokenizer(NativeTokenizer):
    """One token per brightness level; an image is the sequence of its values, the channels of a pixel adjacent.

    Pixels are in raster order, or in blocks of `block` (rows, columns) with raster order inside each. As text, levels
    are numbers separated by spaces. The tokenizer is for images of one shape. Raises UserError where blocks do not
    divide that shape.
    """

    kind = "levels"

    def __init__(self, levels: int, shape: ImageShape, block: tuple[int, int] | None = None) -> None:
        self.levels = levels
        self.shape = shape
        # raster order is the order of blocks of one row
        self.block = (1, shape.width) if block is None else block
        self.order = pixel_order(shape, self.block)

    @property
    def vocab(self) -> int:
        return FIRST_LEVEL_TOKEN + self.levels

    def encode_array(self, text: str) -> TokenIds:
        try:
            levels = np.array([int(word) for word in text.split()], dtype=np.int32)
        except ValueError:
            raise UserError(
                f"an image as text is a list of levels from 0 to {self.levels - 1}, not {text[:40]!r}"
            ) from None
        if levels.size and (levels.min() < 0 or levels.max() >= self.levels):
            raise UserError(f"levels range from 0 to {self.levels - 1}, and {text[:40]!r} has levels outside")
        return levels + np.int32(FIRST_LEVEL_TOKEN)

    def token_bytes(self, token: int) -> bytes:
        return b"%d " % (token - FIRST_LEVEL_TOKEN)

    def content(self) -> dict[str, Any]:
        return {"levels": self.levels, **self.shape._asdict(), "block": list(self.block)}

    @classmethod
    def restore(cls, content: dict[str, Any]) -> "PixelTokenizer":
        # tokenizers saved before there were blocks read row by row
        rows, columns = content.get("block", (1, content["width"]))
        return cls(
            content["levels"], ImageShape(content["height"], content["width"], content["channels"]), (rows, columns)
        )

    @classmethod
    def learn(cls, texts: Iterable[str], size: int | None) -> "PixelTokenizer":
        raise UserError("the tokenizer 'levels' is for images (data.kind=images); use char, byte or bpe for text")

    def quantize(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Map brightness from 0 to 255 to levels."""
        # 255 times 256 levels does not fit in 8 bits
        return (pixels.astype(np.uint16) * self.levels // 256).astype(np.uint8)

    def brightness(self, levels: NDArray[Any]) -> NDArray[np.uint8]:
        """Map levels to brightness from 0 to 255; the highest level is 255."""
        table = (np.arange(self.levels) * 255 // (self.levels - 1)).astype(np.uint8)
        return np.take(table, levels)

    def image(self, tokens: Iterable[int]) -> NDArray[np.uint8]:
        """The image (h, w, c) of these tokens in brightness; special and missing tokens are 0."""
        values = np.zeros(self.shape.values, dtype=np.int64)
        # a model may generate more values than an image has, or fewer, or special tokens between them
        ids = np.fromiter((int(token) for token in tokens), dtype=np.int64)[: self.shape.values]
        values[self.order[: len(ids)]] = np.clip(ids - FIRST_LEVEL_TOKEN, 0, self.levels - 1)
        return self.brightness(values).reshape(self.shape)

    def tokens(self, image: NDArray[np.uint8]) -> list[int]:
        """The token ids of an image (h, w, c) in brightness, without bos and eos."""
        ids: list[int] = (self.quantize(image).ravel()[self.order].astype(np.int64) + FIRST_LEVEL_TOKEN).tolist()
        return ids
