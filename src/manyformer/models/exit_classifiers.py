"""Output classifiers for a stack that tokens may leave after any layer."""

from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.depth.early_exit_stack import split_exit_layer
from manyformer.models.model import BatchLoss, BatchScore
from manyformer.models.output_head import OutputHead
from manyformer.training_hooks import OptionalOnLoad, WrapsLoadedModule


@final
class ExitClassifiers(OutputHead, WrapsLoadedModule):
    """One classifier for all layers, or one for each (Elbayad et al. 2020, section 3.1: tied or untied W_n).

    What it is given ends in a channel that says after which layer each token left, from 1 on. `shared` is for the last
    layer, and for all others where `per_layer` has none for each of them.
    """

    wrapped_name = "last"

    def __init__(self, shared: OutputHead, per_layer: Sequence[OutputHead] = ()) -> None:
        super().__init__()
        self.shared, self.classes = shared, shared.classes
        self.per_layer = PerLayerClassifiers(per_layer)

    def forward(self, x: Float[Tensor, "*b m"]) -> Float[Tensor, "*b v"]:
        y, depth = split_exit_layer(x)
        if not len(self.per_layer):
            found: Tensor = self.shared(y)
            return found
        order, parts = self._sorted(y.flatten(0, -2), depth.flatten())
        logits = torch.cat([head(part) for head, part in parts])
        return logits[order.argsort()].view(*y.shape[:-1], -1)

    def at(self, ready: Float[Tensor, "*b d"], number: int) -> Float[Tensor, "*b v"]:
        """The logits of tokens that all leave after layer `number`."""
        found: Tensor = (self.per_layer[number - 1] if number <= len(self.per_layer) else self.shared)(ready)
        return found

    def loss(self, x: Float[Tensor, "*b m"], targets: Int[Tensor, "*b"], *, smoothing: float) -> BatchLoss:
        y, depth = split_exit_layer(x)
        if not len(self.per_layer):
            return self.shared.loss(y, targets, smoothing=smoothing)
        order, parts = self._sorted(y.flatten(0, -2), depth.flatten())
        wanted = torch.split(targets.flatten()[order], [len(part) for _, part in parts])
        losses = [head.loss(part, some, smoothing=smoothing) for (head, part), some in zip(parts, wanted)]
        return BatchLoss(
            torch.stack([one.total for one in losses]).sum(), torch.stack([one.targets for one in losses]).sum()
        )

    def score(self, x: Float[Tensor, "*b m"], targets: Int[Tensor, "*b"]) -> BatchScore:
        return super().score(x, targets) if len(self.per_layer) else self.shared.score(split_exit_layer(x)[0], targets)

    def _sorted(
        self, y: Float[Tensor, "n d"], depth: Int[Tensor, " n"]
    ) -> tuple[Int[Tensor, " n"], list[tuple[OutputHead, Float[Tensor, "k d"]]]]:
        """The order of tokens by the layers that they left after, and each layer's tokens with its classifier."""
        heads: list[OutputHead] = [*self.per_layer, self.shared]
        counts = torch.bincount(depth, minlength=len(heads) + 1)[1:].tolist()
        order = depth.argsort(stable=True)
        # also those without tokens: processes that average gradients wait for one of every weight
        return order, list(zip(heads, torch.split(y[order], counts)))


@final
class PerLayerClassifiers(nn.ModuleList, OptionalOnLoad):
    """The classifiers of all layers but the last, which a model may have been trained without."""
