"""Patch embedding: images as sequences of tokens."""

from typing import Any, final

import torch
from einops import rearrange
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from manyformer.core import TokenPositions, contiguous_positions
from manyformer.dropout import Dropout
from manyformer.feedforward import init_glorot
from manyformer.position import NoPosition, Position

MAX_PIXEL_VALUE = 255


@final
class PatchEmbedding(nn.Module):
    """Patches of `patch` x `patch` pixels in raster order, each projected to a token (Dosovitskiy et al. 2021, 3.1).

    `leading` learned tokens precede them: one is the paper's class token. They have positions too. Bytes from 0 to 255
    are mapped to -1 to 1; images of floating point numbers are used as they are. Raises ValueError if patches do not
    divide the image, and for images of another size.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        patch: int,
        dim: int,
        *,
        position: Position | None = None,
        leading: int = 0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tokens = leading + count_patches(shape, patch)
        self.shape, self.patch = shape, patch
        self.position = NoPosition() if position is None else position
        if self.position.max_length is not None and self.position.max_length < self.tokens:
            raise ValueError(
                f"{self.tokens} tokens need as many positions, and the position encoding has {self.position.max_length}"
            )
        self.project = nn.Linear(patch * patch * shape[2], dim)
        init_glorot(self.project)
        self.leading = nn.Parameter(torch.zeros(leading, dim)) if leading else None
        self.dropout = Dropout(dropout)

    def token_positions(self, images: Shaped[Tensor, "b height width channels"]) -> TokenPositions:
        """The positions of the tokens of these images: each image is a document without padding."""
        return contiguous_positions(images.shape[0], 0, self.tokens, images.device)

    def forward(
        self, images: Shaped[Tensor, "b height width channels"], positions: TokenPositions
    ) -> Float[Tensor, "b l d"]:
        if images.shape[1:] != self.shape:
            expected = ", ".join(map(str, self.shape))
            raise ValueError(f"images {tuple(images.shape)} must be (b, {expected}): the model was built for that size")
        x = self.project(split_patches(self._scaled(images), self.patch))
        if self.leading is not None:
            leading = self.leading.to(x.dtype).expand(x.shape[0], -1, -1)
            x = torch.cat([leading, x], dim=1)
        dropped: Tensor = self.dropout(self.position.embed(x, positions))
        return dropped

    def extra_repr(self) -> str:
        return f"{self.tokens} tokens of images {self.shape}, patch={self.patch}"

    def _scaled(self, images: Tensor) -> Tensor:
        if images.is_floating_point():
            return images
        return images.to(self.project.weight.dtype) * (2 / MAX_PIXEL_VALUE) - 1


def split_patches(images: Float[Tensor, "b height width channels"], patch: int) -> Float[Tensor, "b l values"]:
    """The patches of images in raster order, the values of each in raster order with channels last."""
    rearranged: Any = rearrange(images, "b (h p) (w q) c -> b (h w) (p q c)", p=patch, q=patch)
    patches: Tensor = rearranged
    return patches


def count_patches(shape: tuple[int, int, int], patch: int) -> int:
    """The number of patches of an image (height, width, channels). Raises ValueError if they do not divide it."""
    height, width, _ = shape
    if height % patch or width % patch:
        raise ValueError(f"an image of {height} x {width} cannot be cut into patches of {patch} x {patch}")
    return height * width // patch**2
