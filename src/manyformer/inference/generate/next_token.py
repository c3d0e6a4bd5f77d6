"""Logits of the next token of every row: with the decoding state, by static steps, or by recomputing all tokens.

Static steps run the same operators on the same buffers for every token. Where there is a GPU, one is captured for each
number of rows and columns."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.base.errors import UserError
from manyformer.inference.decoding_options import StepPath
from manyformer.inference.generate.captured_step import (
    CapturedStep,
    CudaGraphEngine,
    GraphEngine,
    StaticOperatorsOnly,
    check_form,
    logits_difference,
    module_of,
    own_buffers,
)
from manyformer.inference.generate.kept_steps import StepForm, keep_step, own_tensors, step_form, take_step
from manyformer.inference.generate.prompts import SourceBatch, model_device, segments_of
from manyformer.inference.generate.protocol import (
    BindsNextToken,
    BindsStaticStep,
    GenerativeModelProtocol,
    LogitsAndState,
    ReadsPrompt,
    TranslatesText,
)
from manyformer.models.generative_model import NextTokenFn
from manyformer.models.static_step import StaticModelState, StaticStepFn, static_tail
from manyformer.nn.attention.kv_cache.static_cache import NotStaticError
from manyformer.nn.core import PADDING_SEGMENT, MemorySequence, State, tree_map
from manyformer.nn.runtime.devices import device_kind


class LogitsFeed(ABC):
    """Computes float32 logits of the token that follows the first `end` columns of `tokens`.

    -1 is padding on the left. `end` increases from call to call; the first call feeds the prompt.
    """

    @abstractmethod
    def __call__(self, tokens: Int[Tensor, "r t"], end: int) -> Float[Tensor, "r v"]: ...

    @abstractmethod
    def select_rows(self, rows: Int[Tensor, " n"]) -> None:
        """Select these rows, in this order; a row may be repeated or dropped."""

    @abstractmethod
    def reorder(self, rows: Int[Tensor, " r"]) -> None:
        """`select_rows` for an index that exchanges rows only among those of one prompt or source."""

    def close(self) -> None:
        """Leave to later decodings what they can use, once no further token is needed."""
        return

    @property
    def cache_bytes(self) -> int:
        """The bytes of the tensors that are stored between calls."""
        return 0

    @property
    def steps(self) -> str:
        """How single tokens were decoded, where there was a choice."""
        return ""


@final
class CachedFeed(LogitsFeed):
    """Decoding with the model's state; an encoder-decoder encodes its `source` once.

    `capacity` preallocates the state for that many tokens.
    """

    def __init__(
        self, model: GenerativeModelProtocol, source: SourceBatch | None, batch: int, capacity: int | None
    ) -> None:
        self.model: Any = model
        self.decode_next = bind_next_token(model)
        self.length = 0
        self.memory = None
        if source is not None and isinstance(model, TranslatesText):
            self.memory = model.encode(*source)
        self.state = model.init_state(batch, capacity=capacity)

    def __call__(self, tokens: Int[Tensor, "r t"], end: int) -> Float[Tensor, "r v"]:
        new_tokens = tokens[:, self.length : end]
        # an encoder-decoder reads its prompt, one start token, by a step as well
        if self.length or self.memory is not None:
            # the step needs no segments: what is fed after the prompt is never padding
            logits, self.state = self.decode_next(new_tokens, self.state, self.memory)
        else:
            read = _prompt_reader(self.model)
            out = read(new_tokens.clamp(min=0), segments_of(new_tokens), self.state)
            logits = out.logits
            self.state = out.state
        self.length = end
        return logits[:, -1].float()

    def select_rows(self, rows: Int[Tensor, " n"]) -> None:
        # the sources follow their rows; `reorder` below leaves them, because the rows of a beam have the same source
        self.memory = _select_rows(self.memory, rows)
        self.state = _select_rows(self.state, rows)

    def reorder(self, rows: Int[Tensor, " r"]) -> None:
        self.state = _select_rows(self.state, rows)

    @property
    def cache_bytes(self) -> int:
        return storage_bytes((self.memory, self.state))


def bind_next_token(model: GenerativeModelProtocol) -> NextTokenFn:
    """The model's own step for one new token per row; a call of the model if it offers none."""
    if isinstance(model, BindsNextToken):
        return model.next_token()

    def next_token(tokens: Tensor, state: State, memory: MemorySequence | None) -> tuple[Tensor, State]:
        if isinstance(model, TranslatesText):
            assert memory is not None
            out = model.decode(tokens, memory, None, state)
        else:
            out = model(tokens, None, state)
        return out.logits, out.state

    return next_token


@final
class UncachedFeed(LogitsFeed):
    """A model that recomputes all previous tokens, and the `source` of an encoder-decoder, at each step."""

    def __init__(self, model: GenerativeModelProtocol, source: SourceBatch | None) -> None:
        self.model: Any = model
        self.source = source
        self._padding: _LeftPadding | None = None

    def __call__(self, tokens: Int[Tensor, "r t"], end: int) -> Float[Tensor, "r v"]:
        logits: Float[Tensor, "r t v"]
        if self.source is None:
            # read once for these rows: a GPU would have to be waited for at every token
            padding = self._padding = self._padding or _left_padding(tokens)
            tokens = tokens[:, padding.shared : end]
            read = _prompt_reader(self.model)
            segments = None
            if padding.is_ragged:
                segments = torch.where(tokens < 0, PADDING_SEGMENT, 0)
            logits = read(tokens.clamp(min=0), segments).logits
        else:
            logits = self.model(self.source.source, tokens[:, :end], self.source.segments).logits
        return logits[:, -1].float()

    def select_rows(self, rows: Int[Tensor, " n"]) -> None:
        self.source = _select_rows(self.source, rows)
        self._padding = None

    def reorder(self, rows: Int[Tensor, " r"]) -> None:
        return


def _prompt_reader(model: Any) -> Callable[..., LogitsAndState]:
    """The call that reads a prompt: logits of the last token alone where the model offers that, else of all tokens."""
    if isinstance(model, ReadsPrompt):
        return model.last_logits
    reader: Callable[..., LogitsAndState] = model
    return reader


class _LeftPadding(NamedTuple):
    """The first columns, which are padding in all rows, and whether there is padding after them."""

    shared: int
    is_ragged: bool


def _left_padding(tokens: Int[Tensor, "r t"]) -> _LeftPadding:
    """The padding of these rows; once those of the longest prompts are dropped, the other ones share some."""
    lengths = (tokens < 0).sum(1).tolist()
    return _LeftPadding(min(lengths), min(lengths) < max(lengths))


def _select_rows(state: State, rows: Int[Tensor, " n"]) -> State:
    return tree_map(lambda tensor: tensor.index_select(0, rows), state)


def storage_bytes(state: State) -> int:
    """The bytes of the storages of a state's tensors; a storage that several tensors share counts once."""
    storages: dict[int, int] = {}

    def visit(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    tree_map(visit, state)
    return sum(storages.values())


def cached_feed(
    model: GenerativeModelProtocol,
    source: SourceBatch | None,
    batch: int,
    capacity: int,
    *,
    reserve: bool,
    path: StepPath,
) -> LogitsFeed:
    """The feed that decodes with the model's state by this path; with `reserve` the state is allocated at once."""
    reserved = None
    if reserve:
        reserved = capacity
    return step_feed(CachedFeed(model, source, batch, reserved), capacity, path)


def step_feed(eager: CachedFeed, capacity: int, path: StepPath) -> LogitsFeed:
    """The feed that decodes by this path, for at most `capacity` tokens of a row."""
    engine = graph_engine(eager.model, path)
    if path == "eager" or (path == "auto" and engine is None):
        return eager
    return StaticFeed(eager, capacity, engine, forced=path != "auto")


def graph_engine(model: GenerativeModelProtocol, path: StepPath) -> GraphEngine | None:
    """What captures the steps of this model; None without a GPU. Raises UserError for a graph without one."""
    device = model_device(model)
    if path == "static" or not device_kind(device).captures_graphs:
        if path == "graph":
            raise UserError(
                f"step_path is graph, and CUDA graphs need a CUDA device: this model is on the device {device.type}"
            )
        return None
    return CudaGraphEngine(device)


MIN_COLUMNS = 128
"""The columns of the smallest caches; larger ones double, so that a step reads at most twice as many as are in use."""

COLUMN_MULTIPLE = 16
"""Fused attention reads masks of such widths without copying them."""


def bucket_columns(length: int, capacity: int) -> int:
    """The number of columns of caches that hold `length` tokens of at most `capacity`."""
    columns = max(MIN_COLUMNS, 1 << (length - 1).bit_length())
    return min(columns, rounded_capacity(capacity))


def rounded_capacity(capacity: int) -> int:
    """The capacity rounded up to one of four sizes per doubling, so that texts of similar lengths share steps."""
    multiple = max(COLUMN_MULTIPLE, 1 << max(0, (capacity - 1).bit_length() - 3))
    return max(MIN_COLUMNS, -(-capacity // multiple) * multiple)


@final
class StaticFeed(LogitsFeed):
    """`eager` for the prompt, then static steps, captured by `engine` unless that is None.

    Where the first static step shows that it cannot be captured, `eager` goes on; where a capture fails, steps that are
    not captured. If `forced`, both raise UserError. A captured step that is needed no longer stays with the model, and
    serves other texts of the same sizes (`kept_steps`).
    """

    def __init__(self, eager: CachedFeed, capacity: int, engine: GraphEngine | None, *, forced: bool) -> None:
        self.eager = eager
        self.capacity = capacity
        self.engine = engine
        self.forced = forced
        self.state: StaticModelState | None = None
        self.step: StaticStepFn | None = None
        self.captured: CapturedStep | None = None
        self.form: StepForm | None = None
        self.refusal = ""
        self.capture_refusal = ""

    def __call__(self, tokens: Int[Tensor, "r t"], end: int) -> Float[Tensor, "r v"]:
        start = self.eager.length
        # the prompt is read once, and may be of any length: a graph of it would serve no other
        if not start or self.refusal:
            return self.eager(tokens, end)
        new_tokens = tokens[:, start:end]
        if self.state is None:
            return self._begin(tokens, end)
        # the caches double, which changes the shapes of all operators: a captured step ends here, another one is
        # captured at the next token
        if self._columns(end) > self.state.tail.columns:
            logits, self.state = self._settle(new_tokens, self._columns(end), self.state)
            self.close()
        else:
            logits = self._next_logits(new_tokens, self.state)
        self.eager.length = end
        return logits[:, -1].float()

    def select_rows(self, rows: Int[Tensor, " n"]) -> None:
        self.eager.select_rows(rows)
        self._select_state(rows)
        self.close()

    def reorder(self, rows: Int[Tensor, " r"]) -> None:
        if self.captured is not None:
            self.captured.select_rows(rows)
            return
        self.eager.reorder(rows)
        self._select_state(rows)

    def close(self) -> None:
        if self.captured is not None:
            keep_step(self.eager.model, self.form, self.captured)
            self.captured = None

    @property
    def cache_bytes(self) -> int:
        if self.state is None:
            return self.eager.cache_bytes
        return storage_bytes((self.eager.memory, self.state))

    @property
    def steps(self) -> str:
        if self.refusal:
            return f"eager steps, because {self.refusal}"
        if self.state is None:
            return ""
        if self.capture_refusal:
            return f"static steps, not captured because {self.capture_refusal}"
        if self.engine is None:
            return "static steps"
        return "static steps captured as CUDA graphs"

    def _select_state(self, rows: Int[Tensor, " n"]) -> None:
        if self.state is not None:
            self.state = _select_rows(self.state, rows)

    def _columns(self, end: int) -> int:
        return bucket_columns(min(end + 1, self.capacity), self.capacity)

    def _begin(self, tokens: Int[Tensor, "r t"], end: int) -> Float[Tensor, "r v"]:
        """The first step after the prompt, eager and static; static ones follow if both agree."""
        first: tuple[Tensor, StaticModelState] | None = None
        error: Exception | None = None
        try:
            first = self._first_step(tokens[:, :end])
        except ValueError as raised:
            error = raised
            self.refusal = f"{module_of(raised.__traceback__)}{raised}"
        except RuntimeError as raised:
            # a state that is arranged by the columns of its cache meets more columns than it knows
            reason = f"it does not serve the columns of static caches ({raised})"
            error = raised
            self.refusal = f"{module_of(raised.__traceback__)}{reason}"
        # computed in any case: it is the result of this step, and goes on if static steps are refused
        expected = self.eager(tokens, end)
        if first is not None:
            difference = logits_difference(first[0][:, -1], expected)
            if difference:
                self.refusal = f"static and eager steps give {difference}"
        if self.refusal and self.forced:
            raise UserError(f"this model has no static step: {self.refusal}") from error
        if first is not None and not self.refusal:
            self.state = first[1]
            # the static state has all of it, and the memory of both would be needed for nothing
            self.eager.state = None
        return expected

    def _first_step(self, tokens: Int[Tensor, "r t"]) -> tuple[Tensor, StaticModelState]:
        """The first static step, which leaves the eager state as it is, and a trial of the next one."""
        model = self.eager.model
        earlier = tokens[:, :-1]
        end = tokens.shape[1]
        if not isinstance(model, BindsStaticStep):
            raise NotStaticError(f"a {type(model).__name__} offers none")
        self.step = model.static_next_token(rounded_capacity(self.capacity))
        tail = static_tail(self.eager.state.tail, earlier.clamp(min=0), segments_of(earlier))
        logits, state = self._settle(tokens[:, -1:], self._columns(end), StaticModelState(self.eager.state.body, tail))
        if end < state.tail.columns:
            # it writes the column of the next token, which the next step overwrites
            with StaticOperatorsOnly():
                _, next_state = self.step(tokens[:, -1:], state, self.eager.memory)
            check_form(state, next_state)
        return logits, state

    def _settle(
        self, tokens: Int[Tensor, "r 1"], columns: int, state: StaticModelState
    ) -> tuple[Tensor, StaticModelState]:
        """A step after which all caches have so many columns, in buffers that no other tensor shares."""
        assert self.step is not None
        state = StaticModelState(state.body, state.tail.enlarged(columns))
        logits, next_state = self.step(tokens, state, self.eager.memory)
        # other texts may soon use the buffers of the step that was captured
        return logits, own_buffers(next_state, None if self.captured is None else self.captured.state)

    def _next_logits(self, tokens: Int[Tensor, "r 1"], state: StaticModelState) -> Float[Tensor, "r 1 v"]:
        """The logits after one more token of each row, by a graph if there is an engine that captures it."""
        assert self.step is not None
        if self.captured is None and self.engine is not None:
            logits = self._resume(self.step, tokens, state)
            if logits is not None:
                return logits
            self.captured = self._capture(self.step, self.engine, tokens, state)
        if self.captured is not None:
            # a step that fails is not kept
            captured = self.captured
            self.captured = None
            logits = captured(tokens)
            self.captured = captured
            return logits
        logits, self.state = self.step(tokens, state, self.eager.memory)
        return logits

    def _resume(
        self, step: StaticStepFn, tokens: Int[Tensor, "r 1"], state: StaticModelState
    ) -> Float[Tensor, "r 1 v"] | None:
        """The logits by a step that another text has left, which goes on with this one; None without such a step."""
        model = self.eager.model
        memory = self.eager.memory
        self.form = step_form(model, state, memory, rounded_capacity(self.capacity))
        captured = take_step(model, self.form)
        logits = None
        if captured is not None:
            logits = captured.resume(step, tokens, state, memory)
        if captured is not None and logits is not None:
            self.captured = captured
            self.state = captured.state
        return logits

    def _capture(
        self, step: StaticStepFn, engine: GraphEngine, tokens: Int[Tensor, "r 1"], state: StaticModelState
    ) -> CapturedStep | None:
        """A graph on these buffers; None, and no further attempts, where it fails."""
        try:
            return CapturedStep(step, tokens, state, self.eager.memory, engine, own_tensors(self.eager.model))
        except (NotStaticError, RuntimeError) as error:
            if self.forced:
                raise UserError(f"this step cannot be captured as a CUDA graph: {error}") from error
            self.engine = None
            self.capture_refusal = str(error).partition("\n")[0]
            return None
