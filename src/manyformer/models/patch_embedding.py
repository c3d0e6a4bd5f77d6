"""From images to the residual stream."""

from typing import Any, final

import torch
from einops import rearrange
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from manyformer.core import ContiguousLayout, TokenPositions
from manyformer.dropout import Dropout
from manyformer.position import NoPosition, Position

BRIGHTEST = 255


@final
class PatchEmbedding(nn.Module):
    """Squares of `patch` x `patch` pixels, row by row, each projected to a token (Dosovitskiy et al. 2021, 3.1).

    `leading` learned tokens stand before them: one is the paper's class token. `position` counts those too. Brightness
    from 0 to 255 is taken as -1 to 1; images of floating point numbers are taken as they are. Raises ValueError where
    patches do not divide the image, and for images of another size.
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
            raise ValueError(f"{self.tokens} tokens need as many positions, and there are {self.position.max_length}")
        self.project = nn.Linear(patch * patch * shape[2], dim)
        nn.init.xavier_uniform_(self.project.weight)
        nn.init.zeros_(self.project.bias)
        self.leading = nn.Parameter(torch.zeros(leading, dim)) if leading else None
        self.dropout = Dropout(dropout)

    def place(self, images: Shaped[Tensor, "b height width channels"]) -> TokenPositions:
        """Where the tokens of these images are: each image is a document without padding."""
        pos = torch.arange(self.tokens, device=images.device).expand(images.shape[0], -1)
        return TokenPositions(pos, torch.zeros_like(pos), ContiguousLayout())

    def forward(
        self, images: Shaped[Tensor, "b height width channels"], positions: TokenPositions
    ) -> Float[Tensor, "b l d"]:
        if images.shape[1:] != self.shape:
            wanted = ", ".join(map(str, self.shape))
            raise ValueError(f"images {tuple(images.shape)} must be (b, {wanted}): the model was built for that size")
        x = self.project(split_patches(self._scaled(images), self.patch))
        if self.leading is not None:
            first = self.leading.to(x.dtype).expand(x.shape[0], -1, -1)
            x = torch.cat([first, x], dim=1)
        dropped: Tensor = self.dropout(self.position.embed(x, positions))
        return dropped

    def extra_repr(self) -> str:
        return f"{self.tokens} tokens of images {self.shape}, patch={self.patch}"

    def _scaled(self, images: Tensor) -> Tensor:
        if images.is_floating_point():
            return images
        return images.to(self.project.weight.dtype) * (2 / BRIGHTEST) - 1


def split_patches(images: Float[Tensor, "b height width channels"], patch: int) -> Float[Tensor, "b l values"]:
    """The squares of images row by row, the values of each row by row, the channels of a pixel together."""
    cuts: Any = rearrange(images, "b (h p) (w q) c -> b (h w) (p q c)", p=patch, q=patch)
    found: Tensor = cuts
    return found


def count_patches(shape: tuple[int, int, int], patch: int) -> int:
    """How many patches such an image has. Raises ValueError where they do not divide it."""
    height, width, _ = shape
    if height % patch or width % patch:
        raise ValueError(f"an image of {height} x {width} cannot be cut into patches of {patch} x {patch}")
    return height * width // patch**2
