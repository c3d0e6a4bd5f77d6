"""How much work a trained model does for each token of a text, and how far its heads look back."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.batches import IGNORE_INDEX, Batch, CausalLMBatch
from manyformer.errors import UserError
from manyformer.generate import translate
from manyformer.generate.decode_plan import sides
from manyformer.generate.prompts import check_tokens
from manyformer.generate.protocol import TokenizerProtocol
from manyformer.kernels.adaptive_span_kernel import AdaptiveSpanKernel
from manyformer.models import EncoderDecoder, LanguageModel, MaskedLM, Model, TextClassifier
from manyformer.training_hooks import eval_mode
from manyformer.view.attention_maps import part_name, row_of, shown_tokens
from manyformer.view.figures import check_picture, write_picture
from manyformer.view.token_counts import TokenCounts

COUNTED = {"steps": "steps", "depth": "layers"}
"""What parts of a model report that count the work for each token, and what it is that they count."""


class LayerSpans(NamedTuple):
    """The spans of one layer's heads, in tokens, the longest that there could be, and the ramp behind it."""

    part: str
    spans: tuple[float, ...]
    max_length: int
    ramp: int


def token_work(model: Model, text: str, answer: str | None = None) -> list[TokenCounts]:
    """The steps that each token of `text` takes, or the layer that it leaves at, in every part that counts them.

    An encoder-decoder writes `answer`, or what it would. Raises UserError for a model without a tokenizer, or one that
    does the same for all tokens.
    """
    words = sides(model.tokenizer)
    if words.read is None or words.write is None:
        raise UserError("the model was saved without a tokenizer, so it cannot read text")
    seen = _Seen(model)
    with torch.no_grad(), eval_mode(model):
        if isinstance(model, EncoderDecoder):
            _pair(model, words.read, words.write, text, answer, seen)
        elif isinstance(model, LanguageModel | MaskedLM | TextClassifier) and answer is None:
            _single(model, words.read, text, seen)
        else:
            raise UserError(f"{type(model).__name__}: only an encoder-decoder writes an answer, and only text is read")
    if not seen.counted:
        name = model.spec.recipe if hasattr(model, "spec") else type(model).__name__
        raise UserError(f"{name} does the same for every token, so there is nothing to count")
    return seen.counted


def spans(model: nn.Module) -> list[LayerSpans]:
    """How far each head of each layer looks back, for spans that do not depend on the text. Raises UserError."""
    found = [(name, part) for name, part in model.named_modules() if isinstance(part, AdaptiveSpanKernel)]
    if not found:
        raise UserError("no part of this model has spans of its own: adaptive-span does")
    if any(part.spans.query_dim for _, part in found):
        raise UserError("each token has spans of its own here: give a text")
    nothing = torch.empty(1, found[0][1].spans.heads, 1, 0)
    with torch.no_grad():
        return [
            _layer(name, part, part.spans(nothing.to(next(model.parameters()).device))[0, :, 0]) for name, part in found
        ]


def spans_for(model: Model, text: str) -> list[LayerSpans]:
    """The same for a text: where each token has its own, their mean. Raises UserError."""
    words = sides(model.tokenizer)
    if words.read is None:
        raise UserError("the model was saved without a tokenizer, so it cannot read text")
    if not isinstance(model, LanguageModel):
        raise UserError(f"spans are those of a language model, not of a {type(model).__name__}")
    seen = _Seen(model)
    with torch.no_grad(), eval_mode(model):
        _single(model, words.read, text, seen)
    if not seen.layers:
        raise UserError("no part of this model has spans of its own: adaptive-span does")
    return seen.layers


def mean_span(model: nn.Module) -> float | None:
    """The mean over all heads, in tokens; None where no head has a span of its own."""
    if not any(isinstance(part, AdaptiveSpanKernel) and not part.spans.query_dim for part in model.modules()):
        return None
    every = [span for one in spans(model) for span in one.spans]
    return sum(every) / len(every)


def mean_steps(model: LanguageModel, batches: Iterable[Batch], device: torch.device) -> float | None:
    """The work that the tokens with a target get, on average, in all parts that count it; None where none does."""
    counts = [torch.zeros(2, dtype=torch.float64)]

    def watch(module: nn.Module, name: str, value: Tensor) -> None:
        if name in COUNTED:
            mine = value.double().cpu()[scored]
            counts.append(torch.stack([mine.sum(), torch.tensor(mine.numel())]))

    with torch.no_grad(), eval_mode(model):
        for batch in batches:
            assert isinstance(batch, CausalLMBatch)
            scored = (batch.targets != IGNORE_INDEX).cpu()
            segments = None if batch.segments is None else batch.segments.to(device)
            model(batch.tokens.to(device), segments, watch=watch)
    total, number = torch.stack(counts).sum(0).tolist()
    return total / number if number else None


def describe_spans(layers: Sequence[LayerSpans]) -> str:
    """A line a layer: the span of each head, and their mean."""
    wide = max(len(one.part) for one in layers)
    lines = []
    for one in layers:
        cells = " ".join(f"{span:6.1f}" for span in one.spans)
        lines.append(f"{one.part:<{wide}} {cells}  mean {sum(one.spans) / len(one.spans):.1f}")
    every = [span for one in layers for span in one.spans]
    mean = sum(every) / len(every)
    return "\n".join(
        [*lines, f"mean {mean:.1f} of {layers[0].max_length} tokens, and {layers[0].ramp} more to fade out"]
    )


def draw_spans(layers: Sequence[LayerSpans], path: str | Path, *, title: str = "") -> None:
    """Draw the span of each head against its layer, and their mean; the ending of `path` decides the format."""
    from manyformer.view.figures import colour, panels

    check_picture(Path(path))
    figure, (axis,) = panels(1, 1)
    for number, one in enumerate(layers, 1):
        axis.plot([number] * len(one.spans), one.spans, "o", color=colour(0), alpha=0.6)
    means = [sum(one.spans) / len(one.spans) for one in layers]
    axis.plot(range(1, len(layers) + 1), means, "-", color=colour(1), label="mean")
    axis.axhline(layers[0].max_length, color="#999999", linestyle="--", label="the longest there may be")
    axis.set_xticks(range(1, len(layers) + 1))
    axis.set_xlabel("layer")
    axis.set_ylabel("span (tokens)")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize="x-small")
    if title:
        axis.set_title(title, fontsize=9)
    write_picture(figure, Path(path))


def _layer(name: str, part: AdaptiveSpanKernel, lengths: Float[Tensor, " h"]) -> LayerSpans:
    return LayerSpans(part_name(name), tuple(lengths.tolist()), part.spans.max_length, part.spans.ramp)


class _Seen:
    """A watcher that remembers what was counted for `tokens`, under the names of the parts, and mean spans."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self.tokens: tuple[str, ...] = ()
        self.counted: list[TokenCounts] = []
        self.layers: list[LayerSpans] = []

    def watch(self, module: nn.Module, name: str, value: Tensor) -> None:
        """To be handed to a call."""
        if name in COUNTED:
            numbers = tuple(value[0].tolist())
            title = f"{part_name(self._names[module]) or type(module).__name__}: {name}"
            self.counted.append(TokenCounts(title, self.tokens, numbers, _most(module, numbers), COUNTED[name]))
        elif name == "halting":
            # the part has said before how many steps each token took
            chances = tuple(
                tuple(row[: int(steps)]) for row, steps in zip(value[0].tolist(), self.counted[-1].numbers, strict=True)
            )
            self.counted[-1] = self.counted[-1]._replace(halting=chances)
        elif name == "spans" and isinstance(module, AdaptiveSpanKernel):
            self.layers.append(_layer(self._names[module], module, value.mean((0, 2))))


def _most(module: nn.Module, numbers: Sequence[float]) -> float:
    """The largest number that a token could have: the steps of a recurrence, the layers of a stack."""
    halting = getattr(module, "halting", None)
    most = getattr(halting, "most", None) or getattr(module, "depth", None)
    return float(most) if isinstance(most, int) else max(numbers)


def _pair(
    model: EncoderDecoder, read: TokenizerProtocol, write: TokenizerProtocol, text: str, answer: str | None, seen: _Seen
) -> None:
    if answer is None:
        answer = translate(model, [text], tokenizer=(read, write))[0]
    source, target = [*read.encode(text), read.eos], [write.bos, *write.encode(answer)]
    check_tokens([source], model.vocab if read is write else read.vocab)
    seen.tokens = shown_tokens(source, read)
    memory = model.encode(row_of(source, model), watch=seen.watch)
    seen.tokens = shown_tokens(target, write)
    model.decode(row_of(target, model), memory, watch=seen.watch)


def _single(model: LanguageModel | MaskedLM | TextClassifier, read: TokenizerProtocol, text: str, seen: _Seen) -> None:
    tokens = [read.bos, *read.encode(text), *([] if isinstance(model, LanguageModel) else [read.eos])]
    check_tokens([tokens], model.embed.token.num_embeddings)
    seen.tokens = shown_tokens(tokens, read)
    model(row_of(tokens, model), watch=seen.watch)
