"""The batch of a masked diffusion: a clean text, and the random numbers that decide which of its tokens are hidden."""

from typing import NamedTuple, Self

from jaxtyping import Float, Int64
from torch import Tensor

from manyformer.nn.batches.batch import SegmentLayout, count_scored, ignore_all


class NoisedBatch(NamedTuple):
    """Rows of a text that a model hides parts of: `targets` are the tokens themselves, or `IGNORE_INDEX`.

    Only a token with a target may be hidden; all others, such as the start of a document, are given. `noise` are two
    numbers from 0 to 1 for each token: the first is a noise level, of which a model reads the one at the first token of
    what shares a level, the second is compared with the level to decide whether the token is hidden. With the numbers
    in the batch, a resumed run and any number of processes hide the same tokens.
    """

    tokens: Int64[Tensor, "b l"]
    targets: Int64[Tensor, "b l"]
    noise: Float[Tensor, "b l 2"]
    segments: Int64[Tensor, "b l"] | None = None
    layout: SegmentLayout = None

    def target_count(self) -> int:
        return count_scored(self.targets)

    def token_count(self) -> int:
        return self.target_count()

    def ignored(self) -> Self:
        return self._replace(targets=ignore_all(self.targets))
