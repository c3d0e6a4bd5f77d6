"""What a page shows of one model and one input: its attention maps, its computation per token, and their tokens.

Attention weights go to a page as few bytes: levels relative to the largest weight of a row, compressed, and pooled if
large."""

import base64
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int8
from torch import Tensor

from manyformer.analysis.figures.attention_maps import AttentionMap, all_pass_maps, row_shares
from manyformer.analysis.figures.token_work import (
    TextOrIds,
    TokenCounts,
    full_token_labels,
    pass_counts,
    passes_over_text,
    visible_text,
)
from manyformer.base.errors import UserError
from manyformer.base.type_aliases import ImageArray
from manyformer.data import Tokenizer
from manyformer.data.tokenizers.pixel_tokenizer import PixelTokenizer
from manyformer.inference.datastore.inspect_prompt import CONTEXT_TOKENS
from manyformer.inference.datastore.knn_head import KNNHead, neighbour_weights
from manyformer.models import Model, ModelOutput
from manyformer.models.model import eval_mode, model_name
from manyformer.models.tasks import Inputs, Task, TextPass
from manyformer.models.tasks.requests import TaskTokenizers
from manyformer.nn.attention.head_gates import attention_heads, part_name
from manyformer.nn.batches import Batch
from manyformer.nn.core import WatchFn, no_watch
from manyformer.nn.kernels.kernel import Kernel, KernelCall, named_kernels
from manyformer.recipes.parts.registry import RECIPES, task_of

MAX_TOKENS = 2048
"""The most tokens of a text, because the weights of every pair are computed."""

SHOWN_NEIGHBOURS = 4
"""The nearest neighbours of a token that have columns of their own."""

LEVELS = 126.5
"""The levels of one sign: 127 of equal width, and the largest weight is the middle of the last one."""

MAX_ENCODED_CHARACTERS = 4 * 2**20
"""The most base64 characters of all weights of one model."""


MAX_WEIGHTS = 16 * 2**20
"""The most weights of one model that a browser unpacks."""


HeadLabels = Mapping[str, Sequence[str]]
"""Labels of the heads of each part, "" for a head without one."""

TITLES = {
    "memory": "self-attention, and to a memory left of the bar",
    "neighbours": "looked-up tokens, each after the tokens before it: shares among them",
    "contexts": "nearest contexts of the datastore, each with the token that followed: shares among all neighbours",
    "tokens": "self-attention",
    "source": "attention to the source",
    "summaries": "self-attention, of summary tokens too",
    "slots": "attention to slots, each of which mixes all tokens",
    "blocks": "sorting of blocks: which block each one reads besides itself",
}
"""What a map shows, by the kind of its keys."""

IMPLIED = (
    "These weights are implied: a linear kernel never forms them, but sums of features. "
    "They are the products of its features, divided by their sum."
)


class ViewedImage(NamedTuple):
    """An image (h, w, c), and the upper left pixel of the square of `size` x `size` pixels that each token covers."""

    pixels: ImageArray
    corners: tuple[tuple[int, int] | None, ...]
    size: int

    def as_json(self) -> dict[str, Any]:
        """The image as the page reads it: red, green and blue of each pixel, in base64."""
        height, width, channels = self.pixels.shape
        if channels == 3:
            colors = self.pixels
        else:
            # gray images; the page knows colors alone
            colors = np.repeat(self.pixels[:, :, :1], 3, axis=2)
        return {
            "height": height,
            "width": width,
            "pixels": deflate(np.ascontiguousarray(colors).tobytes()),
            "corners": self.corners,
            "size": self.size,
        }


@dataclass(frozen=True)
class ModelView:
    """The attention maps of one model, what else it reports for each token, and notes on what is shown."""

    name: str
    title: str
    maps: list[AttentionMap]
    notes: dict[str, str]
    counts: list[TokenCounts] = field(default_factory=list)
    labels: HeadLabels = field(default_factory=dict)
    image: ViewedImage | None = None
    gated_parts: frozenset[str] = frozenset()
    """The parts whose heads can be switched off."""

    def as_json(self) -> dict[str, Any]:
        """The view as the page reads it: sequences of tokens, maps that refer to them, and all weights in base64."""
        encoded = encode_weights([attention_map.weights for attention_map in self.maps])
        # heads and layers share their tokens, which are written once
        sequences: dict[tuple[str, ...], int] = {}
        maps = []
        for attention_map, levels in zip(self.maps, encoded.levels):
            part = attention_map.part.partition(", ")[0]
            rows = _pool_labels(attention_map.rows, encoded.pooling)
            columns = _pool_labels(attention_map.columns, encoded.pooling)
            record = {
                "name": attention_map.part,
                # layers of one kind stand in one group, whatever their numbers
                "group": re.sub(r"\.\d+(?=\.|$)", "", part),
                "title": TITLES[attention_map.keys],
                "keys": attention_map.keys,
                "rows": sequences.setdefault(rows, len(sequences)),
                "columns": sequences.setdefault(columns, len(sequences)),
                "memory": attention_map.memory // encoded.pooling,
                "heads": len(levels.levels),
                "note": self.notes.get(attention_map.part, ""),
                "labels": list(self.labels.get(part, ())),
                "gated": part in self.gated_parts,
            }
            maps.append(record)
        counts = [
            {**count._asdict(), "tokens": sequences.setdefault(count.tokens, len(sequences))} for count in self.counts
        ]
        return {
            "name": self.name,
            "title": self.title,
            "sequences": list(sequences),
            "maps": maps,
            "counts": counts,
            # pooled weights have no single token, whose square could be marked
            "image": None if self.image is None or encoded.pooling > 1 else self.image.as_json(),
            "pooling": encoded.pooling,
            "weights": encoded.text,
        }


def view_text(
    model: Model,
    text: TextOrIds,
    answer: TextOrIds | None = None,
    *,
    name: str = "",
    labels: HeadLabels | None = None,
) -> ModelView:
    """What `model` computes for `text`; the target of an encoder-decoder is `answer`, or its translation.

    A model with a memory reads the first half of the text before, so that the page shows the second half and the
    memory. `labels` are those of its heads, which `manyformer.analysis.heads.read_head_labels` reads.

    Raises UserError for a model that reads no text or reports nothing, and for a text of more than 2048 tokens.
    """
    with torch.no_grad(), eval_mode(model):
        passes = passes_over_text(model, text, answer, labels=full_token_labels)
        if model.carries_state:
            # otherwise the memory would be empty, and nothing of it to be seen
            passes = [second_half(model, text_pass) for text_pass in passes]
        view = view_passes(model, passes, name=name)
    return replace(view, labels=labels or {})


def second_half(model: Model, text_pass: TextPass) -> TextPass:
    """The second half of a pass, with the first half in the memory of the model; a single token has no first half."""
    task = task_of(model)
    middle = len(text_pass.tokens) // 2
    tokens = torch.tensor([text_pass.tokens], device=model.device)
    first = Inputs(tokens[:, :middle])
    second = Inputs(tokens[:, middle:])

    def run(watch: WatchFn) -> ModelOutput:
        state = None
        if middle:
            state = task.call(model, first, task.init_state(model, first)).state
        return task.call(model, second, state, watch=watch)

    labels = text_pass.labels
    return TextPass(run, labels[middle:], len(labels) - middle, remembered_labels=labels[:middle])


def image_task(model: Model) -> Task[Any] | None:
    """The task of a model of images; None for all others."""
    task = task_of(model)
    # a language model may have been trained on the values of pixels
    if isinstance(model.tokenizer, PixelTokenizer):
        task = task.variant("images")
    if type(task).image_pass is Task.image_pass:
        return None
    return task


def view_image(model: Model, image: ImageArray, *, name: str = "", labels: HeadLabels | None = None) -> ModelView:
    """What `model` computes for an image (h, w, c) of bytes. Raises UserError for a model that reads no image."""
    image_pass = (image_task(model) or task_of(model)).image_pass(model, image, model.tokenizer)
    with torch.no_grad(), eval_mode(model):
        view = view_passes(model, [image_pass.tokens], name=name)
    return replace(view, labels=labels or {}, image=ViewedImage(image, image_pass.corners, image_pass.size))


def shows_rows_of_data(model: Model) -> bool:
    """Whether the task of a model shows a row of its data, because its inputs are no plain texts."""
    return type(task_of(model)).example_pass is not Task.example_pass


def view_row(
    model: Model, batch: Batch, tokenizers: TaskTokenizers, *, name: str = "", labels: HeadLabels | None = None
) -> ModelView:
    """What `model` computes for the first row of a batch. Raises UserError for a task that reads texts or images."""
    with torch.no_grad(), eval_mode(model):
        view = view_passes(model, [task_of(model).example_pass(model, batch, tokenizers)], name=name)
    return replace(view, labels=labels or {})


def view_passes(model: Model, passes: Sequence[TextPass], *, name: str = "") -> ModelView:
    """What `model` computes in these passes, in evaluation mode and without gradients. Raises UserError."""
    length = max(max(text_pass.length, len(text_pass.source_labels)) for text_pass in passes)
    if length > MAX_TOKENS:
        raise UserError(f"the input has {length} tokens, but a page shows at most {MAX_TOKENS}: shorten it")
    plans = _KernelPlans(model)
    with plans:
        maps = [attention_map for text_pass in passes for attention_map in all_pass_maps(model, text_pass)]
    # after the layers, as the datastore is asked behind the last one
    maps += [retrieved for text_pass in passes if (retrieved := retrieved_map(model, text_pass)) is not None]
    counts = pass_counts(model, passes)
    if not maps and not counts:
        raise UserError(
            f"{model_name(model)} forms no weights of pairs of tokens, and does the same for every token: "
            "nothing to show"
        )
    maps = _number_calls(maps)
    notes = {attention_map.part: plans.note(attention_map) for attention_map in maps}
    return ModelView(name, _title(model), maps, notes, counts, gated_parts=frozenset(attention_heads(model)))


class _KernelPlans:
    """Records which path computes each kernel where no weights are watched, while it is entered as a context."""

    def __init__(self, model: Model) -> None:
        self._kernels = named_kernels(model)
        self._plans: dict[str, str] = {}

    def __enter__(self) -> None:
        self._handles = [
            kernel.register_forward_pre_hook(partial(self._record, part_name(name), kernel))
            for name, kernel in self._kernels.items()
        ]

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _record(self, part: str, kernel: Kernel, _: torch.nn.Module, arguments: tuple[KernelCall]) -> None:
        # as if nobody watched
        self._plans.setdefault(part, kernel.explain(arguments[0]._replace(watch=no_watch)))

    def note(self, attention_map: AttentionMap) -> str:
        """What else is known of the map: whether its weights are implied, and how they are computed otherwise."""
        plan = self._plans.get(attention_map.part.partition(", ")[0])
        sentences = [IMPLIED] if attention_map.implied else []
        if attention_map.keys == "tokens" and not bool((attention_map.weights != 0).all()):
            share = (attention_map.weights != 0).float().mean().item()
            sentences.append(f"{share:.0%} of all pairs have a weight.")
        if plan is not None:
            sentences.append(f"Computed by {plan}.")
        return " ".join(sentences)


def _number_calls(maps: Sequence[AttentionMap]) -> list[AttentionMap]:
    """The maps, in which the calls of a part that is applied repeatedly are numbered."""
    totals = Counter(attention_map.part for attention_map in maps)
    counts = Counter[str]()
    numbered = []
    for attention_map in maps:
        counts[attention_map.part] += 1
        step = ""
        if totals[attention_map.part] > 1:
            step = f", step {counts[attention_map.part]}"
        numbered.append(attention_map._replace(part=f"{attention_map.part}{step}"))
    return numbered


def _pool_labels(labels: tuple[str, ...], size: int) -> tuple[str, ...]:
    """One label for every `size` labels: the first and the last of them."""
    if size == 1:
        return labels
    groups = [labels[start : start + size] for start in range(0, len(labels), size)]
    return tuple(f"{group[0].strip()} … {group[-1].strip()}" for group in groups)


def _title(model: Model) -> str:
    """The recipe and the size of a model."""
    spec = getattr(model, "spec", None)
    if spec is not None and spec.recipe in RECIPES:
        recipe = RECIPES[spec.recipe].card.title
    else:
        recipe = model_name(model)
    return f"{recipe}, {sum(weight.numel() for weight in model.parameters()):,} parameters"


def retrieved_map(model: Model, text_pass: TextPass) -> AttentionMap | None:
    """The weights of the nearest contexts of each token, and the text of these; None for a model without a datastore.

    A column is an entry of the datastore: the end of its context and the token that followed. The weights are shares
    among all neighbours that the model uses, of which each token shows its `SHOWN_NEIGHBOURS` nearest.
    """
    head = getattr(model, "head", None)
    if not isinstance(head, KNNHead) or not isinstance(model.tokenizer, Tokenizer):
        return None
    neighbours = head.store.search(head.key(_head_input(head, text_pass)), head.settings.neighbours)
    weights = neighbour_weights(neighbours.distances, head.settings.temperature)[:, :SHOWN_NEIGHBOURS].float().cpu()
    nearest = neighbours.entries[:, :SHOWN_NEIGHBOURS].cpu()
    entries, columns = torch.unique(nearest, return_inverse=True)
    # tokens that retrieve the same entry share its column
    dense = weights.new_zeros(len(weights), len(entries)).scatter_add_(1, columns, weights)
    # entry -1 is the absence of a neighbour
    dense = dense[:, entries >= 0]
    entries = entries[entries >= 0]
    labels = tuple(_entry_text(head, model.tokenizer, entry) for entry in entries.tolist())
    rows = text_pass.labels
    shown = dense[None, : len(rows)]
    return AttentionMap("datastore", rows, labels, shown, keys="contexts")


def _head_input(head: KNNHead, text_pass: TextPass) -> Tensor:
    """What the head reads in the pass, without axes of batches."""
    inputs: list[Tensor] = []

    def record(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        inputs.append(arguments[0])

    with head.register_forward_pre_hook(record):
        text_pass.run(no_watch)
    return inputs[-1]


def _entry_text(head: KNNHead, tokenizer: Tokenizer, entry: int) -> str:
    context, token, _ = head.store.context(entry, CONTEXT_TOKENS, 0)
    texts: list[str] = []
    for is_ordinary, group in groupby(context, lambda number: bool(tokenizer.is_ordinary[number])):
        tokens = list(group)
        # decoded together: a token alone may be a part of a character, or of a word
        texts += [visible_text(tokenizer.decode(tokens))] if is_ordinary else full_token_labels(tokens, tokenizer)
    return f"{''.join(texts)} → {full_token_labels([token], tokenizer)[0]}"


class WeightLevels(NamedTuple):
    """Weights as integers from -127 to 127, and the scale of each row.

    A weight other than 0 has the magnitude of its level less 0.5, over 126.5, times the scale of its row.
    """

    scales: Float[Tensor, "h l"]
    levels: Int8[Tensor, "h l s"]


class EncodedWeights(NamedTuple):
    """All scales as float32, then all levels as bytes, both in the order of the maps: deflated, in base64.

    Each level stands for `pooling` x `pooling` weights.
    """

    text: str
    levels: list[WeightLevels]
    pooling: int


def encode_weights(
    maps: Sequence[Float[Tensor, "_ _ _"]], max_characters: int = MAX_ENCODED_CHARACTERS
) -> EncodedWeights:
    """Encode maps of weights (h, l, s); if they take more than `max_characters`, they are pooled until they do not.

    Pooling takes the largest weight, because a mean would hide heads that attend to single tokens.
    """
    pooling = 1
    while True:
        # before encoding: weights that a browser cannot unpack need not be compressed
        if sum(weights.numel() for weights in maps) > MAX_WEIGHTS * pooling**2:
            pooling *= 2
            continue
        levels = [quantize_weights(pool_largest(weights, pooling)) for weights in maps]
        # scales before levels, because floats must begin at a multiple of four bytes
        scales = b"".join(map_levels.scales.numpy().astype("<f4").tobytes() for map_levels in levels)
        cells = b"".join(map_levels.levels.numpy().tobytes() for map_levels in levels)
        text = deflate(scales + cells)
        if len(text) <= max_characters:
            return EncodedWeights(text, levels, pooling)
        pooling *= 2


def deflate(content: bytes) -> str:
    """Compressed bytes in base64, which the page unpacks."""
    return base64.b64encode(zlib.compress(content, 9)).decode("ascii")


def quantize_weights(weights: Float[Tensor, "h l s"]) -> WeightLevels:
    """Each row as levels of its largest absolute weight; a weight that is not 0 has no level 0."""
    shares = row_shares(weights)
    # the sign of 0 is 0, so that only weights of exactly 0 have level 0
    levels = (shares.abs() * LEVELS).ceil().clamp(min=1) * shares.sign()
    return WeightLevels(weights.abs().amax(-1), levels.to(torch.int8))


def pool_largest(weights: Float[Tensor, "h l s"], size: int) -> Float[Tensor, "h m n"]:
    """The weight with the largest absolute value of each `size` x `size` square; the last squares may be smaller."""
    if size == 1:
        return weights
    highest = F.max_pool2d(weights, size, ceil_mode=True)
    lowest = -F.max_pool2d(-weights, size, ceil_mode=True)
    # some kernels have negative weights: the larger magnitude wins, with its sign
    return torch.where(highest >= -lowest, highest, lowest)
