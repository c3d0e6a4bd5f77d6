"""ETC: a text prefixed with a summary token for each of its parts, with attention in four pieces."""

from functools import partial
from typing import Annotated, Literal

from annotated_types import Gt, Lt

from manyformer.base.errors import UserError
from manyformer.models import MaskedLM
from manyformer.models.masked_lm import PartContrastiveLoss
from manyformer.models.tasks.masked_language_modelling import MASKED_LM
from manyformer.nn.attention.attention import Attention
from manyformer.nn.attention.global_local import FourPieceAttention
from manyformer.nn.attention.global_summaries import PartSummaries
from manyformer.nn.core import SUMMARY_ROLE, Layer
from manyformer.nn.masks import AllKeys, GlobalTokens, Mask, SamePart, WithRole, four_piece_pattern, symmetric_window
from manyformer.nn.positions import RelativeLabelPosition
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.bert import masked_encoder
from manyformer.recipes.parts.keywords import MaxRelativeDistance, PositiveSize, WindowOnEachSide
from manyformer.recipes.parts.registry import recipe


@recipe(
    "Extended Transformer Construction",
    paper="Ainslie et al. 2020, ETC: Encoding Long and Structured Inputs in Transformers, arXiv:2004.08483",
    summary="A second, short input of global tokens, relative position labels, and a contrastive loss for them.",
    task=MASKED_LM,
    family="sparse",
    cost="O(l (w + n) d + n^2 d + (l + n) d^2) per layer, n summaries",
    reasons={"pair_weights": "summaries stand among the tokens"},
    tiny_keywords={"window": 4, "part_length": 5, "max_relative_distance": 3},
)
def etc(
    vocab: int = 30522,
    dim: int = 768,
    depth: int = 12,
    heads: int = 12,
    ff_dim: int | None = None,
    window: WindowOnEachSide = 84,
    part_length: Annotated[
        PositiveSize, "number of tokens that one summary stands for, where a call does not divide the text into parts"
    ] = 64,
    max_relative_distance: MaxRelativeDistance = 12,
    projections: Annotated[
        Literal["shared", "separate"],
        "whether summaries and text share projections, or each of the four attention pieces has its own",
    ] = "shared",
    summary_reads: Annotated[
        Literal["text", "part"], "what a summary attends to in the text: all of it, or its own part"
    ] = "text",
    contrast_weight: Annotated[
        Annotated[float, Gt(0), Lt(1)] | None,
        "weight in the loss of contrastive prediction of masked parts; null means none",
    ] = 0.2,
    dropout: float = 0.1,
) -> MaskedLM:
    """The base model: tokens attend to `window` positions on each side and to all summaries, one for each part.

    The paper's sections on relative positions, global-local attention and pre-training. Summaries attend to the whole
    text, or with `summary_reads="part"` to their own part alone. A call may give the parts, sentences in the paper;
    otherwise they are `part_length` tokens each. Projections are shared by all four pieces, as in the smaller base
    model, or each has its own. `contrast_weight` is the weight of contrastive predictive coding in the training loss.
    Text tokens that a call marks as global stay in the text; the paper moves them to the prefix."""
    if contrast_weight is None and projections == "separate":
        raise UserError(
            "projections=separate needs a contrast_weight: no other loss trains the summaries of the last layer"
        )
    # long to long, and global to long; the other two pieces, to summaries, are complete
    l2l: Mask = symmetric_window(window) | GlobalTokens(WithRole())
    g2l: Mask = AllKeys() if summary_reads == "text" else SamePart()
    labels = partial(RelativeLabelPosition, dim // heads, heads, max_relative_distance)

    def attention(number: int) -> Layer:
        if projections == "separate":
            return FourPieceAttention(dim, heads, g2l=g2l, l2l=l2l, position=labels)
        # with shared projections the four pieces are one attention under one mask
        mask = four_piece_pattern(WithRole(SUMMARY_ROLE), g2l=g2l, l2l=l2l)
        return Attention(dim, heads, SoftmaxKernel(mask), position=labels())

    summaries = PartSummaries(part_length)
    contrast = None
    if contrast_weight is not None:
        contrast = PartContrastiveLoss(loss_fraction=contrast_weight)
    return masked_encoder(
        vocab, dim, depth, heads, ff_dim, dropout, make_attention=attention, summaries=summaries, contrast=contrast
    )
