"""Output classifiers for a stack that tokens may leave after any layer."""

from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.depth.leaving import parted
from manyformer.hooks import Added, Around
from manyformer.models.base import Loss, Score
from manyformer.models.output import Output


@final
class Exits(Output, Around):
    """One classifier for all layers, or one for each (Elbayad et al. 2020, section 3.1: tied or untied W_n).

    What it is given ends in a channel that says after which layer each token left, from 1 on. `last` is for the last
    layer, and for all others where `own` has none for each of them.
    """

    inside = "last"

    def __init__(self, last: Output, own: Sequence[Output] = ()) -> None:
        super().__init__()
        self.last, self.classes = last, last.classes
        self.own = Own(own)

    def forward(self, x: Float[Tensor, "*b m"]) -> Float[Tensor, "*b v"]:
        y, depth = parted(x)
        if not len(self.own):
            found: Tensor = self.last(y)
            return found
        order, parts = self._sorted(y.flatten(0, -2), depth.flatten())
        logits = torch.cat([head(part) for head, part in parts])
        return logits[order.argsort()].view(*y.shape[:-1], -1)

    def at(self, ready: Float[Tensor, "*b d"], number: int) -> Float[Tensor, "*b v"]:
        """The logits of tokens that all leave after layer `number`."""
        found: Tensor = (self.own[number - 1] if number <= len(self.own) else self.last)(ready)
        return found

    def loss(self, x: Float[Tensor, "*b m"], targets: Int[Tensor, "*b"], *, smoothing: float) -> Loss:
        y, depth = parted(x)
        if not len(self.own):
            return self.last.loss(y, targets, smoothing=smoothing)
        order, parts = self._sorted(y.flatten(0, -2), depth.flatten())
        wanted = torch.split(targets.flatten()[order], [len(part) for _, part in parts])
        losses = [head.loss(part, some, smoothing=smoothing) for (head, part), some in zip(parts, wanted)]
        return Loss(
            torch.stack([one.total for one in losses]).sum(), torch.stack([one.targets for one in losses]).sum()
        )

    def score(self, x: Float[Tensor, "*b m"], targets: Int[Tensor, "*b"]) -> Score:
        return super().score(x, targets) if len(self.own) else self.last.score(parted(x)[0], targets)

    def _sorted(
        self, y: Float[Tensor, "n d"], depth: Int[Tensor, " n"]
    ) -> tuple[Int[Tensor, " n"], list[tuple[Output, Float[Tensor, "k d"]]]]:
        """The order of tokens by the layers that they left after, and each layer's tokens with its classifier."""
        heads: list[Output] = [*self.own, self.last]
        counts = torch.bincount(depth, minlength=len(heads) + 1)[1:].tolist()
        order = depth.argsort(stable=True)
        # also those without tokens: processes that average gradients wait for one of every weight
        return order, list(zip(heads, torch.split(y[order], counts)))


@final
class Own(nn.ModuleList, Added):
    """The classifiers of all layers but the last, which a model may have been trained without."""
