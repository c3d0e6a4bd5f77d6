"""What stands for a context in a datastore: a state of the model, taken out of its body beside what the head gets."""

import hashlib
from dataclasses import replace
from typing import Literal, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import Context, Layer, LayerOutput, State
from manyformer.errors import UserError
from manyformer.feedforward import FeedForward, GatedFeedForward
from manyformer.models import LanguageModel, Model
from manyformer.training_hooks import eval_mode

KeyLayer = Literal["feed-forward", "final"]
"""What goes into the last feed-forward layer, the best of Khandelwal et al. 2020 (section 5), or into the head."""


@final
class KeyedBody(Layer):
    """A body whose output has beside it, in further channels, what went into the feed-forward layer `part`.

    Where that runs several times for a token, the last time counts.
    """

    def __init__(self, body: Layer, part: nn.Module) -> None:
        super().__init__()
        # in a list, so that it is not a part twice
        self.body, self._part = body, [part]

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        return self.body.init_state(batch, capacity=capacity, device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        seen: list[Tensor] = []

        def watch(module: nn.Module, name: str, value: Tensor) -> None:
            if module is self._part[0] and name == "input":
                seen.append(value)
            ctx.watch(module, name, value)

        y, state, loss = self.body(x, replace(ctx, watch=watch), state)
        # a layer may be given its tokens in chunks
        return LayerOutput(torch.cat([y, torch.cat(seen, 1)[:, -y.shape[1] :]], -1), state, loss)


class KeyExtraction(NamedTuple):
    """A body that gives keys: the first `stream` channels of its output are for the head, the last `width` the key."""

    body: Layer
    stream: int
    width: int


def keyed(model: Model, keys: KeyLayer) -> KeyExtraction:
    """The body of a language model with its keys. Raises UserError for a model that has none of this kind."""
    if not isinstance(model, LanguageModel):
        raise UserError(f"a {type(model).__name__} predicts no next tokens, so contexts have none to be stored with")
    stream = _width(model, model.body)
    if keys == "final":
        return KeyExtraction(model.body, stream, stream)
    parts = [part for part in model.body.modules() if isinstance(part, FeedForward | GatedFeedForward)]
    if not parts:
        raise UserError(f"{name_of(model)} has no feed-forward layer whose input could be the key; use keys 'final'")
    body = KeyedBody(model.body, parts[-1])
    return KeyExtraction(body, stream, _width(model, body) - stream)


def name_of(model: Model) -> str:
    """The recipe of a model, or the kind of one that no recipe made."""
    return model.spec.recipe if hasattr(model, "spec") else type(model).__name__


def fingerprint(model: Model) -> str:
    """A hash of the weights: keys of one model mean nothing to another one."""
    found = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        found.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        found.update(weight.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _width(model: LanguageModel, body: Layer) -> int:
    """How many channels the output of `body` has."""
    probe = LanguageModel(model.embed, body, model.head)
    with eval_mode(model), torch.no_grad():
        return probe.hidden(torch.zeros(1, 1, dtype=torch.long, device=model.device)).y.shape[-1]
