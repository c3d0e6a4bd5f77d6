"""Any module as a subject, without an adapter: how it is called and how it decodes are found by trial."""

import copy
import inspect
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from manyformer.analysis.contracts.cache_forms import FIRST_STEP_TOLERANCE, FoundCache, find_cache
from manyformer.analysis.contracts.call_forms import FoundForm, NoFormFound, TableLookups, find_form
from manyformer.analysis.contracts.isolation import (
    constant_parameters,
    name_constants,
    perturbing_constants,
    restoring_model_and_rng,
    restoring_tensors,
)
from manyformer.analysis.contracts.mask_forms import CalledWith, find_masks
from manyformer.analysis.contracts.rounding import has_float64_twin, rounding_tolerance
from manyformer.analysis.contracts.subject import (
    FLOAT32_TOLERANCE,
    Subject,
    SubjectOutput,
    Untestable,
    find_opaque,
    seed_everything,
)
from manyformer.base.errors import UserError
from manyformer.nn.model_inputs import PADDING_SEGMENT, Inputs, State, tree_map

EXAMPLE_LENGTH = 32
"""The length of the sequence that shows how a module rounds."""

BLOCK = 64
"""A number of columns that is a multiple of most blocks and windows."""

ODD_SHIFT = 5
SHIFT_TOLERANCE = 1e-3

TIMED_CALLS = 20
TIMED_SECONDS = 0.5
TIMED_ROWS = 4
"""The number of rows in the call that is timed: many rows take less time for each token than one."""

DEFAULT_LENGTH = 64
"""The length of sequences, unless another is given; causality is tested at the model's limit too."""

NOT_PROMISED = {
    "padding-state": "its steps take no padding",
    "ragged": "its steps take no padding",
    "packing-state": "its steps take no documents",
    "empty-rows": "rows without tokens are no promise",
    "cross_attention": "it reads one sequence only",
    "capacity": "its cache is not allocated by the caller",
    "rewind": "its cache may change in place",
    "loss": "its loss is its own",
    "saving": "how it is saved is not known",
    "spec": "it was not built from a recipe",
}

NOTES = {
    "gradients": "some parameters may be for other uses than these logits",
    "float64": "precision is no promise",
    "bfloat16": "precision is no promise",
    "float16": "precision is no promise",
    "compile": "what torch compiles is no promise",
}
"""Contracts that say something about a stranger's module, which it does not promise: a failure is told, but none."""

ONE_MODE = "an exported program has one mode"
LAST_ALONE = "it gives the logits of the last token alone, so that no later token is ever passed"

HOW_TO_SAY = "Adapter(logits=lambda tokens: net(tokens), vocab=256, module=net)"


class ExportedModule(nn.Module):
    """A program of `torch.export` as a module; `example_shape` are the rows and tokens that it was exported with.

    The program's own module has one mode and raises if another is set, so that it is no submodule here.
    """

    def __init__(self, program: Any) -> None:
        super().__init__()
        graph = program.module()
        self.__dict__["call_graph"] = graph.__call__
        for name, weight in graph.named_parameters():
            self.register_parameter(name.replace(".", "_"), weight)
        for name, buffer in graph.named_buffers():
            self.register_buffer(name.replace(".", "_"), buffer)
        inputs = program.example_inputs
        tokens = inputs[0][0] if inputs and inputs[0] else None
        if isinstance(tokens, Tensor) and tokens.ndim == 2:
            self.example_shape = tuple(tokens.shape)

    def forward(self, *inputs: Any) -> Any:
        """What the program gives."""
        return vars(self)["call_graph"](*inputs)


def is_exported(model: object) -> bool:
    """Whether `model` is a program of `torch.export`, which is not imported for that."""
    return type(model).__name__ == "ExportedProgram" and callable(getattr(model, "module", None))


@final
@dataclass(frozen=True)
class DecodingState:
    """The tokens that were read so far, and what the module's own call gave for the next."""

    tokens: Tensor
    value: Any


def built_again(module: nn.Module) -> nn.Module | None:
    """A new module of the same class from the values that `module` keeps under the names of its constructor.

    None if it does not keep all of them. They may have changed since, so that the new module may differ."""
    values: dict[str, Any] = {}
    try:
        for name, parameter in inspect.signature(type(module)).parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            if parameter.kind is parameter.POSITIONAL_ONLY or not hasattr(module, name):
                return None
            values[name] = getattr(module, name)
        # a module that another one holds would be shared with the new one, not built again
        if any(isinstance(value, nn.Module | Tensor) for value in values.values()):
            return None
        new = type(module)(**values)
    # whatever a constructor needs besides, such as files
    except Exception:
        return None
    return new if new.state_dict().keys() == module.state_dict().keys() else None


@final
class FoundSubject(Subject):
    """A stranger's module, called as trials found that it is called.

    `found` is its form of call, `cache` its form of decoding or the sentence why there is none, and `assumptions` says
    both in words. Raises UserError if no form of call gives logits.
    """

    runs_every_input = False
    must_run = frozenset({"cached"})
    notes = NOTES
    bits_decide = False
    default_length = DEFAULT_LENGTH

    def __init__(
        self, module: nn.Module, *, vocabulary: int | None = None, max_length: int | None = None, causal: bool = True
    ) -> None:
        self.module = module
        self.name = type(module).__name__
        self.perturbed = tuple(constant_parameters(module))
        tensors = [*module.parameters(), *module.buffers()]
        self.device = tensors[0].device if tensors else torch.device("cpu")
        # zeros hide what a module computes: without them, every form of a cache would seem right
        with restoring_model_and_rng(module), self.session(), torch.no_grad():
            try:
                self.found: FoundForm = find_form(module, vocabulary=vocabulary, max_length=max_length)
            except NoFormFound as error:
                raise UserError(f"{error}; say how it is called: mf.check({HOW_TO_SAY})") from None
            self.max_length = self.found.max_length
            self.min_length = self.found.min_length
            self.length_multiple = self.found.length_multiple
            self.token_ids = torch.arange(self.found.vocabulary, device=self.device)
            self.cache: FoundCache | str = find_cache(module, self.found)
            self.row_axes = _row_axes(self)
            self.masks = find_masks(module, self.found)
            self.columns_count = self.masks.columns_count or self._counts_columns()
            self.exact = has_float64_twin(module, self._example)
            self.float64_decides = self.exact
            self.seconds_per_token = self._time_per_token()
            self.float32_tolerance = rounding_tolerance(module, self._example, least=FLOAT32_TOLERANCE)
        self.chunked = isinstance(self.cache, FoundCache) and not self.cache.form.takes_prefix
        self.not_promised = NOT_PROMISED | self._reasons(causal=causal)

    def _time_per_token(self) -> float:
        """The seconds of a call for each of its tokens: the least of several, as others may use the machine too."""
        least = math.inf
        start = time.perf_counter()
        for _ in range(TIMED_CALLS):
            begin = time.perf_counter()
            timed = self._example(rows=TIMED_ROWS)
            end = time.perf_counter()
            least = min(least, (end - begin) / timed[..., 0].numel())
            if end - start > TIMED_SECONDS:
                break
        return least

    def _example(self, rows: int = 1) -> Tensor:
        """The logits of a few short rows, which show how the module rounds and how long it takes."""
        length = -(-max(EXAMPLE_LENGTH, self.min_length) // self.length_multiple) * self.length_multiple
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(len(self.token_ids), (rows, length), generator=generator)
        return self(Inputs(tokens.to(self.device))).logits

    def _counts_columns(self) -> bool:
        """Whether padding on the left moves positions or blocks, by the tables that are looked up and by trial."""
        length = max(EXAMPLE_LENGTH, self.min_length)
        lookups = TableLookups()
        with lookups:
            odd_alike = self._shifts_alike(ODD_SHIFT)
        columns = torch.arange(ODD_SHIFT + length, device=self.device)
        if any(torch.equal(torch.unique(lookup.ids), columns) for lookup in lookups.lookups):
            return True
        # whole blocks of padding change nothing, parts of one do
        return not odd_alike and self._shifts_alike(BLOCK)

    def _shifts_alike(self, padding: int) -> bool:
        """Whether a text gives about the same after this many columns of padding as alone."""
        length = max(EXAMPLE_LENGTH, self.min_length)
        if self.masks.padding is None or (self.max_length is not None and padding + length > self.max_length):
            return False
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(len(self.token_ids), (1, padding + length), generator=generator).to(self.device)
        segments = torch.zeros_like(tokens)
        segments[:, :padding] = PADDING_SEGMENT
        try:
            alone = self(Inputs(tokens[:, padding:])).logits
            padded = self(Inputs(tokens, segments)).logits[:, padding:]
        # a length that the module refuses
        except Exception:
            return False
        return bool((padded - alone).abs().max() <= SHIFT_TOLERANCE * alone.abs().max())

    def _reasons(self, *, causal: bool) -> dict[str, str]:
        """Why this module does not promise what other modules do."""
        reasons = {}
        if not causal:
            reasons["causal"] = "causal=False was given"
        elif self.found.form.last_alone:
            reasons["causal"] = LAST_ALONE
        if self.found.target_form is None:
            reasons["targets"] = "its form of call takes no targets"
        if self.masks.padding is None and self.masks.documents is None:
            reasons["padding_invariant"] = self.masks.padding_reason
        if self.masks.documents is None:
            reasons["packing"] = self.masks.documents_reason
        if isinstance(self.cache, str):
            reasons["incremental_decoding"] = self.cache
        elif self.cache.one_token:
            reasons["prefill"] = "a call takes one token"
        if isinstance(self.row_axes, str):
            reasons["beams"] = self.row_axes
        if isinstance(self.module, ExportedModule):
            reasons |= {"causal-training": ONE_MODE, "batch-training": ONE_MODE}
        return reasons

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What was assumed of the module, as a person reads it, and how to say otherwise."""
        form, vocabulary, lengths = self.found.describe()
        checked = "checked as causal"
        if "causal" in self.not_promised:
            checked = f"not checked as causal ({self.not_promised['causal']})"
        if isinstance(self.cache, str):
            decodes = self.cache
        else:
            decodes = f"decodes as {self.cache.form.name}"
            if self.cache.first_step > FIRST_STEP_TOLERANCE:
                decodes = f"{decodes}, though its first step is {self.cache.first_step:.0e} off"
        if told := self.masks.describe():
            decodes = f"{decodes}; {told}"
        sentences = [f"{form}; {checked}", f"{vocabulary}; {lengths}", decodes]
        if self.perturbed:
            sentences.append(name_constants(self.perturbed))
        sentences.append(f"to say otherwise: vocabulary=, max_length=, causal=False, or {HOW_TO_SAY}")
        return tuple(sentences)

    @contextmanager
    def session(self) -> Iterator[None]:
        """Perturb constant parameters; on exit restore them and all that calls changed in place."""
        assert self.module is not None
        with restoring_tensors(self.module), perturbing_constants(self.module) as self.own_values:
            yield

    def forward(self, inputs: Inputs, state: State = None) -> SubjectOutput:
        assert self.module is not None
        if state is None:
            called: Any = self.module
            if inputs.segments is not None:
                called = CalledWith(self.module, self.masks.options(inputs.segments))
            return SubjectOutput(self.found.logits(called, inputs.tokens))
        assert isinstance(self.cache, FoundCache)
        tokens = torch.cat([state.tokens, inputs.tokens], dim=1)
        logits, value = self.cache.step(tokens, inputs.tokens.shape[1], state.value)
        return SubjectOutput(logits, DecodingState(tokens, value))

    def build_anew(self) -> "FoundSubject | None":
        assert self.module is not None
        module = built_again(self.module)
        if module is None:
            return None
        new = copy.copy(self)
        new.module = module.to(self.device)
        return new

    def logits_with_targets(self, inputs: Inputs, targets: Tensor) -> Tensor:
        """The logits of a call, with a fixed seed, that gives the module its targets as well."""
        assert self.module is not None
        seed_everything(self.seed)
        return self.found.logits(self.module, inputs.tokens, targets)

    def init_state(self, inputs: Inputs, *, capacity: int | None = None) -> State:
        assert isinstance(self.cache, FoundCache)
        rows, length = inputs.tokens.shape
        return DecodingState(inputs.tokens[:, :0], self.cache.begin(rows, length))

    def reorder(self, state: State, index: Sequence[int]) -> State:
        if isinstance(self.row_axes, str):
            raise Untestable(self.row_axes)
        rows = torch.tensor(index, device=self.token_ids.device)
        return DecodingState(state.tokens[rows], _select_rows(state.value, self.row_axes, rows))


def _select_rows(value: Any, axes: Sequence[int | None], rows: Tensor) -> Any:
    remaining = iter(axes)

    def select(tensor: Tensor) -> Tensor:
        axis = next(remaining)
        return tensor if axis is None else tensor.index_select(axis, rows)

    return tree_map(select, value)


def _row_axes(subject: FoundSubject) -> tuple[int | None, ...] | str:
    """The axis of rows of each tensor of a cache, by caches of two and of three rows, or why rows cannot be chosen."""
    cache = subject.cache
    if isinstance(cache, str):
        return cache
    if cache.form.in_module:
        return "its cache is inside the module, whose rows cannot be chosen"
    shapes: list[list[torch.Size]] = []
    for rows in (2, 3):
        tokens = torch.zeros(rows, max(12, subject.found.min_length), dtype=torch.long, device=subject.device)
        try:
            _, value = cache.step(tokens, tokens.shape[1], cache.begin(*tokens.shape))
        except Exception as error:
            return f"its cache of {rows} rows raises {type(error).__name__}"
        if opaque := find_opaque(value):
            return f"its cache holds a {opaque}, whose rows only an adapter's `reorder` could choose"
        shapes.append(_tensor_shapes(value))
    if len(shapes[0]) != len(shapes[1]):
        return "its cache has other tensors for other numbers of rows"
    axes: list[int | None] = []
    for two, three in zip(*shapes):
        different = [axis for axis, sizes in enumerate(zip(two, three)) if sizes[0] != sizes[1]]
        if len(two) != len(three) or len(different) > 1 or any((two[a], three[a]) != (2, 3) for a in different):
            return "no axis of its cache is that of the rows alone"
        axes.append(different[0] if different else None)
    return tuple(axes)


def _tensor_shapes(value: Any) -> list[torch.Size]:
    shapes: list[torch.Size] = []

    def record(tensor: Tensor) -> Tensor:
        shapes.append(tensor.shape)
        return tensor

    tree_map(record, value)
    return shapes
