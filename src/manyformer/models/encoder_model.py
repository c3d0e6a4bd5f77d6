"""What models have in common that read one sequence as a whole: embed, one layer, head."""

from jaxtyping import Int
from torch import Tensor

from manyformer.batches import IGNORE_INDEX
from manyformer.core import SUMMARY_ROLE, Context, DependencyTree, Layer, LayerOutput, TokenPositions, WatchFn, no_watch
from manyformer.kernels import Kernel
from manyformer.masks import SamePart, WithRole
from manyformer.masks.mask import any_node
from manyformer.mixers.global_summaries import PartSummaries, SummaryPrefixedLayer
from manyformer.models.embedding import TokenEmbedding
from manyformer.models.head import ClassHead
from manyformer.models.model import Model, longest_in
from manyformer.models.token_positions import positions_of


class EncoderModel(Model):
    """An embedding, a layer that sees both sides of every token, and a head; what the head is asked differs."""

    def __init__(self, embed: TokenEmbedding, body: Layer, head: ClassHead) -> None:
        super().__init__()
        self.embed, self.body, self.head = embed, body, head
        self.max_length = longest_in(embed, body)
        sights = [part.cache_mask for part in body.modules() if isinstance(part, Kernel)]
        self._asks_roles = any_node(
            tuple(sights), lambda part: isinstance(part, WithRole) and part.number != SUMMARY_ROLE
        )
        summaries = isinstance(body, SummaryPrefixedLayer) and isinstance(body.kinds, PartSummaries)
        self._asks_parts = summaries or any_node(tuple(sights), lambda part: part == SamePart())

    def _place(
        self,
        tokens: Int[Tensor, "b l"],
        segments: Int[Tensor, "b l"] | None,
        *,
        trees: Int[Tensor, "b l 3"] | None = None,
        roles: Int[Tensor, "b l"] | None = None,
        parts: Int[Tensor, "b l"] | None = None,
    ) -> TokenPositions:
        """Where the tokens are, and what is told of them.

        Raises ValueError where they are too many, where shapes disagree, and for roles or parts that nothing asks for.
        """
        self.check_length(tokens.shape[1])
        place, _ = positions_of(tokens, segments, None)
        for name, numbers, asked in (("roles", roles, self._asks_roles), ("parts", parts, self._asks_parts)):
            if numbers is not None and not asked:
                raise ValueError(f"nothing in this model asks for the {name} of tokens; leave them out")
            if numbers is not None and numbers.shape != tokens.shape:
                raise ValueError(
                    f"{name} {tuple(numbers.shape)} must have the shape of the tokens {tuple(tokens.shape)}"
                )
        place = place._replace(roles=roles, part_ids=parts)
        if trees is None:
            return place
        if trees.shape != (*tokens.shape, 3):
            raise ValueError(f"trees {tuple(trees.shape)} must have three numbers for each of {tuple(tokens.shape)}")
        return place._replace(tree=DependencyTree(*trees.unbind(-1)))

    def _hidden(self, tokens: Int[Tensor, "b l"], positions: TokenPositions, watch: WatchFn) -> LayerOutput:
        return self.body(self.embed(tokens, positions), Context(positions, watch=watch))

    def _wanted(
        self, tokens: Int[Tensor, "b l"], targets: Int[Tensor, "b l"], positions: TokenPositions
    ) -> tuple[LayerOutput, Int[Tensor, " n"]]:
        """The hidden states of the tokens that have a target, and their targets: no others are worth a projection."""
        hidden = self._hidden(tokens, positions, no_watch)
        wanted = targets != IGNORE_INDEX
        return hidden._replace(y=hidden.y[wanted]), targets[wanted]
