"""Views on demand: of any text, with some heads switched off, and what that changes in the model's answer."""

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import torch
from annotated_types import Ge, Len
from jaxtyping import Float
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from manyformer.attention.head_gates import attention_heads, gated_heads
from manyformer.core import no_watch
from manyformer.errors import UserError
from manyformer.generate import translate
from manyformer.generate.generate import read_write_tokenizers
from manyformer.generate.protocol import TokenizerProtocol, TranslatesText
from manyformer.models import Model
from manyformer.recipes.registry import task_of
from manyformer.training_hooks import eval_mode
from manyformer.view.text_passes import full_token_labels, passes_over_text
from manyformer.viewer.model_view import HeadLabels, view_text

LISTED_TOKENS = 5
"""The number of next tokens that are shown."""

HeadNumbers = dict[str, tuple[Annotated[int, Ge(0)], ...]]


class ViewRequest(BaseModel):
    """What the page asks for: a text, the target of an encoder-decoder, and the heads of each run to switch off."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    text: Annotated[str, Len(1)]
    answer: str | None = None
    off: tuple[HeadNumbers, ...] = ()


class ServedModel(NamedTuple):
    """A model, its name, and the labels of its heads if they are known."""

    name: str
    model: Model
    labels: HeadLabels | None = None


def live_page_data(models: Sequence[ServedModel], request: ViewRequest) -> dict[str, Any]:
    """The data of a page with all `models`, which switches off the heads of the request.

    Raises UserError for heads that a model does not have, and for a text that it cannot read."""
    switched_off = request.off or ({},) * len(models)
    if len(switched_off) != len(models):
        raise UserError(f"heads are given for {len(switched_off)} runs, but there are {len(models)}")
    runs = [_live_view(served, request, off) for served, off in zip(models, switched_off)]
    takes_answer = any(task_of(served.model).takes_source for served in models)
    return {"text": request.text, "answer": request.answer, "takesAnswer": takes_answer, "runs": runs}


def _live_view(served: ServedModel, request: ViewRequest, off: HeadNumbers) -> dict[str, Any]:
    name, model, labels = served
    gates = _head_gates(model, off)
    with torch.no_grad(), eval_mode(model):
        before = None
        if gates:
            before = _outcome(model, request.text, request.answer)
        with gated_heads(model, gates):
            outcome = _outcome(model, request.text, request.answer)
            if outcome is None or outcome.translation is None:
                answer = request.answer
            else:
                answer = outcome.translation
            view = view_text(model, request.text, answer, name=name, labels=labels)
    return {**view.as_json(), "outcome": outcome and outcome.as_json(before)}


def _head_gates(model: Model, off: HeadNumbers) -> dict[str, Tensor]:
    """Gates that are 0 for the heads that are off. Raises UserError for a part or head that the model does not have."""
    layers = attention_heads(model)
    gates = dict[str, Tensor]()
    for part, heads in off.items():
        if part not in layers or max(heads, default=0) >= layers[part].heads:
            raise UserError(f"the model has no heads {', '.join(map(str, heads))} of '{part}' that can be switched off")
        gates[part] = torch.ones(layers[part].heads, device=model.device)
        gates[part][list(heads)] = 0.0
    return gates


def _outcome(model: Model, text: str, answer: str | None) -> "_Outcome | None":
    """The translation of the text, or the probabilities of the next token; None for a given answer and other tasks."""
    if isinstance(model, TranslatesText):
        if answer is None:
            return _Outcome(translation=translate(model, [text], tokenizer=model.tokenizer)[0])
        return None
    if task_of(model).generates != "continuation":
        return None
    output: Any = passes_over_text(model, text)[-1].run(no_watch)
    return _Outcome(output.logits[0, -1].float().softmax(-1), read_write_tokenizers(model.tokenizer).write)


class _Outcome(NamedTuple):
    """What a model makes of a text: a translation, or the probability of each token to be the next one."""

    probabilities: Float[Tensor, " v"] | None = None
    tokenizer: TokenizerProtocol | None = None
    translation: str | None = None

    def as_json(self, before: "_Outcome | None") -> dict[str, Any]:
        """The outcome as the page reads it, with the one `before` heads were switched off."""
        if self.probabilities is None or self.tokenizer is None:
            return {"title": "Translation", "text": self.translation, "before": before and before.translation}
        tokens = self.probabilities.topk(min(LISTED_TOKENS, len(self.probabilities))).indices
        earlier = before and before.probabilities
        columns = (
            full_token_labels(tokens.tolist(), self.tokenizer),
            self.probabilities[tokens].tolist(),
            [None] * len(tokens) if earlier is None else earlier[tokens].tolist(),
        )
        return {"title": "Next token", "tokens": list(zip(*columns))}
