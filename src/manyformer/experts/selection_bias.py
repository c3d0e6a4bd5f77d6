"""Balance without a loss: a number for each expert that is added where experts are chosen."""

from typing import final

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.device_reads import count_values
from manyformer.recompute import choose_once
from manyformer.torch_internals import compiler_disabled
from manyformer.training_hooks import PostStepUpdate


@final
class SelectionBias(nn.Module, PostStepUpdate):
    """Raised by `rate` after each step for an expert with less than the mean load, lowered for one with more.

    Wang et al. 2024 (arXiv:2408.15664, algorithm 1), as in DeepSeek-V3 (arXiv:2412.19437, section 2.1.2). It decides
    which experts are chosen and never what they weigh, gets no gradient, does not change in evaluation and is saved
    with the weights. The load is that of all processes since the last step. Raises ValueError for a negative rate."""

    bias: Tensor

    def __init__(self, num_experts: int, rate: float = 1e-3) -> None:
        super().__init__()
        if rate < 0:
            raise ValueError(f"SelectionBias: rate ({rate}) must be at least 0")
        self.rate = rate
        self.register_buffer("bias", torch.zeros(num_experts))
        self._load: Tensor | None = None

    def forward(self, scores: Float[Tensor, "n e"]) -> Float[Tensor, "n e"]:
        """The scores by which experts are chosen."""
        return scores + self.bias.to(scores.dtype)

    def count(self, experts: Int[Tensor, "n k"]) -> None:
        """Count the experts chosen in training, for the next update."""
        if self.training and self.rate:
            choose_once(lambda: self._accumulate(experts))

    @compiler_disabled
    @torch.no_grad()
    def _accumulate(self, experts: Tensor) -> None:
        load = count_values(experts, len(self.bias)).to(self.bias.dtype)
        self._load = load if self._load is None else self._load + load

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        if self._load is None:
            return
        load = self._load
        self._load = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(load)
        self.bias.add_((load.mean() - load).sign(), alpha=self.rate)

    def extra_repr(self) -> str:
        return f"{len(self.bias)} experts, rate={self.rate}"
