"""What the heads of a trained model attend to: positions, syntax, rare tokens (Voita et al. 2019, section 5).

Their labels are kept with the run, and any measure of heads is shown as a grid of layers by heads: table or picture."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, final

import numpy as np
import torch
from annotated_types import Len
from numpy.typing import NDArray
from pydantic import StringConstraints

from manyformer.analysis.figures.attention_maps import AttentionMap, pass_maps
from manyformer.analysis.heads.attention_statistics import (
    AttentionStatistics,
    OffsetShare,
    RareTokenShares,
    SentenceWeights,
    SyntacticScore,
    SyntaxStatistics,
    WordTree,
)
from manyformer.base.errors import UserError
from manyformer.base.files.figures import check_picture, panels, write_picture
from manyformer.base.files.json_records import FileRecord
from manyformer.models import Model
from manyformer.models.model import eval_mode, model_name
from manyformer.models.tasks import EncodedText, TextPass
from manyformer.recipes.parts.registry import task_of

POSITIONAL_SHARE = 0.9
"""The share of tokens from which on a head is positional (Voita et al. 2019, section 5.2)."""

RARE_MARGIN = 0.1
"""By how much the share of a head with the label "rare" exceeds chance."""

HEAD_LABELS_FILE = "heads.json"

CELL_INCHES = (0.95, 0.5)
"""The size of a head in a picture."""

_PartName = Annotated[str, StringConstraints(max_length=200)]
_HeadLabel = Annotated[str, StringConstraints(max_length=200)]


class TokenFrequencies(NamedTuple):
    """How often each token id occurs in the training text, and in the targets if the task has a source."""

    text: NDArray[np.int64]
    answer: NDArray[np.int64] | None = None


class HeadReport(NamedTuple):
    """What one head attends to; `head` is counted from 0. `syntax` has the largest margin over its baseline first.

    `spectrum` is the share of the largest quarter of the singular values of its weights in their sum."""

    part: str
    head: int
    confidence: float
    spectrum: float
    offset: OffsetShare | None
    rare: RareTokenShares | None
    syntax: tuple[SyntacticScore, ...]
    labels: tuple[str, ...]


@final
class HeadAnalysis:
    """Reads sentences one by one and reports what each head of each part with attention weights attends to.

    Padding and the tokens that begin or end a sequence are left out, as queries and as keys; the first token of a
    target stays a query where a decoder attends to a source. In Voita et al. (2019) only the end is left out, in
    encoders, which have no start token."""

    def __init__(self, model: Model, frequencies: TokenFrequencies | None = None) -> None:
        self._model = model
        self._frequencies = frequencies
        self._task = task_of(model)
        self._attention: dict[str, AttentionStatistics] = {}
        self._syntax: dict[str, SyntaxStatistics] = {}
        self.sentences = 0
        self.trees = 0

    def read(self, text: EncodedText) -> None:
        """Add a sentence, with its target if the task has a source."""
        self.sentences += 1
        with torch.no_grad(), eval_mode(self._model):
            for text_pass in self._task.text_passes(self._model, text):
                for attention in pass_maps(self._model, text_pass):
                    statistics = self._attention.setdefault(attention.part, AttentionStatistics(len(attention.weights)))
                    statistics.add(self._sentence_weights(attention, text_pass, text))

    def read_tree(self, text: EncodedText, tree: WordTree) -> None:
        """Add a sentence with its dependency tree, for the parts that attend from the text to itself."""
        self.trees += 1
        with torch.no_grad(), eval_mode(self._model):
            text_pass = self._task.text_passes(self._model, text)[0]
            for attention in pass_maps(self._model, text_pass):
                # trees are those of the text alone, so that the pass over it is the first and special tokens are cut
                # off
                columns = _text_columns(text_pass.tokens, text)
                statistics = self._syntax.setdefault(attention.part, SyntaxStatistics(len(attention.weights)))
                statistics.add(attention.weights.numpy()[:, columns, columns], tree)

    def reports(self) -> list[HeadReport]:
        """A report of each head, in the order of computation. Raises UserError if no part has attention weights."""
        if not self._attention:
            name = model_name(self._model)
            raise UserError(f"no part of {name} has weights for pairs of tokens, so it has no heads to analyse")
        reports: list[HeadReport] = []
        for part, statistics in self._attention.items():
            # cross-attention has no trees: its queries and keys are other sentences
            no_scores: list[list[SyntacticScore]] = [[] for _ in range(statistics.heads)]
            if part in self._syntax:
                syntax = self._syntax[part].scores()
            else:
                syntax = no_scores
            measures = (statistics.confidences(), statistics.spectra(), statistics.offsets(), statistics.rare_shares())
            rows = [
                HeadReport(part, head, confidence, spectrum, offset, rare, tuple(scores), ())
                for head, (confidence, spectrum, offset, rare, scores) in enumerate(zip(*measures, syntax))
            ]
            # one head of a layer is called rare at most, however many exceed chance
            highest = max((row.rare.least for row in rows if row.rare is not None), default=None)
            reports += [row._replace(labels=_labels(row, highest)) for row in rows]
        return reports

    def _sentence_weights(self, attention: AttentionMap, text_pass: TextPass, text: EncodedText) -> SentenceWeights:
        has_source = bool(text_pass.source_tokens)
        is_cross = attention.is_cross_attention
        if is_cross:
            key_tokens = text_pass.source_tokens
            keys = _ordinary_columns(key_tokens, text)
            # each step of the decoder predicts a token, the first one from the start token
            queries = np.arange(len(text_pass.tokens))
        else:
            key_tokens = text_pass.tokens
            # a pass beside a source is that over the target, whose special tokens may have other ids
            keys = _ordinary_columns(key_tokens, (text.answer if has_source else None) or text)
            queries = keys
        weights = attention.weights.numpy()
        visible = np.ones((len(queries), len(keys)), np.bool_)
        # causal attention is recognized by its weights; for chance only visible keys count
        if not is_cross and not np.triu(weights, 1).any():
            visible &= keys[None] <= queries[:, None]
        counts = None
        if self._frequencies is not None:
            if has_source and not is_cross:
                table = self._frequencies.answer
            else:
                table = self._frequencies.text
            if table is not None:
                counts = table[np.array(key_tokens)[keys]]
        return SentenceWeights(weights[:, queries][:, :, keys], queries, keys, visible, counts)


def _text_columns(tokens: Sequence[int], text: EncodedText) -> slice:
    """The columns of the text, which stands as it is behind the start token, or first where there is none.

    They are not found by their ids: a tokenizer without a token for unknown words has its end token there."""
    start = int(list(tokens[1 : 1 + len(text.ids)]) == text.ids)
    return slice(start, start + len(text.ids))


def _ordinary_columns(tokens: Sequence[int], text: EncodedText) -> NDArray[np.int64]:
    """The columns of the tokens that are neither padding nor the begin or end of a sequence."""
    special = (text.tokenizer.pad, text.tokenizer.bos, text.tokenizer.eos)
    return np.flatnonzero(~np.isin(np.array(tokens), special))


def _labels(report: HeadReport, highest_rare_share: float | None) -> tuple[str, ...]:
    """Short names of what the head does: "positional -1", "nsubj to head", "rare"."""
    labels: list[str] = []
    if report.offset is not None and report.offset.share >= POSITIONAL_SHARE:
        labels.append(f"positional {report.offset.offset:+d}")
    if report.syntax and report.syntax[0].is_syntactic:
        labels.append(report.syntax[0].direction.replace("dependent", report.syntax[0].relation))
    rare = report.rare
    if rare is not None and rare.least == highest_rare_share and rare.least >= rare.chance + RARE_MARGIN:
        labels.append("rare")
    return tuple(labels)


class HeadLabelsRecord(FileRecord):
    """The label of each head of each part of a model, "" for a head without one."""

    title: ClassVar[str] = "the labels of attention heads"
    max_bytes: ClassVar[int] = 1 << 22

    labels: Annotated[dict[_PartName, Annotated[tuple[_HeadLabel, ...], Len(1, 4096)]], Len(1, 4096)]


def write_head_labels(reports: Sequence[HeadReport], folder: Path) -> Path:
    """Write the labels of the heads into the folder of their run, and return the path of the file."""
    labels: dict[str, tuple[str, ...]] = {}
    for report in reports:
        labels[report.part] = (*labels.get(report.part, ()), ", ".join(report.labels))
    path = folder / HEAD_LABELS_FILE
    HeadLabelsRecord(labels=labels).write(path)
    return path


def read_head_labels(folder: Path) -> dict[str, tuple[str, ...]] | None:
    """The labels of the heads of each part of a run's model; None if its heads were not analyzed.

    Raises DamagedFile, and UserError for a file of another format."""
    path = folder / HEAD_LABELS_FILE
    if path.exists():
        return HeadLabelsRecord.read(path).labels
    return None


class HeadGrid(NamedTuple):
    """A measure of each head of the layers with one kind of attention, and a text for each head."""

    kind: str
    parts: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]
    texts: tuple[tuple[str, ...], ...]


def _decimals(values: Iterable[float]) -> int:
    """The decimals that show two digits or more of the largest of the values."""
    largest = max(map(abs, values), default=0.0)
    if largest >= 0.1 or largest == 0:
        return 2
    return min(12, 1 - math.floor(math.log10(largest)))


def attention_kind(part: str) -> str:
    """What attends in a part: its name without the numbers of layers, such as "encoder attention"."""
    return " ".join(re.sub(r"(^|\.)\d+(?=\.|$)", "", part).strip(".").split(".")) or "attention"


def head_grids(values: Mapping[str, Sequence[float]], texts: Mapping[str, Sequence[str]]) -> list[HeadGrid]:
    """The grids of the values and texts of the heads of each part, in the order of the parts."""
    parts_by_kind: dict[str, list[str]] = {}
    for part in values:
        parts_by_kind.setdefault(attention_kind(part), []).append(part)
    return [
        HeadGrid(kind, tuple(parts), tuple(tuple(values[p]) for p in parts), tuple(tuple(texts[p]) for p in parts))
        for kind, parts in parts_by_kind.items()
    ]


def grid_rows(grid: HeadGrid) -> list[tuple[str, ...]]:
    """A row of a table for each layer: its name, and value and text of each head."""
    # layers may have lost heads by pruning, and rows of a table are equally long
    width = max(map(len, grid.values))
    decimals = _decimals(value for row in grid.values for value in row)
    rows = []
    for part, values, texts in zip(grid.parts, grid.values, grid.texts, strict=True):
        cells = [f"{value:.{decimals}f} {text}".rstrip() for value, text in zip(values, texts, strict=True)]
        rows.append((part, *cells, *[""] * (width - len(cells))))
    return rows


def draw_grids(grids: Mapping[str, Sequence[HeadGrid]], path: str | Path) -> None:
    """Draw the grids of each measure in a column, one kind of attention above the other, with one scale per measure.

    A scale begins at 0, or at the smallest value if that is negative. The suffix of `path` decides the format (.png,
    .svg or .pdf). Raises UserError for another one."""
    check_picture(Path(path))
    all_grids = [grid for measure_grids in grids.values() for grid in measure_grids]
    columns = max(len(row) for grid in all_grids for row in grid.values)
    rows = max(len(g.parts) for g in all_grids)
    label_inches = 0.09 * max(len(part) for grid in all_grids for part in grid.parts)
    inches = (columns * CELL_INCHES[0] + label_inches + 1.2, rows * CELL_INCHES[1] + 0.9)
    kinds = max(map(len, grids.values()))
    figure, axes = panels(kinds, len(grids), inches, grid=False)
    for column, (measure, measure_grids) in enumerate(grids.items()):
        measure_axes = axes[column :: len(grids)]
        values = [value for grid in measure_grids for row in grid.values for value in row]
        # one scale for all kinds of attention, so that their colors can be compared
        scale = (min(0.0, *values), max(values, default=0.0) or 1.0)
        for axis, grid in zip(measure_axes, measure_grids):
            _draw_grid(axis, grid, columns, scale, _decimals(values))
            axis.set_title(f"{measure}: {grid.kind}", fontsize=10)
        for axis in measure_axes[len(measure_grids) :]:
            axis.set_axis_off()
        measure_axes[len(measure_grids) - 1].set_xlabel("head")
        figure.colorbar(measure_axes[0].images[0], ax=measure_axes, shrink=0.9, pad=0.01, label=measure)
    write_picture(figure, Path(path))


def _draw_grid(axis: Any, grid: HeadGrid, columns: int, scale: tuple[float, float], decimals: int) -> None:
    # cells of NaN stay white
    padded = [[*row, *[math.nan] * (columns - len(row))] for row in grid.values]
    smallest, largest = scale
    axis.imshow(padded, cmap="Blues", vmin=smallest, vmax=largest, aspect="auto")
    axis.set_yticks(range(len(grid.parts)), grid.parts)
    axis.set_xticks(range(columns))
    axis.tick_params(length=0, labelsize=8)
    for row, (values, texts) in enumerate(zip(grid.values, grid.texts, strict=True)):
        for column, (value, text) in enumerate(zip(values, texts, strict=True)):
            color = "black"
            if value > smallest + 0.6 * (largest - smallest):
                color = "white"
            label = f"{value:.{decimals}f}\n{text}".rstrip()
            axis.text(column, row, label, ha="center", va="center", fontsize=7, color=color)
