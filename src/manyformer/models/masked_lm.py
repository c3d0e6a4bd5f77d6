"""A masked language model: an encoder that predicts masked tokens, and ETC's second objective for its pre-training.

That objective is contrastive predictive coding of masked parts of a text by their summaries.
"""

from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.models.embedding import TokenEmbedding, positions_of
from manyformer.models.encoder_model import TextEncoderModel, select_targets
from manyformer.models.head import BatchLoss, ClassHead
from manyformer.nn.attention.global_summaries import PartSummaries, SummaryPrefixedLayer
from manyformer.nn.batches import IGNORE_INDEX, MaskedLMBatch
from manyformer.nn.core import (
    PADDING_SEGMENT,
    Context,
    Layer,
    LayerOutput,
    PrefixedLayout,
    State,
    TokenPositions,
    no_watch,
)
from manyformer.nn.masks.mask import part_ids_of
from manyformer.nn.ops.static_layout import materialize
from manyformer.nn.runtime.devices import send
from manyformer.nn.runtime.torch_internals import compiler_disabled

DRAWN_MASK_ID = 4
"""The mask of drawn batches, which come from no tokenizer; others bring that of theirs."""


@final
@dataclass(frozen=True)
class PartContrastiveLoss:
    """Contrastive predictive coding (Ainslie et al. 2020, arXiv:2004.08483, pre-training tasks).

    In documents of several parts, each part is masked entirely with probability `mask_rate`, and at least two parts of
    the batch are. The summary of a masked part in its document must match the summary that the same model computes for
    that part in isolation, among all masked parts of the batch: cross entropy over their dot products, scaled like
    attention scores. It makes up `loss_fraction` of the total loss, that of the masked tokens the remaining fraction.
    """

    loss_fraction: float = 0.2
    mask_rate: float = 0.1

    def __post_init__(self) -> None:
        if not (0 < self.loss_fraction < 1 and 0 < self.mask_rate < 1):
            raise ValueError(f"{self!r}: loss_fraction and mask_rate must lie between 0 and 1")

    # the number and lengths of the masked parts vary from call to call
    @compiler_disabled
    def __call__(
        self, embed: TokenEmbedding, body: SummaryPrefixedLayer, batch: MaskedLMBatch, positions: TokenPositions
    ) -> tuple[LayerOutput, Tensor]:
        """The output of `body` for the text with masked parts, and the loss, to be added to a mean token loss."""
        prefixed = body.prefixed_positions(positions, len(batch.tokens))
        assert isinstance(prefixed.layout, PrefixedLayout)
        device = prefixed.position_ids.device
        prefix = prefixed.layout.prefix
        if device.type == "meta":
            # beside shapes, numbers of the host may stay there
            device = torch.device("cpu")
        if prefixed.layout.text_layout is not None:
            # the layout says what the tensors say, and the host then knows what it chooses
            on_host = materialize(prefixed.layout, prefixed.position_ids.shape[1], torch.device("cpu"))
            prefixed = TokenPositions(*(_expand(field, len(batch.tokens)) for field in on_host))
        summaries = prefixed.columns(0, prefix)
        text = prefixed.columns(prefix, prefixed.position_ids.shape[1])
        chosen = self._choose_parts(summaries)
        same_document = text.segment_ids[:, :, None] == summaries.segment_ids[:, None]
        belongs = same_document & (part_ids_of(text)[:, :, None] == part_ids_of(summaries)[:, None])
        is_masked = send((belongs & chosen[:, None]).any(-1), device)
        mask = DRAWN_MASK_ID if batch.mask is None else batch.mask[:, None]
        masked_tokens = torch.where(is_masked, mask, batch.tokens)
        output = body.summaries_and_text(embed(masked_tokens, positions), Context(positions))
        rows, part_indices = chosen.nonzero(as_tuple=True)
        if not len(rows):
            return output.text, output.summaries.new_zeros(())
        original = torch.where(batch.targets == IGNORE_INDEX, batch.tokens, batch.targets)
        columns, valid = _columns_of_parts(belongs[rows, :, part_indices])
        flat_columns = rows[:, None] * original.shape[1] + columns
        tokens = original.flatten()[send(flat_columns, device)]
        isolated = _encode_isolated(embed, body, tokens, send(valid, device))
        hidden = output.summaries.flatten(0, 1).index_select(0, send(rows * prefix + part_indices, device))
        scores = hidden @ isolated.mT * isolated.shape[-1] ** -0.5
        labels = torch.arange(len(rows), device=scores.device)
        return output.text, F.cross_entropy(scores, labels) * (self.loss_fraction / (1 - self.loss_fraction))

    def _choose_parts(self, summaries: TokenPositions) -> Bool[Tensor, "b n"]:
        """The parts to mask; never the only part of a document, which has no context to predict it from."""
        eligible = (summaries.segment_ids[:, :, None] == summaries.segment_ids[:, None]).sum(-1) > 1
        eligible = eligible & (summaries.segment_ids != PADDING_SEGMENT)
        if not eligible.any():
            return eligible
        # eligible parts come from documents of at least two, so that there is a second smallest draw
        draws = torch.rand(summaries.segment_ids.shape, device=summaries.segment_ids.device)
        return eligible & (draws <= draws[eligible].kthvalue(2).values.clamp(min=self.mask_rate))


def _expand(field: Any, rows: int) -> Any:
    if isinstance(field, Tensor):
        return field.expand(rows, -1)
    return field


def _columns_of_parts(belongs: Bool[Tensor, "n l"]) -> tuple[Int[Tensor, "n m"], Bool[Tensor, "n m"]]:
    """The columns of the tokens of each part, packed to the left, and which entries are tokens."""
    columns = (~belongs).long().argsort(dim=1, stable=True)[:, : int(belongs.sum(1).max())]
    return columns, belongs.gather(1, columns)


def _encode_isolated(
    embed: TokenEmbedding, body: SummaryPrefixedLayer, tokens: Int[Tensor, "n l"], valid: Bool[Tensor, "n l"]
) -> Float[Tensor, "n d"]:
    """The summaries of parts, each encoded as a document of its own."""
    positions = positions_of(tokens, torch.where(valid, 0, PADDING_SEGMENT), None)[0]
    positions = positions._replace(part_ids=torch.zeros_like(tokens))
    return body.summaries_and_text(embed(tokens, positions), Context(positions), max_parts=1).summaries[:, 0]


@final
class MaskedLM(TextEncoderModel[MaskedLMBatch]):
    """Predicts masked tokens (Devlin et al. 2019, section 3.1): `logits[:, i]` are the logits of token i itself.

    `roles` are 1 for global tokens, and `parts` number the parts (such as sentences) of a document from 0; both raise
    ValueError for models that do not use them. `contrast` is an additional training loss, for bodies with summaries.
    """

    def __init__(
        self, embed: TokenEmbedding, body: Layer, head: ClassHead, *, contrast: PartContrastiveLoss | None = None
    ) -> None:
        super().__init__(embed, body, head)
        if contrast is not None and not isinstance(self.summary_tokens, PartSummaries):
            raise ValueError(f"the contrastive loss needs summaries of parts, and a {type(body).__name__} has none")
        self.contrast = contrast

    def head_inputs(self, batch: MaskedLMBatch, state: State) -> tuple[LayerOutput, Tensor]:
        hidden = self._encode(batch.tokens, self._batch_positions(batch), no_watch)
        return select_targets(hidden, batch.targets, batch.scored)

    def loss(self, batch: MaskedLMBatch, *, label_smoothing: float = 0.0, state: State = None) -> BatchLoss:
        if self.contrast is None:
            return super().loss(batch, label_smoothing=label_smoothing)
        assert self.summary_layer is not None
        positions = self._batch_positions(batch)
        hidden, contrastive_loss = self.contrast(self.embed, self.summary_layer, batch, positions)
        # in training both losses share one pass, in which the contrastive loss masks additional tokens
        if not self.training:
            hidden = self._encode(batch.tokens, positions, no_watch)
        scored_hidden, targets = select_targets(hidden, batch.targets, batch.scored)
        loss = self.head.loss(scored_hidden.y, targets, label_smoothing=label_smoothing)
        return BatchLoss(loss.total, loss.targets, hidden.loss + contrastive_loss)

    def _batch_positions(self, batch: MaskedLMBatch) -> TokenPositions:
        roles = batch.roles
        parts = batch.parts
        layout = batch.layout
        return self._token_positions(batch.tokens, batch.segments, roles=roles, parts=parts, layout=layout)
