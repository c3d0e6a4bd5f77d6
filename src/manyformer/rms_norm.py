"""The root mean square norm of the recipes."""

from typing import final

from jaxtyping import Float
from torch import Tensor, nn

from manyformer.ops import length_norms


@final
class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` over the last dimension, whose training on a CPU takes a third of the time."""

    def forward(self, x: Float[Tensor, "*n e"]) -> Float[Tensor, "*n e"]:
        return length_norms.rms_norm(x, self.weight, eps=self.eps)
