"""A projection of the stream to a few channels for each head, such as gates."""

from typing import final

from jaxtyping import Float
from torch import Tensor, nn

from manyformer.head_selection import HeadSelection, PerHeadTensors, select_head_outputs


@final
class HeadProjection(PerHeadTensors):
    """Maps a stream (b, l, d) to `width` channels of each head (b, h, l, `width`), by one matrix or by two.

    With `rank` the map is the product of two matrices with `rank` channels between them, the first shared by all heads.
    """

    def __init__(self, dim: int, heads: int, width: int, *, rank: int | None = None, bias: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.width = width
        if rank is None:
            self.down = None
        else:
            self.down = nn.Linear(dim, rank, bias=False)
        self.up = nn.Linear(dim if rank is None else rank, heads * width, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the matrices with Glorot's uniform distribution."""
        for linear in (self.down, self.up):
            if linear is not None:
                nn.init.xavier_uniform_(linear.weight)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)

    def forward(self, x: Float[Tensor, "b l d"]) -> Float[Tensor, "b h l n"]:
        y: Tensor = self.up(x if self.down is None else self.down(x))
        return y.view(*x.shape[:2], self.heads, self.width).transpose(1, 2)

    @property
    def differs_by_head(self) -> bool:
        return True

    def keep_heads(self, selection: HeadSelection) -> None:
        select_head_outputs(self.up, selection)
        self.heads = len(selection.heads)
