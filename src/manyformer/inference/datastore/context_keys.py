"""The keys that represent contexts in a datastore: hidden states extracted from the model's body."""

from dataclasses import replace
from typing import Literal, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.base.errors import UserError
from manyformer.models import LanguageModel, Model
from manyformer.models.generative_model import as_language_model
from manyformer.models.model import CarriedState, eval_mode, model_name
from manyformer.nn.batches import IGNORE_INDEX, CausalLMBatch, to_device
from manyformer.nn.core import Context, Layer, LayerOutput, State, ValueRecorder
from manyformer.nn.feed_forward.feedforward import FeedForward, GatedFeedForward

KeyLayer = Literal["feed-forward", "final"]
"""The keys: inputs of the last feed-forward layer, the best choice of Khandelwal et al. 2020 (section 5), or of the
head."""


@final
class KeyedBody(Layer):
    """A body that appends the input of the feed-forward layer `layer` to its output, as further channels.

    If the layer is applied several times to a token, its last input is used.
    """

    def __init__(self, body: Layer, layer: nn.Module) -> None:
        super().__init__()
        # in a list, so that it is not registered as a child a second time
        self.body = body
        self._layer = [layer]

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        return self.body.init_state(batch, capacity=capacity, device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        inputs = ValueRecorder(self._layer[0], "input", ctx.watch)
        y, state, loss = self.body(x, replace(ctx, watch=inputs), state)
        # the layer may process its tokens in chunks
        return LayerOutput(torch.cat([y, torch.cat(inputs.values, 1)[:, -y.shape[1] :]], -1), state, loss)


class KeyExtraction(NamedTuple):
    """A model whose hidden states have the head's input in the first `stream_dim` channels, the key in the last ones.

    It shares its modules with the model that the keys are for.
    """

    reader: LanguageModel
    stream_dim: int
    key_dim: int


def extract_keys(model: Model, key_layer: KeyLayer) -> KeyExtraction:
    """A language model with keys in its hidden states. Raises UserError for a model without such keys."""
    model = as_language_model(model, "use a datastore")
    # without an auxiliary loss: only hidden states are read
    reader = model.with_decoder(model.body, model.head, None)
    stream_dim = _hidden_dim(model, reader)
    if key_layer == "final":
        return KeyExtraction(reader, stream_dim, stream_dim)
    # in the order of definition, so that the last one is nearest to the output
    layers = [part for part in model.body.modules() if isinstance(part, FeedForward | GatedFeedForward)]
    if not layers:
        raise UserError(f"{model_name(model)} has no feed-forward layer whose input could be the key; use keys 'final'")
    reader = model.with_decoder(KeyedBody(model.body, layers[-1]), model.head, None)
    return KeyExtraction(reader, stream_dim, _hidden_dim(model, reader) - stream_dim)


def read_batch(carried: CarriedState, batch: CausalLMBatch, *, piece_length: int | None = None) -> Float[Tensor, "n d"]:
    """The hidden states of all tokens of a batch that have a target; the model's memory is carried on.

    With `piece_length` the rows are windows, which a model with a memory reads in pieces of so many tokens, the memory
    empty before them.
    """
    reader = as_language_model(carried.model, "use a datastore")
    moved = to_device(batch, reader.device)
    if piece_length is None or not reader.carries_state:
        out = reader.hidden(moved.tokens, moved.segments, carried.state_for(batch))
        carried.state = out.state
        return out.y[moved.targets != IGNORE_INDEX]
    outputs = list[Tensor]()
    state = reader.init_state(len(moved.tokens))
    for piece in moved.in_pieces(piece_length):
        y, state, _ = reader.hidden(piece.tokens, piece.segments, state)
        outputs.append(y)
    return torch.cat(outputs, 1)[moved.targets != IGNORE_INDEX]


def _hidden_dim(model: LanguageModel, reader: LanguageModel) -> int:
    """The channels of the hidden states of `reader`, which shares its modules, and their mode, with `model`."""
    with eval_mode(model), torch.no_grad():
        # asked of the model itself: recipes may change the width between layers
        return reader.hidden(torch.zeros(1, 1, dtype=torch.long, device=model.device)).y.shape[-1]
