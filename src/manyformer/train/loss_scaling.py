"""Loss scaling for float16, in which small gradients would become 0: gradients are those of the loss times a scale."""

from typing import NamedTuple, final

import torch
from torch import Tensor

from manyformer.files.json_records import Count
from manyformer.torch_internals import overflow_of

MAX_OVERFLOWS_IN_ROW = 25
"""Steps with an overflow one after another that end a run: the scale is then below 0.002, and not the cause."""


class LossScale(NamedTuple):
    """The state of a `LossScaler`: the scale, and the steps without an overflow since it last changed."""

    scale: float
    steps_since_change: Count


@final
class LossScaler:
    """torch's GradScaler for one optimizer: an overflow skips the step and halves the scale; 2,000 steps without one
    double it.

    Gradients are the same in all processes, or sharded among them and looked at together, so that all of them skip the
    same steps and have the same scale."""

    def __init__(self, device: torch.device) -> None:
        self._scaler = torch.amp.GradScaler(device.type)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to differentiate."""
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def unscale(self, optimizer: torch.optim.Optimizer) -> Tensor | None:
        """Divide the gradients by the scale; returns a number above 0 if one is not finite, None if there is none."""
        if all(weight.grad is None for group in optimizer.param_groups for weight in group["params"]):
            return None
        self._scaler.unscale_(optimizer)
        return overflow_of(self._scaler, optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the step of the optimizer, unless the gradients have overflowed."""
        self._scaler.step(optimizer)

    def update(self) -> None:
        """Change the scale after a step whose gradients were unscaled, made or not."""
        self._scaler.update()

    @property
    def state(self) -> LossScale:
        """The scale and what decides its next change; reads from the device."""
        content = self._scaler.state_dict()
        return LossScale(content["scale"], content["_growth_tracker"])

    @state.setter
    def state(self, state: LossScale) -> None:
        content = self._scaler.state_dict()
        self._scaler.load_state_dict({**content, "scale": state.scale, "_growth_tracker": state.steps_since_change})
