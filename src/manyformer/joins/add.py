"""The sum of residual stream and branch."""

import operator
from collections.abc import Callable
from typing import final

from jaxtyping import Float
from torch import Tensor

from manyformer.binding import has_hooks
from manyformer.core import ResidualJoin
from manyformer.dropout import Dropout


@final
class AddJoin(ResidualJoin):
    """The sum (He et al. 2016), after dropout of the branch (Vaswani et al. 2017, section 5.4)."""

    def __init__(self, *, dropout: float) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)

    def forward(self, x: Float[Tensor, "b l d"], branch: Float[Tensor, "b l d"]) -> Float[Tensor, "b l d"]:
        dropped: Tensor = self.dropout(branch)
        return x + dropped

    def decode_join(self) -> Callable[[Tensor, Tensor], Tensor]:
        is_sum = not (self.dropout.training or has_hooks(self) or has_hooks(self.dropout))
        return operator.add if is_sum else self
