"""ETC: a text, and before it a summary of each of its parts, with attention in four directions."""

from functools import partial
from typing import Literal

from manyformer.attention import Attention
from manyformer.core import SUMMARY, Layer
from manyformer.errors import UserError
from manyformer.kernels import Softmax
from manyformer.masks import Everything, Global, Mask, Part, Role, around, pieces
from manyformer.mixers.global_local import FourPieces
from manyformer.mixers.summaries import EachPart
from manyformer.models import MaskedLM
from manyformer.models.contrast import Contrast
from manyformer.position import Labels
from manyformer.recipes.bert import masked_encoder
from manyformer.recipes.registry import recipe


@recipe(
    "Extended Transformer Construction",
    paper="Ainslie et al. 2020, ETC: Encoding Long and Structured Inputs in Transformers, arXiv:2004.08483",
    new="A second, short input that sees all and is seen by all, labels for how tokens are related, and a task for it.",
    task="masked",
    cost="O(l (w + n) d + n^2 d + (l + n) d^2) per layer, n summaries",
    because={
        "causal": "every token sees both sides: that is the point",
        "streams": "a later token changes all earlier outputs, so nothing can be kept",
        "cross": "it reads one sequence only",
    },
    small={"window": 4, "part": 5, "clip": 3},
)
def etc(
    vocab: int = 30522,
    dim: int = 768,
    depth: int = 12,
    heads: int = 12,
    hidden: int | None = None,
    window: int = 84,
    part: int = 64,
    clip: int = 12,
    projections: Literal["shared", "separate"] = "shared",
    reads: Literal["text", "part"] = "text",
    contrast: float | None = 0.2,
    dropout: float = 0.1,
) -> MaskedLM:
    """The base model: tokens see `window` positions on either side and all summaries, one for each part of the text.

    The paper's sections on relative positions, global-local attention and pre-training. Summaries read the whole text,
    or with `reads="part"` their own part alone. Parts are what a call says they are, as sentences in the paper, else
    `part` tokens each. Projections are shared by all four pieces, as in the smaller base model, or each has its own.
    `contrast` is the share of contrastive predictive coding in the training loss. Tokens of the text that a call makes
    global stay in the text here; the paper moves them before it.
    """
    if contrast is not None and not 0 < contrast < 1:
        raise UserError(f"contrast ({contrast}) must lie between 0 and 1, or be null for none")
    if contrast is None and projections == "separate":
        raise UserError("projections=separate needs a contrast: nothing would train the summaries of the last layer")
    l2l: Mask = around(window) | Global(Role())
    g2l: Mask = Everything() if reads == "text" else Part()
    labels = partial(Labels, dim // heads, heads, clip)

    def mixer() -> Layer:
        if projections == "separate":
            return FourPieces(dim, heads, g2l=g2l, l2l=l2l, position=labels)
        return Attention(dim, heads, Softmax(pieces(Role(SUMMARY), g2l=g2l, l2l=l2l)), position=labels())

    return masked_encoder(
        vocab,
        dim,
        depth,
        heads,
        hidden,
        dropout,
        mixer=mixer,
        summaries=EachPart(part),
        contrast=None if contrast is None else Contrast(share=contrast),
    )
