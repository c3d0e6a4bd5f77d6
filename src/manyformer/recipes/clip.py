"""Contrastive training of two towers: an image, sound or a text, and another of them."""

from functools import partial
from typing import Annotated

from torch import nn

from manyformer.models.modalities_model import TwoTowers
from manyformer.models.tasks.example_parts import CONTRAST
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.multimodal_transformer import (
    ReadImageChannels,
    ReadImageHeight,
    ReadImageWidth,
    ReadMelBands,
    part_embedding,
)
from manyformer.recipes.parts.baselines import attention_layers, check_heads, init_std, stack
from manyformer.recipes.parts.keywords import FrameHalvings, PatchSide, PositiveSize
from manyformer.recipes.parts.registry import recipe


@recipe(
    "CLIP",
    paper="Radford et al. 2021, Learning Transferable Visual Models From Natural Language Supervision, "
    "arXiv:2103.00020",
    summary="Two encoders are trained so that the parts of an example are nearer to each other than to all others.",
    task=CONTRAST,
    family="softmax",
    cost="O(l^2 d + l d^2) per layer and tower; O(b^2 e) for b examples in a batch",
    tiny_keywords={"height": 8, "width": 12, "channels": 2, "patch": 4, "shared_dim": 6},
)
def clip(
    vocab: int | None = 49408,
    height: ReadImageHeight = 224,
    width: ReadImageWidth = 224,
    channels: ReadImageChannels = 3,
    mels: ReadMelBands = None,
    patch: PatchSide = 16,
    halvings: FrameHalvings = 2,
    dim: int = 512,
    depth: int = 12,
    heads: int = 8,
    ff_dim: int | None = None,
    shared_dim: Annotated[PositiveSize, "width of the space in which both parts are compared"] = 512,
    dropout: float = 0.1,
) -> TwoTowers:
    """Pre-norm encoders of equal sizes; sections 2.3 to 2.5: cosines, a learned temperature, the symmetric loss.

    Two of an image, sound and a text are read. Each tower ends in the mean of its tokens; the paper's have a class
    token for images, and for texts a causal encoder of which the last token is taken."""
    check_heads(dim, heads)
    image = (height, width, channels)
    # widths are equal here; the paper's towers differ, and meet in the shared space alone
    embed = part_embedding(dim, vocab=vocab, image=image, patch=patch, mels=mels, halvings=halvings, dropout=dropout)
    layer = attention_layers(dim, heads, ff_dim, lambda number: SoftmaxKernel())
    make_tower = partial(
        stack, depth, layer, order="pre", norm=partial(nn.LayerNorm, dim, eps=1e-6), dropout=dropout, std=init_std(dim)
    )
    return TwoTowers(embed, {name: make_tower() for name in embed.parts}, dim, shared_dim)
