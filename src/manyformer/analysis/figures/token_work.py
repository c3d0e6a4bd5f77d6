"""Passes of a trained model over a text, the computation that it spends on each token, and the spans of its heads."""

import statistics
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.base.errors import UserError
from manyformer.base.files.figures import check_picture, curve_color, panels, write_picture
from manyformer.inference.generate import translate
from manyformer.inference.generate.generate import read_write_tokenizers
from manyformer.inference.generate.protocol import TokenizerProtocol
from manyformer.models import Model
from manyformer.models.model import eval_mode, model_name
from manyformer.models.tasks import EncodedText, Task, TextPass
from manyformer.models.tasks.task import text_pass
from manyformer.nn.attention.head_gates import part_name
from manyformer.nn.batches import IGNORE_INDEX, Batch, CausalLMBatch, to_device
from manyformer.nn.core import Layer
from manyformer.nn.softmax.adaptive_span_kernel import AdaptiveSpanKernel, named_span_kernels
from manyformer.recipes.parts.registry import task_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_TOKEN_LENGTH = 12
"""The most characters of a token's label."""

TokenLabels = Callable[[Sequence[int], TokenizerProtocol], tuple[str, ...]]
"""A function that labels token ids for display."""

_VISIBLE_CHARACTERS = {"\n": "↵", "\t": "⇥"}

TOKENS_PER_ROW = 40
"""Tokens per row of a figure; longer texts have several rows."""

TOKEN_INCHES = 0.28
"""The width of a token in a figure."""

MAX_BAR_LENGTH = 24
"""The most characters of a bar in the text output."""

COLORMAP = "Blues"

COUNT_LABELS = {"steps": "steps", "depth": "layers"}
"""The values reported to `watch` that count the computation per token, and their units."""


def token_labels(tokens: Sequence[int], tokenizer: TokenizerProtocol) -> tuple[str, ...]:
    """Labels of tokens: their names or decoded text, of at most `MAX_TOKEN_LENGTH` characters."""
    # cut, so that one long word does not take the room of the figure
    return tuple((text.strip() or "␣")[:MAX_TOKEN_LENGTH] for text in _token_texts(tokens, tokenizer))


def full_token_labels(tokens: Sequence[int], tokenizer: TokenizerProtocol) -> tuple[str, ...]:
    """Labels of tokens with their spaces, where characters that have no shape are replaced by a symbol or an escape."""
    return tuple(map(visible_text, _token_texts(tokens, tokenizer)))


def visible_text(text: str) -> str:
    """A text where characters that have no shape are replaced by a symbol or an escape."""
    return "".join(map(_visible_character, text))


def _token_texts(tokens: Sequence[int], tokenizer: TokenizerProtocol) -> list[str]:
    # special tokens decode to nothing, but a tokenizer that has `token` knows their names
    token_text: Callable[[int], str] = getattr(tokenizer, "token", lambda token_id: tokenizer.decode([token_id]))
    return [token_text(token_id) for token_id in tokens]


def _visible_character(character: str) -> str:
    if character in _VISIBLE_CHARACTERS:
        return _VISIBLE_CHARACTERS[character]
    # controls, marks and overrides of the writing direction, surrogates, separators of lines and paragraphs
    has_shape = unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
    if has_shape:
        return character
    return f"\\u{ord(character):04x}"


TextOrIds = str | Sequence[int] | Tensor
"""What a model reads to be shown: a text, or the ids of its tokens, which are taken as they are."""


class IdTokenizer:
    """Stands for the tokenizer of a model that has none: a token is called by its id, and a text holds ids."""

    # those of the library's own vocabularies, for a decoder whose target begins and ends
    pad = 0
    bos = 1
    eos = 2
    pair_separators = 1

    def encode(self, text: str) -> list[int]:
        numbers = text.replace(",", " ").split()
        if not numbers or not all(number.isdecimal() for number in numbers):
            problem = "the model was saved without a tokenizer, so it cannot read text"
            raise UserError(f"{problem}; give token ids, such as [5, 3]")
        return [int(number) for number in numbers]

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))


def ids_of(text: TextOrIds) -> list[int]:
    """The ids in a text of ids, a list, or a tensor or array of one row."""
    if isinstance(text, str):
        return IdTokenizer().encode(text)
    row = torch.as_tensor(text).squeeze()
    if row.ndim > 1 or row.is_floating_point():
        raise UserError(f"token ids must be whole numbers of one row, and these have the shape {tuple(row.shape)}")
    numbers: list[int] = row.flatten().tolist()
    return numbers


def passes_over_text(
    model: Model, text: TextOrIds, answer: TextOrIds | None = None, *, labels: TokenLabels = token_labels
) -> list[TextPass]:
    """The passes of `model` over `text`; for a task with a source, `answer` is the target, or the model translates.

    Token ids are read as they are, and are all that a model without a tokenizer reads. Raises UserError for a model
    that reads no plain text.
    """
    task = task_of(model)
    if not task.takes_source and answer is not None:
        raise UserError(f"only an encoder-decoder writes an answer; a {type(model).__name__} reads the text alone")
    tokenizers = read_write_tokenizers(model.tokenizer)
    if tokenizers.read is None or tokenizers.write is None or not isinstance(text, str):
        return _passes_over_ids(model, text, answer, labels)
    if not isinstance(answer, str | None):
        raise UserError("a text has a text as its answer; give token ids for both, or text for both")
    encoded = _encode(text, tokenizers.read, labels)
    if task.generates == "answer":
        if answer is None:
            answer = translate(model, [text], tokenizer=(tokenizers.read, tokenizers.write))[0]  # type: ignore[arg-type]
        encoded = encoded._replace(answer=_encode(answer, tokenizers.write, labels))
    return task.text_passes(model, encoded)


def _passes_over_ids(model: Model, text: TextOrIds, answer: TextOrIds | None, labels: TokenLabels) -> list[TextPass]:
    """The passes over the ids of tokens, which are called by what a tokenizer makes of them, if there is one."""
    task = task_of(model)
    tokenizers = read_write_tokenizers(model.tokenizer)
    by_id: Any = IdTokenizer()

    def encoded(ids: TextOrIds, tokenizer: Any) -> EncodedText:
        return EncodedText(ids_of(ids), tokenizer, lambda tokens: labels(tokens, tokenizer))

    source = encoded(text, tokenizers.read or by_id)
    if type(task).text_passes is Task.text_passes or (task.takes_source and task.generates != "answer"):
        # the sentence of a task that reads no text
        return task.text_passes(model, source)
    if not task.takes_source:
        return [text_pass(task, model, source.ids, source)]
    if answer is None:
        raise UserError(
            f"a {type(model).__name__} needs the ids of an answer beside those of its source: answer=[5, 3]"
        )
    return task.text_passes(model, source._replace(answer=encoded(answer, tokenizers.write or by_id)))


def _encode(text: str, tokenizer: TokenizerProtocol, labels: TokenLabels) -> EncodedText:
    return EncodedText(list(tokenizer.encode(text)), tokenizer, lambda tokens: labels(tokens, tokenizer))


class TokenCounts(NamedTuple):
    """The tokens that one part of a model processed, a number for each, and the largest possible number.

    `label` is the unit of the numbers. With probabilistic halting, `halting` has the halting probabilities of each
    token at each of its steps.
    """

    title: str
    tokens: tuple[str, ...]
    numbers: tuple[float, ...]
    maximum: float
    label: str = "steps"
    halting: tuple[tuple[float, ...], ...] | None = None

    @property
    def mean(self) -> float:
        return sum(self.numbers) / max(1, len(self.numbers))


class LayerSpans(NamedTuple):
    """The attention spans of one layer's heads in tokens, the maximum span, and the length of the ramp beyond it."""

    part: str
    spans: tuple[float, ...]
    max_length: int
    ramp: int

    @property
    def mean(self) -> float:
        return statistics.fmean(self.spans)


def token_work(model: Model, text: str, answer: str | None = None) -> list[TokenCounts]:
    """The recurrent steps or the exit layer of each token of `text`, for every part of the model that reports them.

    The target of an encoder-decoder is `answer`, or its translation. Raises UserError for a model without a tokenizer
    and for one that spends the same computation on all tokens.
    """
    recorder = _record_text(model, text, answer)
    if not recorder.counts:
        raise UserError(f"{model_name(model)} does the same for every token, so there is nothing to count")
    return recorder.counts


def pass_counts(model: Model, passes: Iterable[TextPass]) -> list[TokenCounts]:
    """The recurrent steps or the exit layer of each token of some passes; empty if no part of the model counts any."""
    return _record_passes(model, passes).counts


def mean_steps(model: Model, batches: Iterable[Batch], device: torch.device) -> float | None:
    """The mean count per token with a target, over all parts that report one; None if no part does."""
    counts = [torch.zeros(2, dtype=torch.float64)]

    def watch(module: nn.Module, name: str, value: Tensor) -> None:
        if name in COUNT_LABELS:
            # targets alone: a count of padding would depend on the batches
            scored_counts = value.cpu().double()[scored]
            counts.append(torch.stack([scored_counts.sum(), torch.tensor(scored_counts.numel())]))

    with torch.no_grad(), eval_mode(model):
        for batch in batches:
            assert isinstance(batch, CausalLMBatch)
            scored = batch.targets != IGNORE_INDEX
            batch = to_device(batch, device)
            model(batch.tokens, batch.segments, watch=watch)
    total, tokens = torch.stack(counts).sum(0).tolist()
    return total / tokens if tokens else None


def layer_spans(model: nn.Module) -> list[LayerSpans]:
    """The attention span of each head of each layer, if spans do not depend on the text. Raises UserError."""
    kernels = named_span_kernels(model)
    if not kernels:
        raise UserError("this model learns no attention spans: adaptive-span does")
    if any(kernel.spans.query_dim for kernel in kernels.values()):
        raise UserError("the attention spans of this model depend on the text: give a text")
    device = next(model.parameters()).device
    layers = list[LayerSpans]()
    with torch.no_grad():
        for name, kernel in kernels.items():
            # fixed spans read nothing of the query, whose width is 0
            empty_query = torch.empty(1, kernel.spans.heads, 1, 0, device=device)
            layers.append(_make_layer_spans(name, kernel, kernel.spans(empty_query)[0, :, 0]))
    return layers


def layer_spans_for_text(model: Model, text: str) -> list[LayerSpans]:
    """The attention span of each head of each layer for a text, the mean over its tokens. Raises UserError."""
    if task_of(model).generates != "continuation":
        raise UserError(f"spans are those of a language model, not of a {type(model).__name__}")
    recorder = _record_text(model, text)
    if not recorder.layers:
        raise UserError("this model learns no attention spans: adaptive-span does")
    return recorder.layers


def mean_span(model: nn.Module) -> float | None:
    """The mean attention span over all heads, in tokens; None if the model has no learned fixed spans."""
    if all(kernel.spans.query_dim for kernel in named_span_kernels(model).values()):
        return None
    return statistics.fmean(layer.mean for layer in layer_spans(model))


def _make_layer_spans(name: str, kernel: AdaptiveSpanKernel, lengths: Float[Tensor, " h"]) -> LayerSpans:
    return LayerSpans(part_name(name), tuple(lengths.tolist()), kernel.spans.max_span, kernel.spans.ramp)


class _WorkRecorder:
    """A `watch` callback that records the counts of `tokens` and mean spans, under the names of the parts."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._span_kernels = named_span_kernels(model)
        self.tokens: tuple[str, ...] = ()
        self.counts: list[TokenCounts] = []
        self.layers: list[LayerSpans] = []

    def watch(self, module: nn.Module, name: str, value: Tensor) -> None:
        """The callback for `ctx.watch`."""
        if name in COUNT_LABELS:
            numbers = tuple(value[0, : len(self.tokens)].tolist())
            title = f"{part_name(self._names[module]) or type(module).__name__}: {name}"
            maximum = _max_count(module, numbers)
            self.counts.append(TokenCounts(title, self.tokens, numbers, maximum, COUNT_LABELS[name]))
        elif name == "halting":
            # the part has reported the steps of each token before
            counts = self.counts[-1]
            # the table has a column for every possible step; those after halting mean nothing
            halting = tuple(tuple(row[: int(steps)]) for row, steps in zip(value[0].tolist(), counts.numbers))
            self.counts[-1] = counts._replace(halting=halting)
        elif name == "spans":
            part = self._names[module]
            self.layers.append(_make_layer_spans(part, self._span_kernels[part], value.mean((0, 2))))


def _max_count(module: nn.Module, numbers: Sequence[float]) -> float:
    """The largest possible count of a token: the maximum steps of a recurrence, or the layers of a stack."""
    largest = None
    if isinstance(module, Layer):
        largest = module.largest_count
    if largest is None:
        # a layer that does not declare a largest count: then the scale ends at the largest one seen
        return max(numbers)
    return float(largest)


def _record_text(model: Model, text: str, answer: str | None = None) -> _WorkRecorder:
    """What the passes of the model over a text report."""
    with torch.no_grad(), eval_mode(model):
        return _record_passes(model, passes_over_text(model, text, answer))


def _record_passes(model: Model, passes: Iterable[TextPass]) -> _WorkRecorder:
    recorder = _WorkRecorder(model)
    for model_pass in passes:
        recorder.tokens = model_pass.labels
        model_pass.run(recorder.watch)
    return recorder


def describe_counts(counts: TokenCounts) -> str:
    """The counts as text: a line for each token, with its number as a bar."""
    label_width = max(map(len, counts.tokens))
    bar_length = min(MAX_BAR_LENGTH, max(1, round(counts.maximum)))
    lines = []
    for token, number in zip(counts.tokens, counts.numbers):
        bar = "█" * round(bar_length * number / max(counts.maximum, 1e-9))
        lines.append(f"{token:>{label_width}} {bar:<{bar_length}} {number:g}")
    return "\n".join(lines)


def draw_counts(all_counts: Sequence[TokenCounts], path: str | Path) -> None:
    """Draw several counts below each other; the suffix of `path` decides the format.

    Steps with halting probabilities are drawn as cells, which are darker for larger probabilities.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.ticker import MaxNLocator

    check_picture(Path(path))
    # a long text has several rows: a figure of its whole width could not be read
    rows = [(counts, start) for counts in all_counts for start in range(0, len(counts.tokens), TOKENS_PER_ROW)]
    row_length = min(TOKENS_PER_ROW, max(len(counts.tokens) for counts in all_counts))
    figure, axes = panels(len(rows), 1, (max(4.0, row_length * TOKEN_INCHES + 1.2), 2.3), grid=False)
    for axis, (counts, start) in zip(axes, rows):
        names = counts.tokens[start : start + TOKENS_PER_ROW]
        _draw_bars(axis, counts, slice(start, start + TOKENS_PER_ROW))
        # matplotlib does not accept empty labels, and $ would start a formula
        axis.set_xticks(range(len(names)), [name.replace("$", r"\$") or " " for name in names], rotation=90, fontsize=8)
        # the last row may be shorter, but its tokens are as wide as those above
        axis.set(xlim=(-0.6, row_length - 0.4), ylim=(0, counts.maximum * 1.05))
        axis.set_ylabel(counts.label, fontsize=8)
        axis.yaxis.set_major_locator(MaxNLocator(integer=True))
        axis.spines[["top", "right"]].set_visible(False)
        if start == 0 and counts.title:
            axis.set_title(f"{counts.title}, mean {counts.mean:.2f}", fontsize=9)
    if any(counts.halting for counts in all_counts):
        colorbar = figure.colorbar(ScalarMappable(cmap=COLORMAP), ax=axes, aspect=30, pad=0.01)
        colorbar.set_label("probability of halting", fontsize=8)
    write_picture(figure, Path(path))


def _draw_bars(axis: "Axes", counts: TokenCounts, columns: slice) -> None:
    """Draw a bar for each token, or a stack of cells if there are halting probabilities."""
    from matplotlib import colormaps

    numbers = counts.numbers[columns]
    if counts.halting is None:
        axis.bar(range(len(numbers)), numbers, color=curve_color(0), width=0.8)
        return
    cells = [
        (x, step, probability)
        for x, probabilities in enumerate(counts.halting[columns])
        for step, probability in enumerate(probabilities)
    ]
    if cells:
        xs, steps, cell_probabilities = zip(*cells)
        colors = colormaps[COLORMAP](cell_probabilities)
        axis.bar(xs, [1.0] * len(xs), bottom=steps, width=0.86, color=colors, edgecolor="#888888", lw=0.4)


def describe_spans(layers: Sequence[LayerSpans]) -> str:
    """The spans as text: a line for each layer, with the span of each head and their mean."""
    part_width = max(len(layer.part) for layer in layers)
    lines = []
    for layer in layers:
        cells = " ".join(f"{span:6.1f}" for span in layer.spans)
        lines.append(f"{layer.part:<{part_width}} {cells}  mean {layer.mean:.1f}")
    mean = statistics.fmean(layer.mean for layer in layers)
    max_length = layers[0].max_length
    return "\n".join([*lines, f"mean {mean:.1f} of {max_length} tokens, and {layers[0].ramp} more to fade out"])


def draw_spans(layers: Sequence[LayerSpans], path: str | Path, *, title: str = "") -> None:
    """Draw the span of each head over the layers, and their mean; the suffix of `path` decides the format."""
    check_picture(Path(path))
    figure, (axis,) = panels(1, 1)
    for layer_number, layer in enumerate(layers, 1):
        axis.plot([layer_number] * len(layer.spans), layer.spans, "o", color=curve_color(0), alpha=0.6)
    axis.plot(range(1, len(layers) + 1), [layer.mean for layer in layers], "-", color=curve_color(1), label="mean")
    axis.axhline(layers[0].max_length, color="#999999", linestyle="--", label="maximum span")
    axis.set(xlabel="layer", xticks=range(1, len(layers) + 1), ylabel="span (tokens)")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize="x-small")
    axis.set_title(title, fontsize=9)
    write_picture(figure, Path(path))
