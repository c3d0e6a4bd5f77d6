"""Measure how far outputs change if tokens are exchanged, and compare calls of a model in training mode.

Exchanges of later tokens are measured one per row of a batch. Calls in training mode begin with the same buffers and
the same random numbers; the operators that a model runs show whether two results can be compared bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor

from manyformer.analysis.contracts.isolation import restoring_attributes, restoring_buffers, training_mode
from manyformer.analysis.contracts.subject import FLOAT32_TOLERANCE, Untestable
from manyformer.analysis.contracts.trial import FLOAT64_TOLERANCE, ContractTrial
from manyformer.nn.model_inputs import Inputs
from manyformer.nn.runtime.torch_internals import TorchDispatchMode, tree_leaves
from manyformer.nn.runtime.training_hooks import run_post_step_updates

if TYPE_CHECKING:
    from jaxtyping import Float, Int

Forward = Callable[[Inputs], Tensor]
"""Computes logits (b, l, v)."""

MAX_ROWS = 32
MAX_SCORES = 1 << 22
MAX_LOGITS = 1 << 24
"""The largest number of rows in a batch of exchanges, of pairs of tokens and of logits in it."""

LONG_ROW = 512
"""Longer rows run one at a time: few exchanges need fewer tokens so, and no more memory than a step of training."""

SMALL_TEST = 256
"""The number of tokens of all exchanged rows up to which they fit in memory whatever the vocabulary is."""


class Exchange(NamedTuple):
    """The tokens `start` to `stop` of a row, exchanged for others."""

    start: int
    stop: int
    new_tokens: Int[Tensor, " n"]

    def __str__(self) -> str:
        if self.stop == self.start + 1:
            return f"token {self.start} changes"
        return f"tokens from {self.start} on change"


class ExchangeTest(NamedTuple):
    """Inputs of one row, and the exchanges of its tokens to test; with `may_raise` the model may refuse the length.

    `omitted` is the number of exchanges that were left out for time.
    """

    inputs: Inputs
    exchanges: Sequence[Exchange]
    may_raise: bool = False
    omitted: int = 0


class Leak(NamedTuple):
    """The largest change of outputs before an exchange (`size`), its bound, and the exchange that went beyond it.

    `scale` is the largest logit, `effect` the largest change of the exchanged tokens' outputs and of later ones,
    `first_output` the first output that changed by more than is allowed, and `refused` the lengths at which the model
    raised.
    """

    inputs: Inputs
    dtype: torch.dtype
    scale: float
    allowed: float
    size: float = 0.0
    effect: float = 0.0
    first_output: int = 0
    exchange: Exchange | None = None
    refused: tuple[int, ...] = ()

    def exchanged_inputs(self) -> Inputs:
        """The inputs after the exchange."""
        tokens = self.inputs.tokens.clone()
        if self.exchange is not None:
            tokens[:, self.exchange.start : self.exchange.stop] = self.exchange.new_tokens
        return self.inputs._replace(tokens=tokens)


def measure_leaks(forward: Forward, tests: Iterable[ExchangeTest], *, tolerance: float | None) -> Leak:
    """Measure the largest leak of each test until one is beyond its bound; return that one, or the largest.

    `tolerance` is relative to the logits, None that of their dtype. Rows of a batch are compared with the same rows
    of a batch without exchanges: the same operators run on the same shapes, so that rounding is the same.
    """
    leaks: list[Leak] = []
    refused: list[int] = []
    for test in tests:
        try:
            leak = _measure_leak(forward, test, tolerance)
        # models raise whatever they like at a length that they do not take
        except Exception:
            if not test.may_raise:
                raise
            refused.append(test.inputs.tokens.shape[1])
            continue
        if leak.exchange is not None:
            return leak
        leaks.append(leak)
    largest = max(leaks, key=lambda leak: leak.size)
    return largest._replace(effect=max(leak.effect for leak in leaks), refused=tuple(refused))


def _measure_leak(forward: Forward, test: ExchangeTest, tolerance: float | None) -> Leak:
    rows = len(test.exchanges)
    if rows * test.inputs.tokens.shape[1] <= SMALL_TEST:
        logits = forward(test.inputs.rows([0] * rows))
    else:
        # one row first: its logits decide how many rows fit in memory
        logits = forward(test.inputs)
        # scores of dense attention grow with the square of the length, logits with the vocabulary
        most = max(min(MAX_ROWS, MAX_SCORES // logits.shape[1] ** 2, MAX_LOGITS // logits[0].numel()), 1)
        if logits.shape[1] > LONG_ROW:
            most = 1
        # batches of one size, the last one nearly full
        rows = math.ceil(rows / math.ceil(rows / most))
        if rows > 1:
            logits = forward(test.inputs.rows([0] * rows))
    if tolerance is None:
        if logits.dtype == torch.float64:
            tolerance = FLOAT64_TOLERANCE
        else:
            tolerance = FLOAT32_TOLERANCE
    scale = float(logits.abs().max())
    leak = Leak(test.inputs, logits.dtype, scale, tolerance * scale)
    try:
        return _measure_in_batches(forward, test, leak, logits)
    # kernels may group the rows of a batch, as those of experts do; then each exchange runs alone
    except RowsInteract:
        return _measure_in_batches(forward, test, leak, forward(test.inputs))


class RowsInteract(Exception):
    """Raised if a row of a batch changes because of another row's exchange, which is no leak of the future."""


def _measure_in_batches(forward: Forward, test: ExchangeTest, leak: Leak, expected: Float[Tensor, "b l v"]) -> Leak:
    """Measure the exchanges in batches of as many rows as `expected`, their logits without one; one in each row."""
    rows = expected.shape[0]
    inputs = test.inputs.rows([0] * rows)
    no_leak = leak

    def changes_of(exchanges: Mapping[int, Exchange]) -> Float[Tensor, "b l"]:
        tokens = inputs.tokens.clone()
        for row, exchange in exchanges.items():
            tokens[row, exchange.start : exchange.stop] = exchange.new_tokens
        return (forward(inputs._replace(tokens=tokens)) - expected).abs().amax(-1)

    for first in range(0, len(test.exchanges), rows):
        exchanges = dict(enumerate(test.exchanges[first : first + rows]))
        changes = changes_of(exchanges)
        for row, exchange in exchanges.items():
            row_leak = _add_changes(leak, exchange, changes[row])
            if row_leak.exchange is exchange and len(exchanges) > 1:
                # the same batch with this exchange alone tells a leak within the row from one across rows
                alone = changes_of({row: exchange})[row]
                if _add_changes(no_leak, exchange, alone).exchange is None:
                    raise RowsInteract
            leak = row_leak
    return leak


def _add_changes(leak: Leak, exchange: Exchange, changes: Float[Tensor, " l"]) -> Leak:
    """`leak`, or the leak that these changes of the outputs after `exchange` show if it is larger."""
    leak = leak._replace(effect=max(leak.effect, float(changes[exchange.start :].max())))
    earlier = changes[: exchange.start]
    size = float(earlier.max())
    if not is_larger_leak(size, leak.size):
        return leak
    # not `>`, which is False for a NaN
    beyond = (~(earlier <= leak.allowed)).nonzero()
    if not len(beyond):
        return leak._replace(size=size)
    return leak._replace(size=size, first_output=int(beyond[0]), exchange=exchange)


def is_larger_leak(new: float, old: float) -> bool:
    """Whether `new` is the larger leak; a NaN is larger than every number."""
    # `not <=` instead of `>`, because every comparison with a NaN is False
    return not math.isnan(old) and not new <= old


class OperatorCall(NamedTuple):
    """One call of an operator, with the shapes of its tensor arguments and results, and the dtype of the last one."""

    name: str
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype | None
    is_random: bool


def record_calls(forward: Forward, inputs: Inputs) -> list[OperatorCall]:
    """The calls of operators by `forward`, in order."""
    recorder = CallRecorder()
    with recorder:
        forward(inputs)
    return recorder.calls


def random_calls(forward: Forward, inputs: Inputs) -> list[OperatorCall]:
    """The calls that draw random numbers, in order."""
    return [call for call in record_calls(forward, inputs) if call.is_random]


@final
class CallRecorder(TorchDispatchMode):
    """Records every operator that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[OperatorCall] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs or {}, result)) if isinstance(leaf, Tensor)]
        # shapes decide which kernel an operator takes, and so the order of its sums
        shapes = tuple(tensor.shape for tensor in tensors)
        dtype = tensors[-1].dtype if tensors else None
        self.calls.append(OperatorCall(str(func), shapes, dtype, torch.Tag.nondeterministic_seeded in func.tags))
        return result


@contextmanager
def training_forward(
    trial: ContractTrial, first: Inputs, second: Inputs, *, after_step: bool = True
) -> Iterator[Forward]:
    """A context in training mode, with a function that computes logits as a training step does, with gradients.

    With `after_step` buffers are those after a first step, which may initialize them from its tokens, as k-means does;
    else those of a new model. All calls begin with the same ones.
    Raises Untestable if results for `first` and `second` cannot be compared: if two equal calls differ, or if the
    random numbers of a token follow from the content of other tokens.
    """
    module = trial.subject.module
    assert module is not None

    def forward(inputs: Inputs) -> Float[Tensor, "b *l v"]:
        with restoring_buffers(module), restoring_attributes(module), torch.enable_grad():
            return trial.subject(inputs).logits.detach()

    calls_in_evaluation = random_calls(forward, first)
    with training_mode(module):
        if after_step:
            trial.subject(first)
            run_post_step_updates(module, 1)
        # a model with a generator of its own, which no seed reaches
        if not torch.equal(forward(first), forward(first)):
            raise Untestable("two equal calls in training mode differ, although the random generators were seeded")
        if _draws_random_numbers(trial, forward, first):
            # numbers drawn per selected token move to other tokens when the selection changes, without any leak
            calls = random_calls(forward, first)
            if calls != random_calls(forward, second):
                raise Untestable("in training mode, the number of random numbers depends on token values")
            if trial.subject.content_based and calls != calls_in_evaluation:
                raise Untestable("in training mode, random numbers are drawn for tokens that their values select")
        yield forward


def _draws_random_numbers(trial: ContractTrial, forward: Forward, inputs: Inputs) -> bool:
    """Whether another seed changes the logits; dropout with probability 0 draws random numbers without effect."""
    seed = trial.subject.seed
    expected = forward(inputs)
    trial.subject.seed = seed + 1
    actual = forward(inputs)
    trial.subject.seed = seed
    return not torch.equal(actual, expected)
