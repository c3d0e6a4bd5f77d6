"""Anybody's module as a subject, in three lines."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from manyformer.check.subject import Inputs, Subject, SubjectOutput
from manyformer.check.trial import Untestable
from manyformer.core import PADDING_SEGMENT, State, tree_map
from manyformer.errors import UserError

LogitsArray = Float[Tensor, "b l v"]
TokenIdsArray = Int[Tensor, "b l"]


@final
@dataclass(frozen=True, kw_only=True)
class Adapter:
    """How to call a module that we do not know: `mf.check(Adapter(logits=lambda tokens: net(tokens), vocab=256))`.

    `logits` gives (b, l, vocab) for tokens (b, l); what else is given is checked as well:
    `step(tokens, state) -> (logits, state)` with `init_state(batch) -> state` (None unless given) goes on from a state,
    and `reorder(state, rows) -> state` picks rows of it (unless given, the first axis of all its tensors); with
    `chunked=False` it takes one token at a time once there is a state. `padding(tokens, real) -> logits` knows padding
    by a boolean (b, l), `packing(tokens, segments) -> logits` documents by number, -1 being padding. `module` is the
    module itself, for its parameters. `causal=False` is an encoder. Lengths are multiples of `length_multiple` and at
    most `max_length`."""

    logits: Callable[[TokenIdsArray], LogitsArray]
    vocab: int
    step: Callable[[TokenIdsArray, Any], tuple[LogitsArray, Any]] | None = None
    start: Callable[[int], Any] | None = None
    reorder: Callable[[Any, Int[Tensor, " n"]], Any] | None = None
    chunked: bool = True
    padding: Callable[[TokenIdsArray, Bool[Tensor, "b l"]], LogitsArray] | None = None
    packing: Callable[[TokenIdsArray, TokenIdsArray], LogitsArray] | None = None
    module: nn.Module | None = None
    causal: bool = True
    max_length: int | None = None
    multiple: int = 1
    device: str | torch.device = "cpu"
    name: str | None = None


@final
class AdapterSubject(Subject):
    """A module behind an adapter; it promises what the adapter can call."""

    def __init__(self, adapter: Adapter) -> None:
        if adapter.vocab < 2:
            raise UserError(f"vocab ({adapter.vocab}) must be at least 2 tokens, or none could be changed")
        self.adapter = adapter
        given = adapter.logits if isinstance(adapter.logits, nn.Module) else None
        self.module = adapter.module or given
        self.name = adapter.name or ("module" if self.module is None else type(self.module).__name__)
        self.max_length, self.length_multiple, self.chunked = adapter.max_length, adapter.multiple, adapter.chunked
        self.token_ids = torch.arange(adapter.vocab, device=adapter.device)
        absent = {
            "causal": None if adapter.causal else "the adapter says causal=False",
            "incremental_decoding": adapter.step or "the adapter has no `step`",
            "padding_invariant": adapter.padding or adapter.packing or "the adapter has no `padding`",
            "packing": adapter.packing or "the adapter has no `packing`",
            "module": self.module or "the adapter has no `module`",
        }
        self.not_promised = {name: why for name, why in absent.items() if isinstance(why, str)} | UNKNOWN

    def forward(self, inputs: Inputs, state: State = None) -> SubjectOutput:
        adapter, after = self.adapter, None
        if state is not None:
            assert adapter.step is not None
            logits, after = adapter.step(inputs.tokens, state.value)
        elif inputs.segments is None:
            logits = adapter.logits(inputs.tokens)
        elif adapter.packing is not None:
            logits = adapter.packing(inputs.tokens, inputs.segments)
        else:
            assert adapter.padding is not None
            logits = adapter.padding(inputs.tokens, inputs.segments != PADDING_SEGMENT)
        wanted = (*inputs.tokens.shape, adapter.vocab)
        if not isinstance(logits, Tensor) or tuple(logits.shape) != wanted:
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise UserError(f"the adapter must give logits {wanted} for tokens {wanted[:2]}, it gave {got}")
        return SubjectOutput(logits, StateBox(after))

    def init_state(self, inputs: Inputs, *, capacity: int | None = None) -> State:
        return StateBox(None if self.adapter.start is None else self.adapter.start(inputs.tokens.shape[0]))

    def reorder(self, state: State, index: Sequence[int]) -> State:
        rows = torch.tensor(index, device=self.token_ids.device)
        if self.adapter.reorder is not None:
            return StateBox(self.adapter.reorder(state.value, rows))
        if opaque := find_opaque(state.value):
            raise Untestable(f"the state holds a {opaque}, whose rows only the adapter's `reorder` could choose")
        return StateBox(tree_map(lambda t: t.index_select(0, rows), state.value))


def find_opaque(state: State) -> str | None:
    """The type of the first leaf that `tree_map` would pass over although it may hold tensors."""
    if isinstance(state, tuple | list):
        return next((found for part in state if (found := find_opaque(part))), None)
    if isinstance(state, dict):
        return find_opaque(list(state.values()))
    return None if state is None or isinstance(state, Tensor | int | float | str) else type(state).__name__


UNKNOWN = {
    "padding-state": "an adapter's `step` takes no padding",
    "ragged": "an adapter's `step` takes no padding",
    "packing-state": "an adapter's `step` takes no documents",
    "cross_attention": "an adapter has no source",
    "capacity": "an adapter reserves no room",
    "rewind": "an adapter's state may change in place",
    "loss": "an adapter has no loss",
    "saving": "an adapter cannot save",
    "spec": "no recipe made it",
}


@final
@dataclass(frozen=True)
class StateBox:
    """A foreign state, which may be None, in a box that never is."""

    value: Any
