"""Rules after the gated delta rule: several corrections a token, gates of channels, and a weaker key that corrects."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from manyformer.nn.linear import matrix_recurrence
from manyformer.nn.linear.decay_gates import DecayGate, SoftplusDecay
from manyformer.nn.linear.matrix_recurrence import Removal
from manyformer.nn.linear.memory_rules import MemoryResult, MemoryRule, RecurrenceForm, RecurrentMemory, TokenFeatures
from manyformer.nn.linear.recurrent_rules import GateProjections, gates_of, mask_padding
from manyformer.nn.runtime.head_selection import PerHeadTensors
from manyformer.nn.runtime.length_norms import unit_length

KEY_EPSILON = 1e-6
"""Added to the square of a key's length, as in `UnitLengthFeatures`."""


@final
class HouseholderProductRule(MemoryRule):
    """S <- D_t S, then S <- S + b_j k_j (v_j - S^T k_j)^T for each of `steps` keys and values of a token.

    Siems et al. 2025 (DeltaProduct, arXiv:2502.10297), section 3: the transition of a token is a product of so many
    factors I - b k k^T. The memory decays once a token, before the first step, and is read after the last. Key and
    value of a token are those of the last step. Its gates are the decay's, a strength b of each step, `max_strength`
    times a sigmoid, then the keys of `key_dim` and the values of `value_dim` channels of the steps before. All keys
    get length 1 here. With 1 step it is `GatedDeltaRule`."""

    forms = frozenset({"chunked", "recurrent"})

    def __init__(
        self,
        decay: DecayGate,
        gate_projection: GateProjections,
        *,
        steps: int,
        key_dim: int,
        value_dim: int,
        max_strength: float = 1.0,
    ) -> None:
        super().__init__()
        self.decay = decay
        self.gate_projection = gate_projection
        self.steps = steps
        self.max_strength = max_strength
        earlier_steps = steps - 1
        self._gate_widths = [decay.gate_dim, steps, earlier_steps * key_dim, earlier_steps * value_dim]
        self.gate_dim = sum(self._gate_widths)

    def forward(
        self, tokens: TokenFeatures, memory: RecurrentMemory, *, form: RecurrenceForm, chunk: int, floor: float
    ) -> MemoryResult:
        decay_gate, strength_gate, earlier_keys, earlier_values = torch.split(gates_of(tokens), self._gate_widths, -1)
        decay = mask_padding(self.decay(decay_gate), tokens.valid)
        strength = mask_padding(self.max_strength * torch.sigmoid(strength_gate), tokens.valid)
        earlier_steps = self.steps - 1
        # every step is a token of its own: the first one decays, and the last one reads
        decay = F.pad(decay[:, :, :, None], (0, 0, 0, earlier_steps)).flatten(2, 3)
        queries = F.pad(tokens.query_features[:, :, :, None], (0, 0, earlier_steps, 0)).flatten(2, 3)
        keys = unit_length(self._in_turn(earlier_keys, tokens.key_features), eps=KEY_EPSILON)
        values = self._in_turn(earlier_values, tokens.v)
        run = tokens.run
        if run is not None:
            run = run.repeat_interleave(self.steps, 1)
        inputs = queries, keys, values, decay, run, memory.matrix
        if form == "chunked":
            y, matrix = matrix_recurrence.chunked(*inputs, strength=strength.flatten(2), chunk=chunk)
        else:
            y, matrix = matrix_recurrence.recurrent(*inputs, strength=strength.flatten(2))
        return MemoryResult(y[:, :, earlier_steps :: self.steps], RecurrentMemory(matrix))

    def _in_turn(self, earlier: Float[Tensor, "b h l me"], last: Float[Tensor, "b h l e"]) -> Float[Tensor, "b h ln e"]:
        """The vectors of all steps of all tokens, one after another."""
        side_by_side = torch.cat([earlier, last], -1)
        return side_by_side.view(*last.shape[:2], last.shape[2] * self.steps, last.shape[3])

    def extra_repr(self) -> str:
        return f"steps={self.steps}, max_strength={self.max_strength}"


@final
class EraseWriteRule(MemoryRule):
    """S_t = (I - k_t (b_t * k_t)^T) D_t S_(t-1) + k_t (w_t * v_t)^T, b of each channel of a key, w of each of a value.

    Hatamizadeh et al. 2026 (Gated DeltaNet-2, arXiv:2605.22791): the memory decays, then a token erases what it reads
    with some channels of its key, and writes some channels of its value. Gates are the decay's, of `key_dim` channels,
    then those of b, `max_strength` times a sigmoid, then those of w, of `value_dim` channels, a sigmoid. Keys must have
    length 1. With b = w, one number of a head, it is the delta rule of Kimi Delta Attention."""

    forms = frozenset({"chunked", "recurrent"})

    def __init__(
        self,
        decay: DecayGate,
        gate_projection: GateProjections,
        *,
        key_dim: int,
        value_dim: int,
        max_strength: float = 1.0,
    ) -> None:
        super().__init__()
        self.decay = decay
        self.gate_projection = gate_projection
        self.max_strength = max_strength
        self._gate_widths = [decay.gate_dim, key_dim, value_dim]
        self.gate_dim = sum(self._gate_widths)

    def forward(
        self, tokens: TokenFeatures, memory: RecurrentMemory, *, form: RecurrenceForm, chunk: int, floor: float
    ) -> MemoryResult:
        decay_gate, erase_gate, write_gate = torch.split(gates_of(tokens), self._gate_widths, -1)
        decay = mask_padding(self.decay(decay_gate), tokens.valid)
        # masked on the side that writes: what padding reads does not matter
        key = mask_padding(tokens.key_features, tokens.valid)
        erased = self.max_strength * torch.sigmoid(erase_gate) * tokens.key_features
        # removals read the memory before its decay, so that what they read it with has to decay instead
        removal = Removal(decay.exp() * erased, key)
        inputs = tokens.query_features, key, torch.sigmoid(write_gate) * tokens.v, decay, tokens.run, memory.matrix
        if form == "chunked":
            y, matrix = matrix_recurrence.chunked(*inputs, removal=removal, chunk=chunk)
        else:
            y, matrix = matrix_recurrence.recurrent(*inputs, removal=removal)
        return MemoryResult(y, RecurrentMemory(matrix))

    def extra_repr(self) -> str:
        return f"max_strength={self.max_strength}"


@final
class FeedbackDeltaRule(MemoryRule, PerHeadTensors):
    """S_t = a_t S_(t-1) + b_t k_t (v_t - (a_t S_(t-1))^T p_t)^T, p_t = sigmoid(d) k_t, read as S_t^T (q_t - c p_t).

    Hu et al. 2025 (Comba, arXiv:2506.02475): the key p by which a token is corrected is weaker than the key that
    writes, and the query is corrected by it too. d and c are numbers of a head; d begins at 1, c at `correction`. Gates
    are the decay's and the strength's, whose sigmoid is b. Queries and keys must have length 1, queries divided by the
    root of their width; so is p where it corrects them. Released code gives p length 1, which cancels d."""

    forms = frozenset({"chunked", "recurrent"})
    head_axes = (("feedback", -1), ("correction", -1))

    def __init__(self, heads: int, gate_projection: GateProjections, *, correction: float = 1.0) -> None:
        super().__init__()
        self.decay = SoftplusDecay(heads)
        self.gate_projection = gate_projection
        self.gate_dim = self.decay.gate_dim + 1
        self.feedback = nn.Parameter(torch.ones(heads))
        self.correction = nn.Parameter(torch.full((heads,), correction))

    def forward(
        self, tokens: TokenFeatures, memory: RecurrentMemory, *, form: RecurrenceForm, chunk: int, floor: float
    ) -> MemoryResult:
        decay_gate, strength_gate = torch.split(gates_of(tokens), [self.decay.gate_dim, 1], -1)
        decay = mask_padding(self.decay(decay_gate), tokens.valid)
        strength = mask_padding(torch.sigmoid(strength_gate), tokens.valid)
        share = torch.sigmoid(self.feedback)[:, None, None]
        keys = tokens.key_features
        reads = self.correction[:, None, None] * share * keys.shape[-1] ** -0.5
        queries = tokens.query_features - reads * keys
        # b k (v - s S^T k) = b s k (v / s - S^T k): the delta rule of keys k with other strengths and values
        inputs = queries, keys, tokens.v / share, decay, tokens.run, memory.matrix
        strength = (strength * share)[..., 0]
        if form == "chunked":
            y, matrix = matrix_recurrence.chunked(*inputs, strength=strength, chunk=chunk)
        else:
            y, matrix = matrix_recurrence.recurrent(*inputs, strength=strength)
        return MemoryResult(y, RecurrentMemory(matrix))
