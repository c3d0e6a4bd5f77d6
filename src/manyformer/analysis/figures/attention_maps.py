"""Attention weights of a trained model for a text or a recording, as a figure and as text for the terminal."""

import math
import operator
import textwrap
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.analysis.figures.mask_pictures import SHADES
from manyformer.analysis.figures.token_work import TextOrIds, passes_over_text, token_labels
from manyformer.base.errors import UserError, suggest_names
from manyformer.base.files.figures import PANEL_INCHES, check_picture, panels, write_picture
from manyformer.inference.generate import SourceBatch, answer_sources
from manyformer.inference.generate.protocol import TokenizerProtocol
from manyformer.models import Model
from manyformer.models.frame_embedding import FrameEmbedding
from manyformer.models.model import eval_mode, model_name
from manyformer.models.tasks import EncodedText, TextPass
from manyformer.models.tasks.translation import decoder_pass
from manyformer.nn.attention.head_gates import part_name
from manyformer.nn.core import AxisKind
from manyformer.nn.kernels.kernel import ReportedWeights, WeightReports

NEIGHBOUR_CONTEXT = 3
"""The number of tokens before a token that was looked up, which are shown with it."""

TOKEN_INCHES = 0.21
"""The size of a token in a figure."""

PANELS_PER_ROW = 4

TITLE_CHARACTERS_PER_INCH = 9

WEIGHT_COLORS = ("#f7f9e3", "#b9dd83", "#4cb87c", "#21818c", "#39508b", "#3b0650")
"""The colors of weights from the smallest to the largest of a row; the luminance falls."""

NO_WEIGHT_COLOR = "#e9ecf0"
"""The color of a weight that is exactly 0: masked, or not computed."""

KeyKind = Literal["tokens", "source", "memory", "neighbours", "contexts", "summaries", "slots", "blocks"]
"""What the columns of a map are: tokens of the text or of a source, a memory and then those of the text, tokens that
were looked up, contexts of a datastore, summary tokens and then those of the text, slots that mix tokens, or blocks of
tokens."""

MAP_KINDS: dict[AxisKind, KeyKind] = {
    "stream": "tokens",
    "source": "source",
    "summaries": "summaries",
    "latents": "slots",
    "slots": "slots",
    "blocks": "blocks",
}
"""What the columns of a map are by what the keys of the reported weights are."""

NAMES_WITHOUT_TOKENS: dict[AxisKind, str] = {"latents": "latent", "slots": "slot", "blocks": "block"}
"""What rows and columns that are no tokens are called, with a number."""


class AttentionMap(NamedTuple):
    """The attention weights of one part of a model, with a label for each query (row) and each key (column).

    In cross-attention over a source, a row is labeled with the token that is predicted at that step. The rows and
    columns of summary tokens precede those of the text, as the `memory` columns of a memory do. `implied` says that
    the part computes no such weights unless they are watched.
    """

    part: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    weights: Float[Tensor, "h l s"]
    keys: KeyKind = "tokens"
    memory: int = 0
    implied: bool = False

    @property
    def is_cross_attention(self) -> bool:
        """Whether the keys are the tokens of a source."""
        return self.keys == "source"


def attention_maps(model: Model, text: TextOrIds, answer: TextOrIds | None = None) -> list[AttentionMap]:
    """All attention weights of `model` for `text`; the target of an encoder-decoder is `answer`, or its translation.

    Both may be token ids in place of text, which a model without a tokenizer needs.

    Every module that reports "weights" to `ctx.watch` gives one map, in the order of computation; modules whose keys
    are not tokens, such as the slots of a Linformer, are left out. Raises UserError for a model that reads no plain
    text or has no such module.
    """
    with torch.no_grad(), eval_mode(model):
        passes = passes_over_text(model, text, answer)
        maps = [attention for text_pass in passes for attention in pass_maps(model, text_pass)]
    if not maps:
        raise UserError(f"no part of {model_name(model)} has weights for pairs of tokens, so there is nothing to draw")
    return maps


def sound_maps(
    model: Any,
    frames: Float[Tensor, "1 f m"],
    tokenizer: TokenizerProtocol,
    *,
    frame_seconds: float,
    decodes: bool,
    answer: str | None = None,
) -> list[AttentionMap]:
    """The attention weights of a model for a recording; tokens of sound are labeled with their seconds.

    A model that `decodes` writes `answer`, or its own text. Raises UserError for an answer to another model."""
    if answer is not None and not decodes:
        raise UserError("only an encoder-decoder writes an answer; this model labels the sound itself")
    embed: FrameEmbedding = model.embed_source if decodes else model.embed
    # each halving of the frames doubles the time that a token stands for
    times = [frame * frame_seconds for frame in range(0, frames.shape[1], 2**embed.halvings)]
    labels = tuple(f"{seconds:.2f}" for seconds in times)
    encode = model.encode if decodes else model
    with torch.no_grad(), eval_mode(model):
        # an encoder of sound is one pass over frames; its tokens are what the convolutions leave of these
        passes = [TextPass(lambda watch: encode(frames, watch=watch), labels, len(labels))]
        if decodes:
            passes.append(decoder_pass(model, frames, labels, _read_answer(model, frames, tokenizer, answer)))
        return [attention for text_pass in passes for attention in pass_maps(model, text_pass)]


def _read_answer(
    model: Any, frames: Float[Tensor, "1 f m"], tokenizer: TokenizerProtocol, answer: str | None
) -> EncodedText:
    """The tokens of an answer, by default the one that the model writes."""
    if answer is None:
        rows = answer_sources(model, SourceBatch(frames, None), tokenizer=(tokenizer, tokenizer)).rows
        ids = list(rows[0][0].tokens)
    else:
        ids = list(tokenizer.encode(answer))
    return EncodedText(ids, tokenizer, partial(token_labels, tokenizer=tokenizer))


def pass_maps(model: Model, text_pass: TextPass) -> Iterator[AttentionMap]:
    """The attention maps of one pass over its own tokens, and over the source where it has one, part by part."""
    return (attention for attention in all_pass_maps(model, text_pass) if attention.keys in ("tokens", "source"))


def all_pass_maps(model: Model, text_pass: TextPass) -> list[AttentionMap]:
    """The attention maps of one pass, also those whose rows or columns are not all tokens of the text."""
    # parts report tensors without axes; this knows which axis is which
    reports = WeightReports(model)
    maps = list[AttentionMap]()
    positions = list[Tensor]()

    def watch(module: nn.Module, name: str, value: Tensor) -> None:
        reported = reports.read(module, name, value)
        # reported right after the weights that the slots belong to
        if name == "slot_count":
            maps[-1] = _label_slots(maps[-1], int(value))
        elif name == "neighbour_positions":
            # reported before the weights of these neighbors
            positions.append(value[0].cpu())
        elif reported is not None and reported.axes.keys == "neighbours":
            maps.append(_neighbours_map(text_pass, reported, positions.pop()))
        elif reported is not None:
            maps.append(_weights_map(text_pass, reported))

    text_pass.run(watch)
    return maps


def _weights_map(text_pass: TextPass, reported: ReportedWeights) -> AttentionMap:
    """The map of attention weights of the first row."""
    rows, keys = reported.axes
    weights = reported.weights[0].float().cpu()
    queries = weights.shape[1]
    row_labels = _axis_labels(text_pass, rows, queries)
    kind = MAP_KINDS[keys]
    memory = 0
    if keys == "source" and text_pass.source_labels:
        # a row of cross-attention aligns the token that is written at this step, not the one that is read
        row_labels = text_pass.predicted_labels
        column_labels = text_pass.source_labels
    elif text_pass.remembered_labels and reported.remembered > 0:
        kind = "memory"
        memory = reported.remembered
        column_labels = (*text_pass.remembered_labels[-memory:], *text_pass.labels)
    else:
        column_labels = _axis_labels(text_pass, keys, weights.shape[2])
    if rows == "latents":
        kind = "slots"
    # padding that a kernel adds to fill its blocks has no label
    weights = weights[:, : len(row_labels), : len(column_labels)]
    return AttentionMap(part_name(reported.part), row_labels, column_labels, weights, kind, memory, reported.implied)


def _axis_labels(text_pass: TextPass, kind: AxisKind, size: int) -> tuple[str, ...]:
    """Labels of the rows or columns of reported weights; padding behind the text has none."""
    if kind == "summaries":
        return (*(f"summary {number}" for number in range(size - text_pass.length)), *text_pass.labels)
    name = NAMES_WITHOUT_TOKENS.get(kind)
    if name is None:
        return text_pass.labels
    return tuple(f"{name} {number}" for number in range(size))


def _label_slots(attention: AttentionMap, count: int) -> AttentionMap:
    """The map with the labels of compressed slots for its first `count` columns."""
    slots = tuple(f"slot {number}" for number in range(count))
    return attention._replace(columns=(*slots, *attention.columns[count:]))


def _neighbours_map(text_pass: TextPass, reported: ReportedWeights, positions: Int[Tensor, "h l n"]) -> AttentionMap:
    """The map of tokens that were looked up in a memory; the columns are all tokens so far, each with those before."""
    weights = reported.weights[0].float().cpu()
    tokens = (*text_pass.remembered_labels, *text_pass.labels)
    # a place that is looked up twice gets the sum of both weights
    dense = weights.new_zeros(*weights.shape[:2], len(tokens)).scatter_add_(2, positions, weights)
    contexts = tuple("".join(tokens[max(0, n - NEIGHBOUR_CONTEXT) : n + 1]) for n in range(len(tokens)))
    part = f"{part_name(reported.part)}.neighbours"
    return AttentionMap(part, text_pass.labels, contexts, dense, "neighbours")


def select_map(maps: Sequence[AttentionMap], *, part: str | None = None, layer: int | None = None) -> AttentionMap:
    """Select a map: number `layer` (from 1) of those whose name contains `part`, or of the cross-attention maps if any.

    The default is the last one. Raises UserError for an unknown part, and for a layer that the model does not have.
    """
    if part is not None:
        candidates = [attention for attention in maps if part in attention.part]
        if not candidates:
            raise UserError(f"there is no part '{part}'; {suggest_names(part, [attention.part for attention in maps])}")
    else:
        candidates = [attention for attention in maps if attention.is_cross_attention] or list(maps)
    if layer is not None and not 1 <= layer <= len(candidates):
        names = ", ".join(attention.part for attention in candidates)
        raise UserError(f"layer ({layer}) must be 1 to {len(candidates)}: the modules to choose from are {names}")
    return candidates[-1 if layer is None else layer - 1]


def row_shares(weights: Float[Tensor, "*h l s"]) -> Float[Tensor, "*h l s"]:
    """Weights relative to the largest absolute weight of their row, as all pictures show them; 0 in a row of zeros."""
    # by row: a query with few visible keys has larger weights than one with many, and both are to be seen
    largest = weights.abs().amax(-1, keepdim=True)
    return weights / largest.masked_fill(largest == 0, 1.0)


def describe_map(attention: AttentionMap, head: int | None = None) -> str:
    """The mean of the heads, or one head, as text: a line for each query, with its largest weight and that key.

    The cells of a line are relative to its largest weight; only a weight of exactly 0 has the character for that.
    """
    if head is None:
        weights = attention.weights.mean(0)
    else:
        weights = attention.weights[head]
    label_width = max(map(len, attention.rows))
    lines = []
    for token, row, shares in zip(attention.rows, weights.tolist(), row_shares(weights).abs().tolist()):
        # ceil, so that the smallest weight differs from none
        cells = "".join(SHADES[min(4, math.ceil(4 * share))] for share in shares)
        largest, column = max(zip(row, attention.columns), key=operator.itemgetter(0))
        lines.append(f"{token:>{label_width}} {cells} {column} {largest:.0%}")
    return "\n".join(lines)


def draw_maps(maps: dict[str, AttentionMap], path: str | Path, *, per_head: bool = False) -> None:
    """Draw maps side by side, titled with their names: the mean over heads or, with `per_head`, a panel for each head.

    Colors are relative to the largest weight of each row. The suffix of `path` decides the format (.png, .svg or .pdf).
    """
    from matplotlib.colors import LinearSegmentedColormap

    check_picture(Path(path))
    contents = list(_panel_contents(maps, per_head=per_head))
    # all panels have one size, that of the largest map, so that cells are equally large everywhere
    width = max(len(attention.columns) for attention, _, _ in contents) * TOKEN_INCHES + 1.4
    height = max(len(attention.rows) for attention, _, _ in contents) * TOKEN_INCHES + 2.0
    panels_per_row = min(len(contents), PANELS_PER_ROW)
    # the color bar takes 0.8 inches
    width = max(width, PANEL_INCHES[0] / 2) + 0.8 / panels_per_row
    figure, axes = panels(-(-len(contents) // panels_per_row), panels_per_row, (width, height), grid=False)
    colors = LinearSegmentedColormap.from_list("weights", WEIGHT_COLORS).with_extremes(bad=NO_WEIGHT_COLOR)
    for axis, (attention, weights, title) in zip(axes, contents):
        shares = row_shares(weights).abs()
        # NaN takes the color of "bad" values, which no weight has
        axis.imshow(shares.masked_fill(shares == 0, torch.nan).numpy(), cmap=colors, vmin=0, vmax=1)
        axis.set_xticks(range(len(attention.columns)), attention.columns, rotation=90)
        axis.set_yticks(range(len(attention.rows)), attention.rows)
        axis.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=2, labelsize=8)
        axis.set_title(textwrap.fill(title, int(width * TITLE_CHARACTERS_PER_INCH)), fontsize=9)
    for axis in axes[len(contents) :]:
        axis.set_axis_off()
    figure.colorbar(axes[0].images[0], ax=axes, shrink=0.9, pad=0.01, label="weight / largest weight of its row")
    write_picture(figure, Path(path))


def _panel_contents(maps: dict[str, AttentionMap], *, per_head: bool) -> Iterator[tuple[AttentionMap, Tensor, str]]:
    for name, attention in maps.items():
        heads = len(attention.weights)
        title = f"{name}: {attention.part}"
        if not per_head or heads == 1:
            yield attention, attention.weights.mean(0), title if heads == 1 else f"{title}, mean of {heads} heads"
            continue
        for head, weights in enumerate(attention.weights):
            yield attention, weights, f"{title}, head {head}"
