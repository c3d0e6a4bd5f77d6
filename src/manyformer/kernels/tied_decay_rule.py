"""HGRN2's rule: the share that a memory loses of each channel is the key that is written to it."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from manyformer.kernels.memory_rules import MemoryResult, MemoryRule, RecurrenceForm, RecurrentMemory, TokenFeatures
from manyformer.kernels.recurrent_rules import decayed_sum, mask_padding
from manyformer.training_hooks import UndecayedParameters


@final
class DecayBounds(nn.Module, UndecayedParameters):
    """Lower bounds of decays that rise from layer to layer, from 0 in the first: sums of a softmax over layers.

    Qin et al. 2023 (HGRN, arXiv:2311.04823), section 3.2; all layers share the module."""

    undecayed = ("logits",)

    def __init__(self, depth: int, heads: int, width: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(depth, heads * width))
        self.heads = heads

    def of_layer(self, number: int) -> Float[Tensor, "h 1 e"]:
        """The bounds of the channels of all heads in a layer."""
        shares = self.logits.softmax(0)
        return shares[1 : number + 1].sum(0).view(self.heads, 1, -1)


@final
class TiedDecayRule(MemoryRule):
    """S_t = diag(f_t) S_(t-1) + (1 - f_t) v_t^T, f_t = bound + (1 - bound) sigmoid(x_t), x_t the layer's projected key.

    Qin et al. 2024 (HGRN2, arXiv:2404.07904), section 3.2. Bounds are those of layer `number`, 0 in the first."""

    forms = frozenset({"quadratic", "chunked", "recurrent", "fla"})

    def __init__(self, bounds: DecayBounds, number: int) -> None:
        super().__init__()
        self.bounds = bounds
        self.number = number

    def forward(
        self, tokens: TokenFeatures, memory: RecurrentMemory, *, form: RecurrenceForm, chunk: int, floor: float
    ) -> MemoryResult:
        decay = F.logsigmoid(tokens.key_features)
        if self.number:
            bound = self.bounds.of_layer(self.number)
            decay = torch.logaddexp(bound.log(), torch.log1p(-bound) + decay)
        decay = mask_padding(decay, tokens.valid)
        # 1 - exp(decay) without cancellation; it is 0 at padding
        tokens = tokens._replace(key_features=-torch.expm1(decay))
        return decayed_sum(tokens, decay, memory, form=form, chunk=chunk)

    def extra_repr(self) -> str:
        return f"layer {self.number}"
