"""Attention weights of a trained model for a text, as a figure and as text for the terminal."""

import operator
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.errors import UserError, suggest_names
from manyformer.head_gates import part_name
from manyformer.kernels.linformer_kernel import LinformerKernel
from manyformer.models import Model
from manyformer.models.model import model_name
from manyformer.tasks import TextPass
from manyformer.training_hooks import eval_mode
from manyformer.view.figures import PANEL_INCHES, check_picture, panels, write_picture
from manyformer.view.mask_pictures import SHADES
from manyformer.view.text_passes import passes_over_text

TOKEN_INCHES = 0.21
"""The size of a token in a figure."""


KeyKind = Literal["tokens", "source", "summaries", "slots", "blocks"]
"""What the columns of a map are: tokens of the text or of a source, summary tokens and then those of the text, slots
that mix tokens, or blocks of tokens."""


class AttentionMap(NamedTuple):
    """The attention weights of one part of a model, with a label for each query (row) and each key (column).

    In cross-attention over a source, a row is labelled with the token that is predicted at that step. The `module` is
    the one that reported the weights; the rows and columns of summary tokens precede those of the text.
    """

    part: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    weights: Float[Tensor, "h l s"]
    is_cross_attention: bool
    keys: KeyKind = "tokens"
    module: nn.Module | None = None


def attention_maps(model: Model, text: str, answer: str | None = None) -> list[AttentionMap]:
    """All attention weights of `model` for `text`; the target of an encoder-decoder is `answer`, or its translation.

    Every module that reports "weights" to `ctx.watch` gives one map, in the order of computation; modules whose keys
    are not tokens, such as the slots of a Linformer, are left out. Raises UserError for a model that has no tokenizer,
    reads no plain text or has no such module.
    """
    with torch.no_grad(), eval_mode(model):
        passes = passes_over_text(model, text, answer)
        maps = [attention for text_pass in passes for attention in pass_maps(model, text_pass)]
    if not maps:
        raise UserError(f"no part of {model_name(model)} has weights for pairs of tokens, so there is nothing to draw")
    return maps


def select_map(maps: Sequence[AttentionMap], *, part: str | None = None, layer: int | None = None) -> AttentionMap:
    """Select a map: number `layer` (from 1) of those whose name contains `part`, or of the cross-attention maps if any.

    The default is the last one, also for a `layer` that the model does not have. Raises UserError for an unknown part.
    """
    if part is not None:
        candidates = [attention for attention in maps if part in attention.part]
        if not candidates:
            raise UserError(f"there is no part '{part}'; {suggest_names(part, [attention.part for attention in maps])}")
    else:
        candidates = [attention for attention in maps if attention.is_cross_attention] or list(maps)
    return candidates[-1 if layer is None else min(layer, len(candidates)) - 1]


def describe_map(attention: AttentionMap) -> str:
    """A map as text: a line for each query, with the key that has the largest mean weight, and that weight."""
    label_width, lines = max(map(len, attention.rows)), []
    for token, row in zip(attention.rows, attention.weights.mean(0).tolist()):
        cells = "".join(SHADES[min(4, int(5 * weight))] for weight in row)
        share, column = max(zip(row, attention.columns), key=operator.itemgetter(0))
        lines.append(f"{token:>{label_width}} {cells} {column} {share:.0%}")
    return "\n".join(lines)


def draw_maps(maps: dict[str, AttentionMap], path: str | Path, *, per_head: bool = False) -> None:
    """Draw maps side by side, titled with their names: the mean over heads or, with `per_head`, a panel for each head.

    The suffix of `path` decides the format (.png, .svg or .pdf).
    """
    check_picture(Path(path))
    contents = list(_panel_contents(maps, per_head=per_head))
    width = max(len(attention.columns) for attention, _, _ in contents) * TOKEN_INCHES + 1.4
    height = max(len(attention.rows) for attention, _, _ in contents) * TOKEN_INCHES + 2.0
    # the color bar takes 0.8 inches
    width = max(width, PANEL_INCHES[0] / 2) + 0.8 / len(contents)
    figure, axes = panels(1, len(contents), (width, height), grid=False)
    for axis, (attention, weights, title) in zip(axes, contents):
        axis.imshow(weights.numpy(), cmap="Blues", vmin=0, vmax=1)
        axis.set_xticks(range(len(attention.columns)), attention.columns, rotation=90)
        axis.set_yticks(range(len(attention.rows)), attention.rows)
        axis.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=2, labelsize=8)
        axis.set_title(title, fontsize=9)
    figure.colorbar(axes[0].images[0], ax=axes, shrink=0.9, pad=0.01, label="attention weight")
    write_picture(figure, Path(path))


def _panel_contents(maps: dict[str, AttentionMap], *, per_head: bool) -> Iterator[tuple[AttentionMap, Tensor, str]]:
    for name, attention in maps.items():
        heads = len(attention.weights)
        title = f"{name}\n{attention.part}"
        if not per_head or heads == 1:
            yield attention, attention.weights.mean(0), title if heads == 1 else f"{title}, mean of {heads} heads"
            continue
        for head, weights in enumerate(attention.weights):
            yield attention, weights, f"{title}, head {head}"


def pass_maps(model: Model, text_pass: TextPass) -> Iterator[AttentionMap]:
    """The attention maps of one pass over its own tokens, and over the source where it has one, part by part."""
    return (attention for attention in all_pass_maps(model, text_pass) if attention.keys in ("tokens", "source"))


def all_pass_maps(model: Model, text_pass: TextPass) -> Iterator[AttentionMap]:
    """The attention maps of one pass, also those whose rows or columns are summaries, slots or blocks of tokens."""
    names, recorded = module_names(model), list[tuple[nn.Module, str, Tensor]]()

    def watch(module: nn.Module, name: str, value: Tensor) -> None:
        if name in ("weights", "sort") and value.ndim == 4:
            recorded.append((module, name, value[0].float().cpu()))

    text_pass.run(watch)
    for module, name, weights in recorded:
        attention_map = _blocks_map(weights) if name == "sort" else _weights_map(text_pass, module, weights)
        yield attention_map._replace(part=part_name(names[module]), module=module)


def _weights_map(text_pass: TextPass, module: nn.Module, weights: Float[Tensor, "h l s"]) -> AttentionMap:
    """The map of attention weights, without a name."""
    labels, source_labels = text_pass.labels, text_pass.source_labels
    queries, keys = weights.shape[-2:]
    if isinstance(module, LinformerKernel):
        slots = tuple(f"slot {number}" for number in range(keys))
        return AttentionMap("", labels, slots, weights[:, : len(labels)], is_cross_attention=False, keys="slots")
    if source_labels and keys == text_pass.source_length:
        cross_weights = weights[:, : len(labels), : len(source_labels)]
        return AttentionMap(
            "", text_pass.predicted_labels, source_labels, cross_weights, is_cross_attention=True, keys="source"
        )
    summaries = tuple(f"summary {number}" for number in range(queries - text_pass.length))
    rows = (*summaries, *labels)
    kind: KeyKind = "summaries" if summaries else "tokens"
    return AttentionMap("", rows, rows, weights[:, : len(rows), : len(rows)], is_cross_attention=False, keys=kind)


def _blocks_map(weights: Float[Tensor, "h n n"]) -> AttentionMap:
    """The map of a matrix that sorts blocks of tokens, without a name."""
    blocks = tuple(f"block {number}" for number in range(weights.shape[-1]))
    return AttentionMap("", blocks, blocks, weights, is_cross_attention=False, keys="blocks")


def module_names(model: nn.Module) -> dict[nn.Module, str]:
    """The name of each module, for values that modules report to `watch`."""
    return {module: name for name, module in model.named_modules()}
