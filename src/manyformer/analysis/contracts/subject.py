"""Models under test: `Subject`, their common interface, and `Adapter`, which makes one of any module."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, final

import numpy as np
import torch
from torch import Tensor, nn

from manyformer.analysis.contracts.isolation import (
    OwnValues,
    constant_parameters,
    name_constants,
    perturbing_constants,
)
from manyformer.base.errors import UserError
from manyformer.nn.model_inputs import PADDING_SEGMENT, Inputs, State, tree_map

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

    LogitsArray = Float[Tensor, "b l v"]
    TokenIdsArray = Int[Tensor, "b l"]

FLOAT32_TOLERANCE = 2e-5
"""The largest difference of equal results in float32, relative to the logits."""

PaddingSide = Literal["left", "right"]


class SubjectOutput(NamedTuple):
    """The outputs of a model: logits (b, l, v), or (b, classes) if a row has one label."""

    logits: Float[Tensor, "b *l v"]
    state: State = None
    loss: Tensor | float = 0.0


class TargetScore(NamedTuple):
    """Sums over all targets: the negative log-likelihood, the number of targets, and how many were predicted."""

    nll: Tensor
    targets: Tensor
    correct: Tensor


class ToyTraining(NamedTuple):
    """The losses of all steps of a training in nats per target, and the loss of guessing."""

    losses: list[float]
    guessing_loss: float


class Untestable(Exception):
    """Raised if a contract cannot be tested on this model or machine; the message is the reason."""


class Subject(ABC):
    """A model under test.

    `not_promised` maps names of contracts, or of promises that contracts need, to the reasons why the model does not
    make them; such contracts are never reported as passed. `token_ids` are the tokens to draw from. `exact` allows the
    whole model to be converted to float64, so that rounding cannot hide a defect. Without `bits_decide`, equal
    operators may round differently, as those of a Fourier transform do; without `float64_decides`, a model computes in
    fewer bits inside, so that `float32_tolerance` tells rounding from a leak. `measured_anyway` are contracts that are
    measured even if they are not promised, because the number shows how far the model is from keeping them. Without
    `runs_every_input`, a contract in which the model raises an exception is not run instead of failed, unless it is
    one of `must_run`. `notes` maps contracts, whose failures are told but are none, to the reasons.
    `default_length` is the length of all sequences if none is given, besides a few that show leaks beyond it.
    `perturbed` names the parameters that a session perturbs, and within it `own_values` are those that they had.
    With `columns_count`, outputs may depend on how many columns of padding are before them, but not on its contents.
    `seconds_per_token` bounds the number of exchanges of a slow model; 0 leaves none out.
    `assumptions` are sentences about what was found out about the model instead of being told."""

    name: str
    token_ids: Int[Tensor, " n"]
    not_promised: Mapping[str, str]
    measured_anyway: frozenset[str] = frozenset()
    module: nn.Module | None = None
    max_length: int | None = None
    min_length: int = 1
    length_multiple: int = 1
    default_length: int | None = None
    seconds_per_token: float = 0.0
    perturbed: tuple[str, ...] = ()
    own_values: OwnValues = ()
    seed: int = 0
    takes_source: bool = False
    per_token: bool = True
    exact: bool = False
    bits_decide: bool = True
    float64_decides: bool = True
    float32_tolerance: float = FLOAT32_TOLERANCE
    chunked: bool = True
    runs_every_input: bool = True
    must_run: frozenset[str] = frozenset()
    notes: Mapping[str, str] = MappingProxyType({})
    source_sides: tuple[PaddingSide, ...] = ("left", "right")
    columns_count: bool = False

    spec: Any = None
    """From which recipe (`recipe`) and `keywords` the model was built, if it was."""

    @property
    def content_based(self) -> bool:
        """Whether a part declares (`content_based`) that its operators depend on token values, not on shapes alone."""
        return self.module is not None and any(getattr(part, "content_based", False) for part in self.module.modules())

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What was assumed of the model, one sentence each."""
        return ()

    def __call__(self, inputs: Inputs, state: State = None) -> SubjectOutput:
        """One forward pass with a fixed seed, so that only what the contract changes can change the result."""
        # some released models draw random numbers in evaluation mode too, such as the hashes of Reformer
        seed_everything(self.seed)
        return self.forward(inputs, state)

    @abstractmethod
    def forward(self, inputs: Inputs, state: State = None) -> SubjectOutput:
        """The forward pass without seeding; with a state, `inputs` are the next tokens."""

    def init_state(self, inputs: Inputs, *, capacity: int | None = None) -> State:
        """The initial state of these rows."""
        raise NotImplementedError

    def reorder(self, state: State, index: Sequence[int]) -> State:
        """The state of these rows, in this order."""
        return tree_map(lambda t: t.index_select(0, torch.tensor(index, device=t.device)), state)

    def session(self) -> AbstractContextManager[None]:
        """A context manager that is entered for the duration of a check."""
        return nullcontext()

    def saved_copy(self) -> Self:
        """A new subject, of the model as it was saved and loaded."""
        raise NotImplementedError

    def rebuild(self, keywords: Mapping[str, Any]) -> Subject:
        """A new subject of the recipe of `spec`, with these keywords."""
        raise NotImplementedError

    def one_token_step(self) -> Callable[[], Callable[[Tensor, State, State], tuple[Tensor, State]]] | None:
        """A function that binds the steps by which generation computes one token per row; None if there are none.

        A step takes tokens (b, 1), the state and the encoded source, and gives logits and the next state."""
        return None

    def training_loss(self, inputs: Inputs, targets: Tensor, *, smoothing: float = 0.0) -> Tensor:
        """The sum of the training loss over all targets, without auxiliary losses."""
        raise NotImplementedError

    def auxiliary_loss(self, inputs: Inputs, targets: Tensor) -> Tensor | float:
        """What training adds to the loss of the targets, such as the balance of experts."""
        return 0.0

    def score(self, inputs: Inputs, targets: Tensor) -> TargetScore:
        """The likelihood and the accuracy that an evaluation reports."""
        raise NotImplementedError

    def train_on_toy_task(self, generator: torch.Generator, *, share: float, smoothing_steps: int) -> ToyTraining:
        """Train a new model of the same spec on a toy task, until the loss is this share of that of guessing.

        The loss is averaged over `smoothing_steps`."""
        raise NotImplementedError

    def build_anew(self) -> "Subject | None":
        """A subject of the same model with new random weights, or None if nobody knows how it was built."""
        return None

    def logits_with_targets(self, inputs: Inputs, targets: Int[Tensor, "b l"]) -> Float[Tensor, "b l v"]:
        """The logits of a call, with a fixed seed, that gives the model its targets as well."""
        raise NotImplementedError


def seed_everything(seed: int) -> None:
    """Seed the random generators of torch, NumPy and Python, all of which released models use."""
    # torch.manual_seed records a stack trace for every kind of accelerator, although there is none
    (torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed)(seed)
    np.random.seed(seed)
    random.seed(seed)


@final
@dataclass(frozen=True, kw_only=True)
class Adapter:
    """How to call a third-party module: `mf.check(Adapter(logits=lambda tokens: net(tokens), vocab=256))`.

    `logits` computes (b, l, vocab) from tokens (b, l). Each optional callable enables more contracts:
    `step(tokens, state) -> (logits, state)` decodes from a state, the first of which is `init_state(batch)` (default
    None), and `reorder(state, rows) -> state` selects rows of it (by default on the first axis of all its tensors);
    `chunked=False` means that a step after the first takes one token. `padding(tokens, valid) -> logits` takes a
    boolean mask (b, l) of tokens that are not padding, `packing(tokens, segments) -> logits` document numbers, with -1
    for padding. `module` is the module itself, for its parameters. `causal=False` is an encoder. Lengths are multiples
    of `length_multiple` and at most `max_length`."""

    logits: Callable[[TokenIdsArray], LogitsArray]
    vocab: int
    step: Callable[[TokenIdsArray, Any], tuple[LogitsArray, Any]] | None = None
    init_state: Callable[[int], Any] | None = None
    reorder: Callable[[Any, Int[Tensor, " n"]], Any] | None = None
    chunked: bool = True
    padding: Callable[[TokenIdsArray, Bool[Tensor, "b l"]], LogitsArray] | None = None
    packing: Callable[[TokenIdsArray, TokenIdsArray], LogitsArray] | None = None
    module: nn.Module | None = None
    causal: bool = True
    max_length: int | None = None
    length_multiple: int = 1
    device: str | torch.device = "cpu"
    name: str | None = None


NOT_PROMISED = {
    "padding-state": "an adapter's `step` takes no padding",
    "ragged": "an adapter's `step` takes no padding",
    "packing-state": "an adapter's `step` takes no documents",
    "cross_attention": "an adapter has no source",
    "capacity": "an adapter has no preallocated state",
    "rewind": "an adapter's state may change in place",
    "loss": "an adapter has no loss",
    "targets": "an adapter takes no targets",
    "saving": "an adapter cannot save",
    "spec": "it was not built from a recipe",
}


@final
@dataclass(frozen=True)
class StateBox:
    """A third-party state, which may be None, in a wrapper that is never None."""

    value: Any


@final
class AdapterSubject(Subject):
    """The subject of an adapter; it promises what the adapter has callables for."""

    bits_decide = False  # a Fourier transform rounds otherwise where tokens change

    def __init__(self, adapter: Adapter) -> None:
        # with a single token every exchange leaves the inputs as they are
        if adapter.vocab < 2:
            raise UserError(f"vocab ({adapter.vocab}) must be at least 2 tokens, because contracts exchange tokens")
        self.adapter = adapter
        logits_module = None
        if isinstance(adapter.logits, nn.Module):
            logits_module = adapter.logits
        # the module itself may be the callable: then its parameters are known without being named
        self.module = adapter.module or logits_module
        self.perturbed = () if self.module is None else tuple(constant_parameters(self.module))
        self.name = adapter.name or ("module" if self.module is None else type(self.module).__name__)
        self.max_length = adapter.max_length
        self.chunked = adapter.chunked
        self.length_multiple = adapter.length_multiple
        self.token_ids = torch.arange(adapter.vocab, device=adapter.device)
        reasons = {
            "causal": None if adapter.causal else "the adapter has causal=False",
            "incremental_decoding": adapter.step or "the adapter has no `step`",
            "padding_invariant": adapter.padding or adapter.packing or "the adapter has no `padding`",
            "packing": adapter.packing or "the adapter has no `packing`",
            "module": self.module or "the adapter has no `module`",
        }
        self.not_promised = {name: reason for name, reason in reasons.items() if isinstance(reason, str)} | NOT_PROMISED

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Which parameters are perturbed: an adapter says everything else."""
        return (name_constants(self.perturbed),) if self.perturbed else ()

    @contextmanager
    def session(self) -> Iterator[None]:
        """Perturb constant parameters of the module, which would hide what is behind them; on exit restore them."""
        if self.module is None:
            yield
        else:
            with perturbing_constants(self.module) as self.own_values:
                yield

    def forward(self, inputs: Inputs, state: State = None) -> SubjectOutput:
        adapter = self.adapter
        new_state = None
        if state is not None:
            assert adapter.step is not None
            logits, new_state = adapter.step(inputs.tokens, state.value)
        elif inputs.segments is None:
            logits = adapter.logits(inputs.tokens)
        elif adapter.packing is not None:
            logits = adapter.packing(inputs.tokens, inputs.segments)
        else:
            assert adapter.padding is not None
            # padded rows hold one document each, so that the mask says all
            logits = adapter.padding(inputs.tokens, inputs.segments != PADDING_SEGMENT)
        expected = (*inputs.tokens.shape, adapter.vocab)
        actual = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        if actual != expected:
            raise UserError(f"the adapter must give logits {expected} for tokens {expected[:2]}, it gave {actual}")
        # boxed, because None is a valid state of a third party and means "no state" here
        return SubjectOutput(logits, StateBox(new_state))

    def init_state(self, inputs: Inputs, *, capacity: int | None = None) -> State:
        return StateBox(None if self.adapter.init_state is None else self.adapter.init_state(inputs.tokens.shape[0]))

    def reorder(self, state: State, index: Sequence[int]) -> State:
        rows = torch.tensor(index, device=self.token_ids.device)
        if self.adapter.reorder is not None:
            return StateBox(self.adapter.reorder(state.value, rows))
        # tree_map would keep such a leaf with all its rows, and the contract would blame the model
        if opaque := find_opaque(state.value):
            raise Untestable(f"the state holds a {opaque}, whose rows only the adapter's `reorder` could choose")
        return StateBox(tree_map(lambda t: t.index_select(0, rows), state.value))


def find_opaque(state: State) -> str | None:
    """The type name of the first leaf that `tree_map` does not enter although it may contain tensors, or None."""
    if isinstance(state, tuple | list):
        return next((opaque for item in state if (opaque := find_opaque(item))), None)
    if isinstance(state, dict):
        return find_opaque(list(state.values()))
    if state is None or isinstance(state, Tensor | int | float | str):
        return None
    return type(state).__name__
