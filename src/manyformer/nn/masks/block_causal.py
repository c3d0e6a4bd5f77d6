"""The mask of block diffusion: both sides within a block, causal across blocks, with a noisy copy beside the text."""

from dataclasses import dataclass
from typing import final

from jaxtyping import Bool
from torch import Tensor

from manyformer.nn.core import TokenPositions
from manyformer.nn.masks.mask import Mask, TokenBounds, VisibilityBounds, roles_of

CLEAN_ROLE = 0
"""The role of the tokens of a text."""

NOISY_ROLE = 1
"""The role of the tokens of its copy, of which some are hidden, at the same positions."""


@final
@dataclass(frozen=True)
class BlockCausal(Mask):
    """The tokens of the query's own block of `size` positions, and the clean ones of all blocks before it.

    Of a text beside its noisy copy (Arriola et al. 2025, arXiv:2503.09573, section 3.2 and appendix B), a noisy token
    sees the noisy ones of its block, a clean token the clean ones. Tokens without roles are clean; with a size of 1
    these are then as with `Causal()`. Blocks begin at the first token of a document.
    """

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"{self!r}: size must be at least 1")

    def __call__(self, h: Tensor, q: TokenPositions, k: TokenPositions) -> Bool[Tensor, "..."]:
        query_block = q.position_ids // self.size
        key_block = k.position_ids // self.size
        # without roles on either side there is nothing to compare, as in every step of decoding
        if q.roles is None and k.roles is None:
            return key_block <= query_block
        own_block = (key_block == query_block) & (roles_of(k) == roles_of(q))
        return own_block | ((key_block < query_block) & (roles_of(k) == CLEAN_ROLE))

    def bounds(self, q: TokenBounds, k: TokenBounds) -> VisibilityBounds:
        q_first, q_last, k_first, k_last = (bound // self.size for bound in (q.first, q.last, k.first, k.last))
        (q_role_low, q_role_high), (k_role_low, k_role_high) = q.roles, k.roles
        may_share_role = (q_role_low <= k_role_high) & (k_role_low <= q_role_high)
        one_role = (q_role_low == q_role_high) & (k_role_low == k_role_high) & (q_role_low == k_role_low)
        may_be_clean = (k_role_low <= CLEAN_ROLE) & (k_role_high >= CLEAN_ROLE)
        surely_clean = (k_role_low == CLEAN_ROLE) & (k_role_high == CLEAN_ROLE)
        own_block = VisibilityBounds(
            (k_first <= q_last) & (q_first <= k_last) & may_share_role,
            (q_first == q_last) & (k_first == k_last) & (q_first == k_first) & one_role,
        )
        before = VisibilityBounds((k_first < q_last) & may_be_clean, (k_last < q_first) & surely_clean)
        visible = own_block.either(before)
        # clean tokens see their block and those before it, at whatever border of the two
        all_clean = surely_clean & (q_role_low == CLEAN_ROLE) & (q_role_high == CLEAN_ROLE)
        return VisibilityBounds(visible.any_visible, visible.all_visible | (all_clean & (k_last <= q_first)))

    def __repr__(self) -> str:
        return f"BlockCausal({self.size})"
