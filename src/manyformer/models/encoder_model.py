"""Models with one bidirectional encoder of text: their base class, and those that label rows, words and answers."""

from collections.abc import Callable
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from manyformer.base.errors import UserError
from manyformer.models.embedding import TokenEmbedding, positions_of
from manyformer.models.head import BatchLoss, BatchScore, ClassHead, apply_head, count_targets
from manyformer.models.model import B, Model, ModelOutput, max_length_of
from manyformer.models.transformers_call import ENCODER
from manyformer.nn.attention.global_summaries import PartSummaries, SummaryPrefixedLayer, SummaryTokens
from manyformer.nn.batches import IGNORE_INDEX, AnswerSpanBatch, ClassificationBatch, TaggingBatch
from manyformer.nn.batches.batch import SegmentLayout
from manyformer.nn.core import (
    PADDING_SEGMENT,
    SUMMARY_ROLE,
    Context,
    DependencyTree,
    Layer,
    LayerOutput,
    State,
    TokenPositions,
    WatchFn,
    apply_layer,
    no_watch,
)
from manyformer.nn.kernels.kernel import named_kernels
from manyformer.nn.masks import SamePart, WithRole
from manyformer.nn.masks.mask import any_node

EncoderBatch = AnswerSpanBatch | ClassificationBatch
"""A batch of one or two texts in each row."""


class EncoderModel(Model[B]):
    """An embedding, a bidirectional layer and a head; subclasses define what the head predicts."""

    call_form = ENCODER

    def __init__(self, embed: TokenEmbedding, body: Layer, head: ClassHead) -> None:
        super().__init__()
        self.embed = embed
        self.body = body
        self.head = head
        self.max_length = max_length_of(embed, body)
        masks = tuple(kernel.cache_mask for kernel in named_kernels(body).values())
        # the role of summaries is the model's own, which no caller gives
        self.uses_roles = any_node(masks, lambda part: isinstance(part, WithRole) and part.role != SUMMARY_ROLE)
        has_part_summaries = isinstance(self.summary_tokens, PartSummaries)
        has_types = embed.types is not None
        self.uses_parts = has_part_summaries or has_types or any_node(masks, lambda part: part == SamePart())

    @property
    def summary_tokens(self) -> SummaryTokens | None:
        """What places summary tokens before a text; None for a body without them."""
        if self.summary_layer is None:
            return None
        return self.summary_layer.summary_tokens

    @property
    def summary_layer(self) -> SummaryPrefixedLayer | None:
        """The body, if it puts summary tokens before a text."""
        if isinstance(self.body, SummaryPrefixedLayer):
            return self.body
        return None

    @property
    def dim(self) -> int:
        """The width of the vectors that the head reads."""
        assert isinstance(self.head, ClassHead)
        return self.head.weight.shape[1]

    def _token_positions(
        self,
        tokens: Int[Tensor, "b l"],
        segments: Int[Tensor, "b l"] | None,
        *,
        trees: Int[Tensor, "b l 3"] | None = None,
        roles: Int[Tensor, "b l"] | None = None,
        parts: Int[Tensor, "b l"] | None = None,
        layout: SegmentLayout = None,
    ) -> TokenPositions:
        """The positions of the tokens with their roles, parts and trees; `layout` is what a batch knows of segments.

        Raises ValueError for too many tokens, for shapes that disagree, and UserError for roles or parts that no
        mask uses.
        """
        positions, _ = positions_of(tokens, segments, None, layout)
        self.check_length(tokens.shape[1])
        # refused rather than ignored: a caller who gives them expects an effect
        for name, ids, is_used in (("roles", roles, self.uses_roles), ("parts", parts, self.uses_parts)):
            if ids is not None and not is_used:
                raise UserError(f"this model does not use the {name} of tokens; leave them out")
            if ids is not None and ids.shape != tokens.shape:
                raise ValueError(f"{name} {tuple(ids.shape)} must have the shape of the tokens {tuple(tokens.shape)}")
        positions = positions._replace(roles=roles, part_ids=parts)
        if trees is None:
            return positions
        if trees.shape != (*tokens.shape, 3):
            raise ValueError(f"trees {tuple(trees.shape)} must have three numbers for each of {tuple(tokens.shape)}")
        return positions._replace(tree=DependencyTree(*trees.unbind(-1)))

    def _data_positions(self, batch: EncoderBatch) -> TokenPositions:
        """The positions of a batch; data gives roles and parts to all models, of which only some use them."""
        roles = batch.roles if self.uses_roles else None
        parts = batch.parts if self.uses_parts else None
        return self._token_positions(batch.tokens, batch.segments, roles=roles, parts=parts, layout=batch.layout)

    def _encode(self, tokens: Shaped[Tensor, "b l *d"], positions: TokenPositions, watch: WatchFn) -> LayerOutput:
        return apply_layer(self.body, self.embed(tokens, positions), Context(positions, watch=watch))


class TextEncoderModel(EncoderModel[B]):
    """An encoder of texts whose tokens may have roles (1 for global tokens) and parts (numbered from 0).

    Both raise UserError for models that do not use them."""

    def forward(
        self,
        tokens: Int[Tensor, "b l"],
        segments: Int[Tensor, "b l"] | None = None,
        roles: Int[Tensor, "b l"] | None = None,
        parts: Int[Tensor, "b l"] | None = None,
        *,
        watch: WatchFn = no_watch,
        inputs_embeds: Float[Tensor, "b l d"] | None = None,
    ) -> ModelOutput:
        positions = self._token_positions(tokens, segments, roles=roles, parts=parts)
        hidden = self._hidden(tokens if inputs_embeds is None else inputs_embeds, positions, watch)
        return ModelOutput(apply_head(self.head, hidden.y), None, hidden.loss)

    def _hidden(self, tokens: Shaped[Tensor, "b l *d"], positions: TokenPositions, watch: WatchFn) -> LayerOutput:
        """What the head reads: by default a vector for each token."""
        return self._encode(tokens, positions, watch)


TokenPooling = Callable[[Float[Tensor, "b l d"], TokenPositions], Float[Tensor, "b d"]]
"""Makes one vector of the tokens of a row."""


def mean_over_tokens(x: Float[Tensor, "b l d"], positions: TokenPositions) -> Float[Tensor, "b d"]:
    """The mean over the tokens of each row without padding; zero for rows of padding only."""
    valid = (positions.segment_ids != PADDING_SEGMENT)[..., None]
    # padding may hold any number, NaN too
    return x.masked_fill(~valid, 0).sum(1) / valid.sum(1).clamp(min=1)


def first_token(x: Float[Tensor, "b l d"], positions: TokenPositions) -> Float[Tensor, "b d"]:
    """The first token of each row that is not padding; zero for rows of padding only."""
    valid = positions.segment_ids != PADDING_SEGMENT
    rows = torch.arange(len(x), device=x.device)
    return x[rows, valid.int().argmax(1)].masked_fill(~valid.any(1, keepdim=True), 0)


@final
class TextClassifier(TextEncoderModel[ClassificationBatch]):
    """Classifies each row from one vector, that `pool` makes of its tokens; logits are (b, classes).

    `roles` and `parts` are as of `MaskedLM`."""

    def __init__(
        self, embed: TokenEmbedding, body: Layer, head: ClassHead, *, pool: TokenPooling = mean_over_tokens
    ) -> None:
        super().__init__(embed, body, head)
        self.pool = pool

    def head_inputs(self, batch: ClassificationBatch, state: State) -> tuple[LayerOutput, Tensor]:
        return self._hidden(batch.tokens, self._data_positions(batch), no_watch), batch.labels

    def _hidden(self, tokens: Tensor, positions: TokenPositions, watch: WatchFn) -> LayerOutput:
        hidden = self._encode(tokens, positions, watch)
        return LayerOutput(self.pool(hidden.y, positions), None, hidden.loss)


@final
class Tagger(EncoderModel[TaggingBatch]):
    """Labels each word at its first token (as Devlin et al. 2019, section 5.3); logits are (b, l, classes).

    `trees` holds the three numbers of each token's node in the dependency tree, for tree position encodings.
    `manyformer.nn.structures` computes them from heads (`preorder_columns`); all tokens of a word share
    them."""

    def forward(
        self,
        tokens: Int[Tensor, "b l"],
        segments: Int[Tensor, "b l"] | None = None,
        trees: Int[Tensor, "b l 3"] | None = None,
        *,
        watch: WatchFn = no_watch,
        inputs_embeds: Float[Tensor, "b l d"] | None = None,
    ) -> ModelOutput:
        positions = self._token_positions(tokens, segments, trees=trees)
        hidden = self._encode(tokens if inputs_embeds is None else inputs_embeds, positions, watch)
        return ModelOutput(apply_head(self.head, hidden.y), None, hidden.loss)

    def head_inputs(self, batch: TaggingBatch, state: State) -> tuple[LayerOutput, Tensor]:
        positions = self._token_positions(batch.tokens, batch.segments, trees=batch.trees, layout=batch.layout)
        return select_targets(self._encode(batch.tokens, positions, no_watch), batch.targets, batch.scored)


@final
class SpanReader(TextEncoderModel[AnswerSpanBatch]):
    """Scores every token as the first and as the last one of an answer (Devlin et al. 2019, section 4.2).

    Logits are (b, l, 2). Both softmaxes are over the tokens of a row, so that the losses of a row are two. A question
    without an answer has the first token of the row as its span (section 4.3). `roles` are 1 for global tokens, such as
    those of the question, `parts` number the sentences; both raise ValueError for models that do not use them."""

    def row_logits(self, batch: AnswerSpanBatch) -> ModelOutput:
        """The logits (b, 2, l) of a batch, minus infinity at padding, in float32."""
        hidden = self._encode(batch.tokens, self._data_positions(batch), no_watch)
        logits = apply_head(self.head, hidden.y).float().mT
        if batch.segments is not None:
            logits = logits.masked_fill((batch.segments == PADDING_SEGMENT)[:, None], -float("inf"))
        return ModelOutput(logits, None, hidden.loss)

    def loss(self, batch: AnswerSpanBatch, *, label_smoothing: float = 0.0, state: State = None) -> BatchLoss:
        """The sum of the losses of both ends. Raises UserError for label smoothing, which would reach padding."""
        if label_smoothing:
            raise UserError(
                "loss.label_smoothing spreads over labels, and the ends of an answer are tokens; leave it 0"
            )
        logits, _, extra = self.row_logits(batch)
        return BatchLoss(_row_loss(logits, batch.targets), count_targets(batch.targets), extra)

    def score(self, batch: AnswerSpanBatch, *, state: State = None) -> BatchScore:
        logits = self.row_logits(batch).logits
        correct = (logits.argmax(-1) == batch.targets).sum()
        return BatchScore(_row_loss(logits, batch.targets).cpu().double(), count_targets(batch.targets), correct)


def _row_loss(logits: Float[Tensor, "b 2 l"], targets: Int[Tensor, "b 2"]) -> Float[Tensor, ""]:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def select_targets(
    hidden: LayerOutput, targets: Int[Tensor, "b l"], places: Int[Tensor, " n"] | None
) -> tuple[LayerOutput, Int[Tensor, " n"]]:
    """The hidden states (n, d) of the tokens that have a target, and these targets; only they need a projection.

    `places` lists them among all tokens, and may list others too; without it the host waits for their number."""
    if places is None:
        scored = targets != IGNORE_INDEX
        return LayerOutput(hidden.y[scored], hidden.state, hidden.loss), targets[scored]
    # as many as the batch says, so that a GPU need not be asked
    y = hidden.y.flatten(0, 1).index_select(0, places)
    return LayerOutput(y, hidden.state, hidden.loss), targets.flatten().index_select(0, places)
