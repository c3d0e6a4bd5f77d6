"""The base class of models with one bidirectional encoder: embedding, layer, head."""

from jaxtyping import Int
from torch import Tensor

from manyformer.batches import IGNORE_INDEX
from manyformer.core import SUMMARY_ROLE, Context, Layer, LayerOutput, TokenPositions, WatchFn
from manyformer.kernels import Kernel
from manyformer.masks import SamePart, WithRole
from manyformer.masks.mask import any_node
from manyformer.mixers.global_summaries import PartSummaries, SummaryPrefixedLayer
from manyformer.models.embedding import TokenEmbedding
from manyformer.models.head import ClassHead
from manyformer.models.model import B, Model, max_length_of
from manyformer.models.token_inputs import apply_layer
from manyformer.models.token_positions import positions_of
from manyformer.token_structures import DependencyTree


class EncoderModel(Model[B]):
    """An embedding, a bidirectional layer and a head; subclasses define what the head predicts."""

    def __init__(self, embed: TokenEmbedding, body: Layer, head: ClassHead) -> None:
        super().__init__()
        self.embed, self.body, self.head = embed, body, head
        self.max_length = max_length_of(embed, body)
        masks = tuple(part.cache_mask for part in body.modules() if isinstance(part, Kernel))
        self._uses_roles = any_node(masks, lambda part: isinstance(part, WithRole) and part.role != SUMMARY_ROLE)
        has_part_summaries = isinstance(body, SummaryPrefixedLayer) and isinstance(body.summary_tokens, PartSummaries)
        self._uses_parts = has_part_summaries or any_node(masks, lambda part: part == SamePart())

    def _token_positions(
        self,
        tokens: Int[Tensor, "b l"],
        segments: Int[Tensor, "b l"] | None,
        *,
        trees: Int[Tensor, "b l 3"] | None = None,
        roles: Int[Tensor, "b l"] | None = None,
        parts: Int[Tensor, "b l"] | None = None,
    ) -> TokenPositions:
        """The positions of the tokens with their roles, parts and trees.

        Raises ValueError for too many tokens, for shapes that disagree, and for roles or parts that no mask uses.
        """
        positions, _ = positions_of(tokens, segments, None)
        self.check_length(tokens.shape[1])
        for name, ids, is_used in (("roles", roles, self._uses_roles), ("parts", parts, self._uses_parts)):
            if ids is not None and not is_used:
                raise ValueError(f"this model does not use the {name} of tokens; leave them out")
            if ids is not None and ids.shape != tokens.shape:
                raise ValueError(f"{name} {tuple(ids.shape)} must have the shape of the tokens {tuple(tokens.shape)}")
        positions = positions._replace(roles=roles, part_ids=parts)
        if trees is None:
            return positions
        if trees.shape != (*tokens.shape, 3):
            raise ValueError(f"trees {tuple(trees.shape)} must have three numbers for each of {tuple(tokens.shape)}")
        return positions._replace(tree=DependencyTree(*trees.unbind(-1)))

    def _encode(self, tokens: Int[Tensor, "b l"], positions: TokenPositions, watch: WatchFn) -> LayerOutput:
        return apply_layer(self.body, self.embed(tokens, positions), Context(positions, watch=watch))


def select_targets(hidden: LayerOutput, targets: Int[Tensor, "b l"]) -> tuple[LayerOutput, Int[Tensor, " n"]]:
    """The hidden states (n, d) of the tokens that have a target, and these targets; only they need a projection."""
    scored = targets != IGNORE_INDEX
    return hidden._replace(y=hidden.y[scored]), targets[scored]
