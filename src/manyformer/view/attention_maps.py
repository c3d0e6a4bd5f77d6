"""What a trained model looks at: the weights of its attention for a text, as a drawing and as text for the terminal."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import WatchFn
from manyformer.errors import UserError, nearest
from manyformer.generate import translate
from manyformer.generate.decode_plan import sides
from manyformer.generate.prompts import check_tokens
from manyformer.generate.protocol import TokenizerProtocol
from manyformer.models import EncoderDecoder, LanguageModel, MaskedLM, Model, TextClassifier
from manyformer.training_hooks import eval_mode
from manyformer.view.figures import PANEL, check_picture, write_picture
from manyformer.view.mask_pictures import SHADES

INCH = 0.21
"""The size of a token in a drawing."""

SHOWN = 12
"""A token is shown by at most this many letters."""


class AttentionMap(NamedTuple):
    """The weights of one part of a model: a row for each token that looks, a column for each that is looked at.

    Where an encoder-decoder looks at its source, a row is the token that is written at that step.
    """

    part: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    weights: Float[Tensor, "h l s"]
    crossing: bool


def attention_maps(model: Model, text: str, answer: str | None = None) -> list[AttentionMap]:
    """All attention weights of `model` while it reads `text`; an encoder-decoder writes `answer`, or what it would.

    Whatever hands "weights" to `ctx.watch` is found, one part a module, in the order of work; parts that look at
    something else than tokens, such as the slots of a Linformer, are left out. Raises UserError for a model that has
    no tokenizer, reads no plain text or has no such part.
    """
    words = sides(model.tokenizer)
    if words.read is None or words.write is None:
        raise UserError("the model was saved without a tokenizer, so it cannot read text")
    if not isinstance(model, EncoderDecoder) and answer is not None:
        raise UserError(f"only an encoder-decoder writes an answer; {type(model).__name__} reads the text alone")
    with torch.no_grad(), eval_mode(model):
        if isinstance(model, EncoderDecoder):
            found = _pair(model, words.read, words.write, text, answer)
        elif isinstance(model, LanguageModel | MaskedLM | TextClassifier):
            found = _single(model, words.read, text)
        else:
            raise UserError(f"attention is drawn for text; a {type(model).__name__} reads something else")
    if not found:
        raise UserError(f"no part of {_name(model)} has weights for pairs of tokens, so there is nothing to draw")
    return found


def select_map(found: Sequence[AttentionMap], *, part: str | None = None, layer: int | None = None) -> AttentionMap:
    """One of the maps: of those whose name contains `part`, else those over the source if any, number `layer` from 1.

    The last one unless told; a model with fewer layers gives its last as well. Raises UserError for an unknown part.
    """
    if part is not None:
        kept = [one for one in found if part in one.part]
        if not kept:
            raise UserError(f"there is no part '{part}'; {nearest(part, [one.part for one in found])}")
    else:
        kept = [one for one in found if one.crossing] or list(found)
    return kept[-1 if layer is None else min(layer, len(kept)) - 1]


def describe(chosen: AttentionMap) -> str:
    """A map as text: a line a row, with the token that it looks at most, and how much of the look that one gets."""
    weights = chosen.weights.mean(0)
    wide = max(map(len, chosen.rows))
    most = weights.max(-1)
    lines = []
    for token, row, share, at in zip(chosen.rows, weights.tolist(), most.values.tolist(), most.indices.tolist()):
        cells = "".join(SHADES[min(4, int(5 * weight))] for weight in row)
        lines.append(f"{token:>{wide}} {cells} {chosen.columns[at]} {share:.0%}")
    return "\n".join(lines)


def draw_maps(shown: dict[str, AttentionMap], path: str | Path, *, apart: bool = False) -> None:
    """Draw maps beside each other under their names: the mean over heads, or, `apart`, one drawing for each head.

    The ending of `path` decides the format (.png, .svg or .pdf).
    """
    from matplotlib.figure import Figure

    check_picture(Path(path))
    drawings = list(_drawings(shown, apart=apart))
    across = max(len(one.columns) for one, _, _ in drawings) * INCH + 1.4
    down = max(len(one.rows) for one, _, _ in drawings) * INCH + 2.0
    figure = Figure(figsize=(max(across, PANEL[0] / 2) * len(drawings) + 0.8, down), layout="constrained")
    images = []
    for number, (one, weights, title) in enumerate(drawings):
        axis = figure.add_subplot(1, len(drawings), number + 1)
        images.append(axis.imshow(weights.numpy(), cmap="Blues", vmin=0, vmax=1))
        axis.set_xticks(range(len(one.columns)), one.columns, rotation=90)
        axis.set_yticks(range(len(one.rows)), one.rows)
        axis.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=2, labelsize=8)
        axis.set_title(title, fontsize=9)
    figure.colorbar(images[0], ax=figure.axes, shrink=0.9, pad=0.01, label="share of the look")
    write_picture(figure, Path(path))


def _drawings(shown: dict[str, AttentionMap], *, apart: bool) -> Iterator[tuple[AttentionMap, Tensor, str]]:
    for name, one in shown.items():
        heads = len(one.weights)
        told = f"{name}\n{one.part}"
        if not apart or heads == 1:
            yield one, one.weights.mean(0), told if heads == 1 else f"{told}, mean of {heads} heads"
            continue
        for head, weights in enumerate(one.weights):
            yield one, weights, f"{told}, head {head}"


def _pair(
    model: EncoderDecoder, read: TokenizerProtocol, write: TokenizerProtocol, text: str, answer: str | None
) -> list[AttentionMap]:
    if answer is None:
        answer = translate(model, [text], tokenizer=(read, write))[0]
    source, target = [*read.encode(text), read.eos], list(write.encode(answer))
    check_tokens([source], model.vocab if read is write else read.vocab)
    inputs, written = [write.bos, *target], [*target, write.eos]
    # one token of padding more where both sides are alike: the number of columns then tells which is looked at
    spare = int(len(source) == len(inputs))
    row, segments = row_of([*source, *[read.pad] * spare], model), row_of([0] * len(source) + [-1] * spare, model)
    in_encoder, in_decoder = _Seen(model), _Seen(model)
    memory = model.encode(row, segments, watch=in_encoder.watch)
    model.decode(row_of(inputs, model), memory, watch=in_decoder.watch)
    sources, ins, outs = shown_tokens(source, read), shown_tokens(inputs, write), shown_tokens(written, write)
    found = [
        AttentionMap(name, sources, sources, weights, crossing=False) for name, weights in in_encoder.over(len(row[0]))
    ]
    for name, weights in in_decoder.found:
        if weights.shape[-1] == row.shape[1]:
            found.append(AttentionMap(name, outs, sources, weights, crossing=True))
        elif weights.shape[-1] == len(inputs):
            found.append(AttentionMap(name, ins, ins, weights, crossing=False))
    return [one._replace(weights=one.weights[:, : len(one.rows), : len(one.columns)]) for one in found]


def _single(model: LanguageModel | MaskedLM | TextClassifier, read: TokenizerProtocol, text: str) -> list[AttentionMap]:
    # as in training: a text begins with the start token, and one that is read as a whole has an end
    tokens = [read.bos, *read.encode(text), *([] if isinstance(model, LanguageModel) else [read.eos])]
    check_tokens([tokens], model.embed.token.num_embeddings)
    seen, shown = _Seen(model), shown_tokens(tokens, read)
    model(row_of(tokens, model), watch=seen.watch)
    return [AttentionMap(name, shown, shown, weights, crossing=False) for name, weights in seen.over(len(tokens))]


class _Seen:
    """A watcher that remembers weights of pairs under the names of the modules that formed them."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self.found: list[tuple[str, Tensor]] = []

    @property
    def watch(self) -> WatchFn:
        return self._add

    def over(self, length: int) -> list[tuple[str, Tensor]]:
        """Those between as many tokens."""
        return [(name, weights) for name, weights in self.found if weights.shape[-2:] == (length, length)]

    def _add(self, module: nn.Module, name: str, value: Tensor) -> None:
        if name == "weights" and value.ndim == 4:
            self.found.append((part_name(self._names[module]), value[0].float().cpu()))


def part_name(name: str) -> str:
    """A part's name without what only says how parts are put together."""
    return ".".join(word for word in name.split(".") if word not in ("inner", "kernel"))


def shown_tokens(tokens: Sequence[int], words: TokenizerProtocol) -> tuple[str, ...]:
    """How tokens are shown: as text, or by their names, none of them long."""
    token: Callable[[int], str] = getattr(words, "token", lambda number: words.decode([number]))
    return tuple((token(number).strip() or "␣")[:SHOWN] for number in tokens)


def row_of(tokens: Sequence[int], model: Any) -> Tensor:
    """One row of tokens, where the model is."""
    return torch.tensor([list(tokens)], device=model.device)


def _name(model: Model) -> str:
    return model.spec.recipe if hasattr(model, "spec") else type(model).__name__
