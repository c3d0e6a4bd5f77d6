"""What models have in common that read one sequence as a whole: embed, one layer, head."""

from jaxtyping import Int
from torch import Tensor

from manyformer.batches import IGNORE
from manyformer.core import SUMMARY, Context, Layer, Out, Place, Tree, Watch, ignore
from manyformer.kernels import Kernel
from manyformer.masks import Part, Role
from manyformer.masks.base import mentions
from manyformer.mixers.summaries import EachPart, Summarised
from manyformer.models.base import Model, longest_in
from manyformer.models.embedding import Embedding
from manyformer.models.head import Head
from manyformer.models.places import locate


class Encoder(Model):
    """An embedding, a layer that sees both sides of every token, and a head; what the head is asked differs."""

    def __init__(self, embed: Embedding, body: Layer, head: Head) -> None:
        super().__init__()
        self.embed, self.body, self.head = embed, body, head
        self.longest = longest_in(embed, body)
        sights = [part.sight for part in body.modules() if isinstance(part, Kernel)]
        self._asks_roles = mentions(tuple(sights), lambda part: isinstance(part, Role) and part.number != SUMMARY)
        summaries = isinstance(body, Summarised) and isinstance(body.kinds, EachPart)
        self._asks_parts = summaries or mentions(tuple(sights), lambda part: part == Part())

    def _place(
        self,
        tokens: Int[Tensor, "b l"],
        segments: Int[Tensor, "b l"] | None,
        *,
        trees: Int[Tensor, "b l 3"] | None = None,
        roles: Int[Tensor, "b l"] | None = None,
        parts: Int[Tensor, "b l"] | None = None,
    ) -> Place:
        """Where the tokens are, and what is told of them.

        Raises ValueError where they are too many, where shapes disagree, and for roles or parts that nothing asks for.
        """
        self.check_length(tokens.shape[1])
        place, _ = locate(tokens, segments, None)
        for name, numbers, asked in (("roles", roles, self._asks_roles), ("parts", parts, self._asks_parts)):
            if numbers is not None and not asked:
                raise ValueError(f"nothing in this model asks for the {name} of tokens; leave them out")
            if numbers is not None and numbers.shape != tokens.shape:
                raise ValueError(
                    f"{name} {tuple(numbers.shape)} must have the shape of the tokens {tuple(tokens.shape)}"
                )
        place = place._replace(role=roles, part=parts)
        if trees is None:
            return place
        if trees.shape != (*tokens.shape, 3):
            raise ValueError(f"trees {tuple(trees.shape)} must have three numbers for each of {tuple(tokens.shape)}")
        return place._replace(tree=Tree(*trees.unbind(-1)))

    def _hidden(self, tokens: Int[Tensor, "b l"], place: Place, watch: Watch) -> Out:
        return self.body(self.embed(tokens, place), Context(place, watch=watch))

    def _wanted(
        self, tokens: Int[Tensor, "b l"], targets: Int[Tensor, "b l"], place: Place
    ) -> tuple[Out, Int[Tensor, " n"]]:
        """The hidden states of the tokens that have a target, and their targets: no others are worth a projection."""
        hidden = self._hidden(tokens, place, ignore)
        wanted = targets != IGNORE
        return hidden._replace(y=hidden.y[wanted]), targets[wanted]
