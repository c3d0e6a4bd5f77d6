"""Attention weights of a trained model for a text, as a figure and as text for the terminal."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import WatchFn
from manyformer.errors import UserError, suggest_names
from manyformer.generate import translate
from manyformer.generate.decode_plan import read_write_tokenizers
from manyformer.generate.prompts import check_tokens
from manyformer.generate.protocol import TokenizerProtocol
from manyformer.models import EncoderDecoder, LanguageModel, MaskedLM, Model, TextClassifier
from manyformer.training_hooks import eval_mode
from manyformer.view.figures import PANEL_INCHES, check_picture, write_picture
from manyformer.view.mask_pictures import SHADES

TOKEN_INCHES = 0.21
"""The size of a token in a figure."""

MAX_TOKEN_LENGTH = 12
"""The most characters of a token's label."""


class AttentionMap(NamedTuple):
    """The attention weights of one part of a model, with a label for each query (row) and each key (column).

    In cross-attention over a source, a row is labelled with the token that is predicted at that step.
    """

    part: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    weights: Float[Tensor, "h l s"]
    is_cross_attention: bool


def attention_maps(model: Model, text: str, answer: str | None = None) -> list[AttentionMap]:
    """All attention weights of `model` for `text`; the target of an encoder-decoder is `answer`, or its translation.

    Every module that reports "weights" to `ctx.watch` gives one map, in the order of computation; modules whose keys
    are not tokens, such as the slots of a Linformer, are left out. Raises UserError for a model that has no tokenizer,
    reads no plain text or has no such module.
    """
    tokenizers = read_write_tokenizers(model.tokenizer)
    if tokenizers.read is None or tokenizers.write is None:
        raise UserError("the model was saved without a tokenizer, so it cannot read text")
    if not isinstance(model, EncoderDecoder) and answer is not None:
        raise UserError(f"only an encoder-decoder writes an answer; a {type(model).__name__} reads the text alone")
    with torch.no_grad(), eval_mode(model):
        if isinstance(model, EncoderDecoder):
            maps = _encoder_decoder_maps(model, tokenizers.read, tokenizers.write, text, answer)
        elif isinstance(model, LanguageModel | MaskedLM | TextClassifier):
            maps = _single_text_maps(model, tokenizers.read, text)
        else:
            raise UserError(f"attention is drawn for text; a {type(model).__name__} reads something else")
    if not maps:
        raise UserError(f"no part of {_model_name(model)} has weights for pairs of tokens, so there is nothing to draw")
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
    weights = attention.weights.mean(0)
    label_width = max(map(len, attention.rows))
    strongest = weights.max(-1)
    lines = []
    for token, row, share, column in zip(
        attention.rows, weights.tolist(), strongest.values.tolist(), strongest.indices.tolist()
    ):
        cells = "".join(SHADES[min(4, int(5 * weight))] for weight in row)
        lines.append(f"{token:>{label_width}} {cells} {attention.columns[column]} {share:.0%}")
    return "\n".join(lines)


def draw_maps(maps: dict[str, AttentionMap], path: str | Path, *, per_head: bool = False) -> None:
    """Draw maps side by side, titled with their names: the mean over heads or, with `per_head`, a panel for each head.

    The suffix of `path` decides the format (.png, .svg or .pdf).
    """
    from matplotlib.figure import Figure

    check_picture(Path(path))
    panels = list(_panels(maps, per_head=per_head))
    width = max(len(attention.columns) for attention, _, _ in panels) * TOKEN_INCHES + 1.4
    height = max(len(attention.rows) for attention, _, _ in panels) * TOKEN_INCHES + 2.0
    figure = Figure(figsize=(max(width, PANEL_INCHES[0] / 2) * len(panels) + 0.8, height), layout="constrained")
    images = []
    for index, (attention, weights, title) in enumerate(panels):
        axis = figure.add_subplot(1, len(panels), index + 1)
        images.append(axis.imshow(weights.numpy(), cmap="Blues", vmin=0, vmax=1))
        axis.set_xticks(range(len(attention.columns)), attention.columns, rotation=90)
        axis.set_yticks(range(len(attention.rows)), attention.rows)
        axis.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=2, labelsize=8)
        axis.set_title(title, fontsize=9)
    figure.colorbar(images[0], ax=figure.axes, shrink=0.9, pad=0.01, label="attention weight")
    write_picture(figure, Path(path))


def _panels(maps: dict[str, AttentionMap], *, per_head: bool) -> Iterator[tuple[AttentionMap, Tensor, str]]:
    for name, attention in maps.items():
        heads = len(attention.weights)
        title = f"{name}\n{attention.part}"
        if not per_head or heads == 1:
            yield attention, attention.weights.mean(0), title if heads == 1 else f"{title}, mean of {heads} heads"
            continue
        for head, weights in enumerate(attention.weights):
            yield attention, weights, f"{title}, head {head}"


def _encoder_decoder_maps(
    model: EncoderDecoder, read: TokenizerProtocol, write: TokenizerProtocol, text: str, answer: str | None
) -> list[AttentionMap]:
    if answer is None:
        answer = translate(model, [text], tokenizer=(read, write))[0]
    source, target = [*read.encode(text), read.eos], list(write.encode(answer))
    check_tokens([source], model.vocab if read is write else read.vocab)
    decoder_input, decoder_target = [write.bos, *target], [*target, write.eos]
    # one more padding token if both sides have equal lengths: the number of keys then identifies the side
    extra_padding = int(len(source) == len(decoder_input))
    source_row = token_row([*source, *[read.pad] * extra_padding], model)
    segments = token_row([0] * len(source) + [-1] * extra_padding, model)
    encoder_recorder, decoder_recorder = _WeightRecorder(model), _WeightRecorder(model)
    memory = model.encode(source_row, segments, watch=encoder_recorder.watch)
    model.decode(token_row(decoder_input, model), memory, watch=decoder_recorder.watch)
    source_labels, input_labels = token_labels(source, read), token_labels(decoder_input, write)
    target_labels = token_labels(decoder_target, write)
    maps = [
        AttentionMap(name, source_labels, source_labels, weights, is_cross_attention=False)
        for name, weights in encoder_recorder.self_attention_weights(len(source_row[0]))
    ]
    for name, weights in decoder_recorder.recorded:
        if weights.shape[-1] == source_row.shape[1]:
            maps.append(AttentionMap(name, target_labels, source_labels, weights, is_cross_attention=True))
        elif weights.shape[-1] == len(decoder_input):
            maps.append(AttentionMap(name, input_labels, input_labels, weights, is_cross_attention=False))
    return [
        attention._replace(weights=attention.weights[:, : len(attention.rows), : len(attention.columns)])
        for attention in maps
    ]


def _single_text_maps(
    model: LanguageModel | MaskedLM | TextClassifier, read: TokenizerProtocol, text: str
) -> list[AttentionMap]:
    # as in training: a text has a start token, and for a bidirectional model an end token
    tokens = [read.bos, *read.encode(text), *([] if isinstance(model, LanguageModel) else [read.eos])]
    check_tokens([tokens], model.embed.token.num_embeddings)
    recorder, labels = _WeightRecorder(model), token_labels(tokens, read)
    model(token_row(tokens, model), watch=recorder.watch)
    return [
        AttentionMap(name, labels, labels, weights, is_cross_attention=False)
        for name, weights in recorder.self_attention_weights(len(tokens))
    ]


class _WeightRecorder:
    """A `watch` callback that records attention weights under the names of their modules."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self.recorded: list[tuple[str, Tensor]] = []

    @property
    def watch(self) -> WatchFn:
        return self._record

    def self_attention_weights(self, length: int) -> list[tuple[str, Tensor]]:
        """Recorded weights whose query and key axes both have `length` entries, i.e. self-attention over the text."""
        return [(name, weights) for name, weights in self.recorded if weights.shape[-2:] == (length, length)]

    def _record(self, module: nn.Module, name: str, value: Tensor) -> None:
        if name == "weights" and value.ndim == 4:
            self.recorded.append((part_name(self._names[module]), value[0].float().cpu()))


def part_name(name: str) -> str:
    """A module's name without the segments of wrappers (`inner`, `kernel`)."""
    return ".".join(segment for segment in name.split(".") if segment not in ("inner", "kernel"))


def token_labels(tokens: Sequence[int], tokenizer: TokenizerProtocol) -> tuple[str, ...]:
    """Labels of tokens: their names or decoded text, of at most `MAX_TOKEN_LENGTH` characters."""
    token_text: Callable[[int], str] = getattr(tokenizer, "token", lambda token_id: tokenizer.decode([token_id]))
    return tuple((token_text(token_id).strip() or "␣")[:MAX_TOKEN_LENGTH] for token_id in tokens)


def token_row(tokens: Sequence[int], model: Any) -> Tensor:
    """Token ids as a batch of one row (1, l) on the model's device."""
    return torch.tensor([list(tokens)], device=model.device)


def _model_name(model: Model) -> str:
    return model.spec.recipe if hasattr(model, "spec") else type(model).__name__
