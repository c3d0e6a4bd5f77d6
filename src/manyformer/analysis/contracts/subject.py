"""Models under test: `Subject`, their common interface, `Adapter`, which makes one of any module, and tiny recipes.

Tiny recipes use all mechanisms of the recipe and run within milliseconds."""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Self, final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from manyformer.base.errors import UserError
from manyformer.models import Model
from manyformer.models.tasks import Inputs
from manyformer.models.tasks.masked_language_modelling import CLASSES, HEAD
from manyformer.nn.core import PADDING_SEGMENT, State, tree_map
from manyformer.recipes import build, get_recipe

TINY_KEYWORDS: dict[str, Any] = {
    "vocab": 29,
    "classes": 3,
    "dim": 16,
    "depth": 2,
    "heads": 2,
    "ff_dim": 24,
    "max_length": 128,
    "dropout": 0.0,
}
"""Common keywords; those that only one recipe has are in the `tiny_keywords` of its card."""


PERTURBATION = 0.1

FLOAT32_TOLERANCE = 2e-5
"""The largest difference of equal results in float32, relative to the logits."""


def tiny_keywords(name: str) -> dict[str, Any]:
    """Tiny sizes for the recipe `name`, including those of its card. Raises UserError."""
    recipe = get_recipe(name)
    sizes = {keyword: value for keyword, value in TINY_KEYWORDS.items() if keyword in recipe.signature.parameters}
    if HEAD in recipe.signature.parameters:
        del sizes[CLASSES]  # the head that it has by default has no labels
    return sizes | recipe.card.tiny_keywords


def build_tiny(name: str, keywords: Mapping[str, Any], seed: int) -> Model:
    """Build the recipe `name` with `tiny_keywords`, overridden by `keywords`. Raises UserError.

    All parameters are perturbed: zero biases, unit gains and closed gates would hide defects.
    """
    keywords = tiny_keywords(name) | dict(keywords)
    # the generator of the process goes on as if nothing had been drawn
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = build(name, **keywords)
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=PERTURBATION)
    return model


PaddingSide = Literal["left", "right"]


class SubjectOutput(NamedTuple):
    """The outputs of a model: logits (b, l, v), or (b, classes) if a row has one label."""

    logits: Float[Tensor, "b *l v"]
    state: State = None
    loss: Tensor | float = 0.0


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

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What was assumed of the model, one sentence each."""
        return ()

    @property
    def model(self) -> Model | None:
        """The model under test if it is one of this library, whose loss, spec and one-token steps can be tested."""
        return None

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

    def copy_from(self, folder: str) -> Self:
        """Load a new subject from a folder that `save_to` wrote."""
        raise NotImplementedError

    def save_to(self, folder: str) -> None:
        """Save the model in the folder."""
        raise NotImplementedError


def seed_everything(seed: int) -> None:
    """Seed the random generators of torch, NumPy and Python, all of which released models use."""
    # torch.manual_seed records a stack trace for every kind of accelerator, although there is none
    (torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed)(seed)
    np.random.seed(seed)
    random.seed(seed)


LogitsArray = Float[Tensor, "b l v"]
TokenIdsArray = Int[Tensor, "b l"]


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
