"""Compare two runs of a model module by module: where does a difference enter that no input has?

In each run one part is compared, such as the tokens before an exchange. The tensors of a first run are kept; in the
second, a module whose inputs agree and whose outputs do not is where the difference enters. Its outputs are then
replaced by those of the first run, so that later modules are judged on equal inputs.
"""

import dataclasses
import linecache
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

MAX_BYTES = 1 << 28
"""The largest size of the tensors of a first run that are kept."""

THIS_FOLDER = str(Path(__file__).parent) + os.sep
TORCH_FOLDER = str(Path(torch.__file__).parent) + os.sep


class RunPart(NamedTuple):
    """The part of a run of `rows` rows and `length` tokens that is compared: columns `start` to `stop` of `row`."""

    rows: int
    length: int
    row: int
    start: int
    stop: int

    def cut(self, tensor: Tensor) -> Tensor | None:
        """This part of a tensor of any layout, a view where possible; None if its axes do not tell tokens.

        Layouts are (b, t, d), (t, b, d), (b, h, t, d), (b*t, d), (b*h, t, d), (b, t/c, c, d) and their like. All axes
        that are as long as the sequence are cut, those of queries and of keys.
        """
        if self.rows > 1:
            cut = self._cut_row(tensor)
            if cut is None:
                return None
            tensor = cut
        axes = [axis for axis, size in enumerate(tensor.shape) if size == self.length]
        if not axes:
            merged = self._merge_blocks(tensor)
            if merged is None:
                # one number for a whole row depends on its tokens alone, and all of them are compared
                whole_row = self.rows > 1 and self.start == 0 and self.stop == self.length
                return tensor if whole_row else None
            tensor, axis = merged
            axes = [axis]
        for axis in axes:
            tensor = tensor.narrow(axis, self.start, self.stop - self.start)
        return tensor

    def _cut_row(self, tensor: Tensor) -> Tensor | None:
        # in most layouts the rows are before the tokens
        for axis, size in enumerate(tensor.shape[:2]):
            if size == self.rows:
                return tensor.narrow(axis, self.row, 1)
        if not tensor.ndim or tensor.shape[0] % self.rows:
            return None
        if tensor.shape[0] == self.rows * self.length:
            return tensor.view(self.rows, self.length, *tensor.shape[1:]).narrow(0, self.row, 1)
        # rows and heads
        if tensor.ndim > 1:
            return tensor.view(self.rows, -1, *tensor.shape[1:]).narrow(0, self.row, 1)
        return None

    def _merge_blocks(self, tensor: Tensor) -> tuple[Tensor, int] | None:
        """A tensor whose tokens are in two neighboring axes, blocks and places in them, with the axis of the tokens."""
        for axis in range(tensor.ndim - 1):
            first = tensor.shape[axis]
            second = tensor.shape[axis + 1]
            if first > 1 and second > 1 and first * second == self.length:
                return tensor.flatten(axis, axis + 1), axis
        return None


def do_nothing() -> None:
    """What there is to do before most runs."""


class Run(NamedTuple):
    """One call of a model, the part of it that is compared, and what comes before it, which is not watched."""

    call: Callable[[], Tensor]
    part: RunPart
    prepare: Callable[[], None] = do_nothing


@dataclass
class Judgment:
    """How many tensors of a call could be compared, and whether one of them differs."""

    compared: int = 0
    differs: bool = False


@final
class PartComparison:
    """What counts as a difference: more than `tolerance`, relative to the largest number of a tensor."""

    def __init__(self, first: RunPart, second: RunPart, tolerance: float, *, floating_only: bool = False) -> None:
        self.first = first
        self.second = second
        self.tolerance = tolerance
        self.floating_only = floating_only

    def keep(self, value: Any) -> dict[str, Tensor]:
        """Copies of the compared parts of all tensors in `value`, by their places in it."""
        kept = {}
        for key, tensor in tensors_of(value):
            part = self._part(self.first, tensor)
            if part is not None:
                kept[key] = part.detach().clone()
        return kept

    def judge(self, expected: Mapping[str, Tensor], value: Any) -> Judgment:
        judgment = Judgment()
        for _, actual, part in self._pairs(expected, value):
            judgment.compared += 1
            judgment.differs = judgment.differs or self._differ(part, actual)
        return judgment

    def put_back(self, expected: Mapping[str, Tensor], value: Any) -> bool:
        """Write the expected parts into the tensors of `value`; whether they are there then."""
        for _, actual, part in self._pairs(expected, value):
            if self._differ(part, actual):
                try:
                    actual.copy_(part)
                # an expanded tensor cannot be written to
                except RuntimeError:
                    return False
        return not self.judge(expected, value).differs

    def _pairs(self, expected: Mapping[str, Tensor], value: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
        for key, tensor in tensors_of(value):
            part = self._part(self.second, tensor)
            if part is not None and key in expected and part.shape == expected[key].shape:
                yield key, part.detach(), expected[key]

    def _part(self, compared: RunPart, tensor: Tensor) -> Tensor | None:
        if self.floating_only and not (tensor.is_floating_point() or tensor.is_complex()):
            return None
        if tensor.layout != torch.strided or not tensor.numel():
            return None
        # without gradients, which would forbid to write to some views
        return compared.cut(tensor.detach())

    def _differ(self, expected: Tensor, actual: Tensor) -> bool:
        if not (actual.is_floating_point() or actual.is_complex()):
            return not torch.equal(expected, actual)
        if actual.is_complex():
            expected = torch.view_as_real(expected)
            actual = torch.view_as_real(actual)
        expected = torch.nan_to_num(expected)
        actual = torch.nan_to_num(actual)
        change = float((expected - actual).abs().max())
        # numbers of single rows, not the mask's largest ones: those beyond 1e9 stand for minus infinity
        ordinary = expected.abs()[expected.abs() < 1e9]
        scale = float(ordinary.max()) if ordinary.numel() else 0.0
        return change > self.tolerance * scale


def tensors_of(value: Any, key: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """All tensors of nested tuples, lists, mappings and dataclasses, with their places."""
    if isinstance(value, Tensor):
        yield key, value
        return
    if depth > 4:
        return
    children: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        children = [(str(name), child) for name, child in value.items()]
    elif isinstance(value, list | tuple):
        children = [(str(index), child) for index, child in enumerate(value)]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        children = [(f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    for name, child in children:
        yield from tensors_of(child, f"{key}.{name}", depth + 1)


class CallKey(NamedTuple):
    """The call of a submodule: its name, and how many calls of it there were before."""

    module: str
    earlier: int


class KeptCall(NamedTuple):
    """The compared parts of what a call gets and gives."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]


@dataclass
class OpenCall:
    """A call that has not returned: the calls of its children so far, and whether its inputs agree."""

    key: CallKey
    module: nn.Module
    inputs_agree: bool = True
    inputs: dict[str, Tensor] = field(default_factory=dict)
    children: list["ClosedCall"] = field(default_factory=list)


class ClosedCall(NamedTuple):
    """A call that returned: whether its inputs agreed, and its outputs (None if they could not be compared)."""

    key: CallKey
    inputs_agree: bool
    outputs_agree: bool | None


class Culprit(NamedTuple):
    """The call in which a difference enters, and the children between which it does."""

    key: CallKey
    module: nn.Module
    after: str | None
    before: str | None


class Statement(NamedTuple):
    """A line of a model's code."""

    file: str
    line: int
    code: str


class TooLarge(Exception):
    """Raised if the tensors of a run need more memory than a trace may take."""


@contextmanager
def watching(module: nn.Module, enter: Callable[..., None], leave: Callable[..., None]) -> Iterator[None]:
    """A context in which every call of a submodule calls `enter(name, module, inputs)` and `leave(name, outputs)`."""
    handles = []
    for name, submodule in module.named_modules():

        def before(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            enter(name, module, (args, kwargs))

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            leave(name, output)

        try:
            handles.append(submodule.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(submodule.register_forward_hook(after, with_kwargs=True))
        # scripted modules take no such hooks
        except (RuntimeError, AttributeError):
            continue
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@final
class ModuleTrace:
    """Two runs of a module, compared call by call."""

    def __init__(self, module: nn.Module, comparison: PartComparison) -> None:
        self.module = module
        self.comparison = comparison
        self.kept: dict[CallKey, KeptCall] = {}
        self.culprits: list[Culprit] = []
        self.judges_later_calls = True
        self.whole_call: OpenCall | None = None
        self._open: list[OpenCall] = []
        self._counts: Counter[str] = Counter()
        self._bytes = 0

    def compare(self, first: Run, second: Run) -> None:
        """Run both; afterwards `culprits` are the calls in which a difference enters. Raises TooLarge."""
        self._watch(first, self._enter_first, self._leave_first)
        self._watch(second, self._enter_second, self._leave_second)
        # logits that are not in the result, but in a loss that the model computes
        if not self.culprits and self.whole_call is not None:
            self.culprits.append(self._culprit(self.whole_call))

    def _watch(self, run: Run, enter: Callable[..., None], leave: Callable[..., None]) -> None:
        self._open.clear()
        self._counts.clear()
        run.prepare()
        with watching(self.module, enter, leave):
            run.call()

    def _push(self, name: str, module: nn.Module) -> OpenCall:
        call = OpenCall(CallKey(name, self._counts[name]), module)
        self._counts[name] += 1
        self._open.append(call)
        return call

    def _pop(self, name: str) -> OpenCall | None:
        # a call that raised, and whose error the model caught, never returned
        while self._open:
            call = self._open.pop()
            if call.key.module == name:
                return call
        return None

    def _enter_first(self, name: str, module: nn.Module, inputs: Any) -> None:
        self._push(name, module).inputs = self._counted(self.comparison.keep(inputs))

    def _leave_first(self, name: str, output: Any) -> None:
        call = self._pop(name)
        if call is not None:
            self.kept[call.key] = KeptCall(call.inputs, self._counted(self.comparison.keep(output)))

    def _counted(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        self._bytes += sum(part.numel() * part.element_size() for part in parts.values())
        if self._bytes > MAX_BYTES:
            raise TooLarge
        return parts

    def _enter_second(self, name: str, module: nn.Module, inputs: Any) -> None:
        call = self._push(name, module)
        kept = self.kept.get(call.key)
        if kept is not None:
            call.inputs_agree = not self.comparison.judge(kept.inputs, inputs).differs

    def _leave_second(self, name: str, output: Any) -> None:
        call = self._pop(name)
        if call is None:
            return
        if not self._open:
            self.whole_call = call
        kept = self.kept.get(call.key)
        outputs_agree = None
        if kept is not None:
            judgment = self.comparison.judge(kept.outputs, output)
            if judgment.compared:
                outputs_agree = not judgment.differs
            # the model's own inputs are what was exchanged
            if judgment.differs and (call.inputs_agree or not self._open) and self.judges_later_calls:
                self.culprits.append(self._culprit(call))
                self.judges_later_calls = self.comparison.put_back(kept.outputs, output)
                outputs_agree = self.judges_later_calls
        if self._open:
            self._open[-1].children.append(ClosedCall(call.key, call.inputs_agree, outputs_agree))

    def _culprit(self, call: OpenCall) -> Culprit:
        after = None
        before = None
        for child in call.children:
            name = child.key.module.removeprefix(f"{call.key.module}.") or child.key.module
            if not child.inputs_agree:
                before = name
                break
            after = name
        return Culprit(call.key, call.module, after, before)


@final
class StatementSearch(TorchFunctionMode):
    """Records the operations in one call of a submodule, outside of its children, or compares them with a first run."""

    def __init__(self, comparison: PartComparison, expected: "StatementSearch | None" = None) -> None:
        super().__init__()
        self.comparison = comparison
        self.expected = expected
        self.outputs: list[tuple[str, dict[str, Tensor]]] = []
        self.found: Statement | None = None
        # 0 outside of the call, 1 in it, more in its children
        self._depth = 0
        self._calls = 0
        self._bytes = 0

    def enter(self, key: CallKey, name: str, module: nn.Module, inputs: Any) -> None:
        """A submodule is called; `key` is the call that is searched."""
        if self._depth:
            self._depth += 1
        elif name == key.module:
            self._depth = int(self._calls == key.earlier)
            self._calls += 1

    def leave(self, name: str, output: Any) -> None:
        """A submodule returns."""
        self._depth = max(self._depth - 1, 0)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._depth == 1 and self.found is None:
            # an assignment to a part of a tensor gives nothing
            changed = args[0] if result is None and args else result
            self._see(resolve_name(func) or str(func), changed)
        return result

    def _see(self, name: str, value: Any) -> None:
        if self.expected is None:
            parts = self.comparison.keep(value)
            self._bytes += sum(part.numel() * part.element_size() for part in parts.values())
            if self._bytes > MAX_BYTES:
                raise TooLarge
            self.outputs.append((name, parts))
            return
        index = len(self.outputs)
        self.outputs.append((name, {}))
        if index < len(self.expected.outputs):
            expected_name, expected = self.expected.outputs[index]
            if name != expected_name or self.comparison.judge(expected, value).differs:
                self.found = calling_statement()
        else:
            self.found = calling_statement()


def find_statement(
    module: nn.Module, culprit: Culprit, comparison: PartComparison, first: Run, second: Run
) -> Statement | None:
    """The first statement of the call whose result differs although nothing before it does."""
    searches: list[StatementSearch] = []
    for run in (first, second):
        search = StatementSearch(comparison, searches[0] if searches else None)
        searches.append(search)
        run.prepare()
        with watching(module, partial(search.enter, culprit.key), search.leave), search:
            run.call()
    return searches[1].found


def calling_statement() -> Statement | None:
    """The innermost statement outside of torch and of the contracts."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((TORCH_FOLDER, THIS_FOLDER)):
            return Statement(short_path(file), frame.f_lineno, linecache.getline(file, frame.f_lineno).strip())
        frame = frame.f_back
    return None


def short_path(file: str) -> str:
    """A file's path below the working directory or its package, without the folders of a machine."""
    path = Path(file)
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        pass
    for root in sorted(sys.path, key=len, reverse=True):
        if root and path.is_relative_to(root):
            return str(path.relative_to(root))
    return path.name


def sizes_of(module: nn.Module | None) -> set[int]:
    """All sizes of axes of parameters and buffers, which a length should not equal, lest axes be confused."""
    if module is None:
        return set()
    return {size for tensor in [*module.parameters(), *module.buffers()] for size in tensor.shape}


def same_class(module: nn.Module, other: nn.Module) -> int:
    """How many submodules of `module` have the class of `other`."""
    return sum(type(submodule) is type(other) for submodule in module.modules())


def names_of(culprits: Sequence[Culprit], module_class: type[nn.Module]) -> tuple[str, ...]:
    """The names of the submodules of a class in which a difference enters, each once."""
    return tuple(dict.fromkeys(culprit.key.module for culprit in culprits if type(culprit.module) is module_class))
