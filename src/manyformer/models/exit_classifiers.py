"""Output classifiers of an early-exit stack, whose tokens may exit after any layer."""

from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.models.head import BatchLoss, BatchScore, OutputHead
from manyformer.nn.depth.exit_rules import split_exit_layer
from manyformer.nn.runtime.handwritten_gradient import hides_values
from manyformer.nn.runtime.training_hooks import OptionalOnLoad, WrapsLoadedModule


@final
class ExitClassifiers(OutputHead, WrapsLoadedModule):
    """One classifier for all layers, or one per layer (Elbayad et al. 2020, section 3.1: tied or untied W_n).

    The last channel of the input is the number of the layer, from 1, after which each token exited. `shared` is the
    classifier of the last layer, and of all layers if `per_layer` is empty. With `aligned` training no token exits
    early while the model trains, which spares a GPU being asked where they did.
    """

    wrapped_name = "shared"

    def __init__(self, shared: OutputHead, per_layer: Sequence[OutputHead] = (), *, aligned: bool = False) -> None:
        super().__init__()
        self.shared = shared
        self.classes = shared.classes
        self.aligned = aligned
        self.per_layer = PerLayerClassifiers(per_layer)

    def forward(self, x: Float[Tensor, "*b m"]) -> Float[Tensor, "*b v"]:
        y, depth = split_exit_layer(x)
        if not len(self.per_layer):
            shared_logits: Tensor = self.shared(y)
            return shared_logits
        if hides_values():
            # how many tokens exit at a layer is not known: all classifiers see all of them
            of_all = torch.stack([head(y) for head in self._heads()], -2)
            places = (depth.long() - 1)[..., None, None].expand(*depth.shape, 1, of_all.shape[-1])
            chosen: Tensor = of_all.gather(-2, places)
            return chosen[..., 0, :]
        order, groups = self._group_by_layer(y.flatten(0, -2), depth.flatten())
        logits = torch.cat([head(part) for head, part in groups])
        return logits[order.argsort()].view(*y.shape[:-1], -1)

    def logits_at(self, classifier_input: Float[Tensor, "*b d"], layer: int) -> Float[Tensor, "*b v"]:
        """The logits of tokens that all exit after layer number `layer`."""
        logits: Tensor = (self.per_layer[layer - 1] if layer <= len(self.per_layer) else self.shared)(classifier_input)
        return logits

    def loss(self, x: Float[Tensor, "*b m"], targets: Int[Tensor, "*b"], *, label_smoothing: float) -> BatchLoss:
        if self.training and self.aligned:
            return self.loss_at(x, len(self.per_layer) + 1, targets, label_smoothing=label_smoothing)
        y, depth = split_exit_layer(x)
        if not len(self.per_layer):
            return self.shared.loss(y, targets, label_smoothing=label_smoothing)
        order, groups = self._group_by_layer(y.flatten(0, -2), depth.flatten())
        # targets in the order of the tokens, which are sorted by their exit layer
        return _sum_losses(groups, targets.flatten()[order], label_smoothing=label_smoothing)

    def loss_at(
        self, x: Float[Tensor, "*b m"], layer: int, targets: Int[Tensor, "*b"], *, label_smoothing: float
    ) -> BatchLoss:
        """`loss` for tokens that all exit after layer number `layer`."""
        y = split_exit_layer(x)[0].flatten(0, -2)
        number = min(layer, len(self.per_layer) + 1)
        # all other classifiers get no token, but a gradient of zero, as distributed training needs
        groups = [(head, y if index == number else y[:0]) for index, head in enumerate(self._heads(), 1)]
        return _sum_losses(groups, targets.flatten(), label_smoothing=label_smoothing)

    def score(self, x: Float[Tensor, "*b m"], targets: Int[Tensor, "*b"]) -> BatchScore:
        if len(self.per_layer):
            return super().score(x, targets)
        return self.shared.score(split_exit_layer(x)[0], targets)

    def _group_by_layer(
        self, y: Float[Tensor, "n d"], depth: Int[Tensor, " n"]
    ) -> tuple[Int[Tensor, " n"], list[tuple[OutputHead, Float[Tensor, "k d"]]]]:
        """The order of tokens by exit layer, and the classifier and tokens of each layer."""
        heads = self._heads()
        counts = torch.bincount(depth, minlength=len(heads) + 1)[1:].tolist()
        order = depth.argsort(stable=True)
        # also layers without tokens: with distributed training every parameter must receive a gradient
        return order, list(zip(heads, torch.split(y[order], counts)))

    def _heads(self) -> list[OutputHead]:
        """The classifiers of all layers that have their own, in order, and of the others."""
        return [*self.per_layer, self.shared]


def exit_logits(head: OutputHead, stream: Float[Tensor, "*b m"], layer: int) -> Float[Tensor, "*b v"]:
    """The logits of the output of layer number `layer`, or of a pass in which tokens exited where they did."""
    if isinstance(head, ExitClassifiers) and head.aligned:
        return head.logits_at(split_exit_layer(stream)[0], layer)
    logits: Tensor = head(stream)
    return logits


def exit_loss(
    head: OutputHead, stream: Float[Tensor, "*b m"], layer: int, targets: Int[Tensor, "*b"], *, label_smoothing: float
) -> BatchLoss:
    """The loss of the output of layer number `layer`, or of a pass in which tokens exited where they did."""
    if isinstance(head, ExitClassifiers) and head.aligned:
        return head.loss_at(stream, layer, targets, label_smoothing=label_smoothing)
    return head.loss(stream, targets, label_smoothing=label_smoothing)


def _sum_losses(
    groups: Sequence[tuple[OutputHead, Float[Tensor, "_ d"]]], targets: Int[Tensor, " n"], *, label_smoothing: float
) -> BatchLoss:
    """The loss of the tokens of each group with its classifier, and the targets in the order of the groups."""
    group_targets = torch.split(targets, [len(part) for _, part in groups])
    losses = [
        head.loss(group, labels, label_smoothing=label_smoothing)
        for (head, group), labels in zip(groups, group_targets)
    ]
    total, count, *_ = zip(*losses)
    return BatchLoss(torch.stack(total).sum(), torch.stack(count).sum())


@final
class PerLayerClassifiers(nn.ModuleList, OptionalOnLoad):
    """The classifiers of all layers but the last, which a model may have been trained without."""
