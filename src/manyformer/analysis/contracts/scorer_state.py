"""What a scorer keeps between calls: variables, containers, tensors and files that its code reaches."""

import copy
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

MAX_OBJECTS = 20_000
"""So many objects are looked at: a scorer that holds more holds a corpus."""

MAX_CHILDREN = 1_000
"""So many values of one container are followed."""

COMPILER_CACHES = ("torchinductor", "triton", "__pycache__", ".nv", "/proc/", "/dev/")
"""Parts of paths where compilers keep what they compiled, which changes no score."""

_UNBOUND = object()


class HeldValue(NamedTuple):
    """A value that is kept somewhere: whether it is still as it was, and what puts it back."""

    name: str
    is_same: Callable[[], bool]
    put_back: Callable[[], None]
    is_weight: bool = False


class HeldState:
    """The values that a function reaches by its closure, globals, arguments and attributes, as they are now."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._values: list[HeldValue] = []
        self._visited: set[int] = set()
        # visited objects must live on, or another one could get the same id
        self._alive: list[Any] = []
        self._own_module = getattr(function, "__module__", None) or type(function).__module__
        pending: deque[tuple[str, Any]] = deque([("", function)])
        while pending and len(self._visited) < MAX_OBJECTS:
            name, value = pending.popleft()
            if id(value) in self._visited:
                continue
            self._visited.add(id(value))
            self._alive.append(value)
            pending.extend(self._record(name, value))

    def changed(self) -> list[HeldValue]:
        """The values that are no longer what they were."""
        return [value for value in self._values if not value.is_same()]

    def _record(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Record one object and give the objects that it holds, with their names."""
        if isinstance(value, FunctionType):
            yield from self._record_function(name, value)
        elif isinstance(value, MethodType):
            yield name, value.__func__
            yield name, value.__self__
        elif isinstance(value, partial):
            yield name, value.func
            yield name, list(value.args)
            yield name, value.keywords
        elif isinstance(value, Tensor):
            if not value.is_meta:
                self._record_tensor(name, value)
        elif isinstance(value, np.ndarray):
            self._record_array(name, value)
        elif isinstance(value, dict | list | set | deque | bytearray):
            self._record_container(name, value)
            children = value.items() if isinstance(value, dict) else ((name, child) for child in value)
            for _, (key, child) in zip(range(MAX_CHILDREN), children):
                yield (f"{name}[{key!r}]" if isinstance(value, dict) else name), child
        elif isinstance(value, tuple):
            yield from ((name, child) for child in value[:MAX_CHILDREN])
        elif isinstance(value, type):
            if value.__module__ == self._own_module:
                yield from self._record_class(name, value)
        elif hasattr(value, "__dict__") and not isinstance(value, ModuleType) and not _is_internal(type(value)):
            attributes = vars(value)
            self._record_container(name, attributes)
            for key, child in attributes.items():
                yield from _children_of_attribute(_joined(name, key), key, child)
            yield name, type(value)

    def _record_function(self, name: str, function: FunctionType) -> Iterator[tuple[str, Any]]:
        yield name, function.__dict__
        yield name, function.__defaults__ or ()
        yield name, function.__kwdefaults__ or {}
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            saved = _contents(cell)
            self._values.append(HeldValue(variable, partial(_holds, cell, saved), partial(_put_back, cell, saved)))
            yield variable, saved
        for variable in _global_names(function.__code__):
            scope = function.__globals__
            # a name of a builtin or of an attribute
            if variable not in scope:
                continue
            saved = scope[variable]
            is_same = partial(_has, scope, variable, saved)
            self._values.append(HeldValue(variable, is_same, partial(scope.__setitem__, variable, saved)))
            # functions of libraries keep what is no business of a scorer
            is_foreign = isinstance(saved, FunctionType) and saved.__module__ != self._own_module
            if not is_foreign:
                yield variable, saved

    def _record_class(self, name: str, value: type) -> Iterator[tuple[str, Any]]:
        for key, attribute in list(vars(value).items()):
            if key.startswith("__") and key != "__call__":
                continue
            if not callable(attribute):
                is_same = partial(_has, vars(value), key, attribute)
                put_back = partial(setattr, value, key, attribute)
                self._values.append(HeldValue(f"{value.__name__}.{key}", is_same, put_back))
            yield f"{value.__name__}.{key}", attribute

    def _record_tensor(self, name: str, value: Tensor) -> None:
        saved = value.detach().clone()

        def put_back() -> None:
            with torch.no_grad():
                value.data.copy_(saved)

        is_weight = isinstance(value, nn.Parameter)
        self._values.append(HeldValue(name, lambda: _same_tensor(saved, value), put_back, is_weight))

    def _record_array(self, name: str, value: "np.ndarray[Any, Any]") -> None:
        saved = value.copy()

        def put_back() -> None:
            value[...] = saved

        def is_same() -> bool:
            return np.array_equal(saved, value, equal_nan=saved.dtype.kind == "f")

        self._values.append(HeldValue(name, is_same, put_back))

    def _record_container(self, name: str, value: Any) -> None:
        saved = copy.copy(value)

        def put_back() -> None:
            value.clear()
            if isinstance(value, dict | set):
                value.update(saved)
            else:
                value.extend(saved)

        self._values.append(HeldValue(name, lambda: _same_container(saved, value), put_back))


def _is_internal(kind: type) -> bool:
    return kind.__module__.split(".")[0] in ("builtins", "torch", "numpy", "threading") and not issubclass(
        kind, nn.Module
    )


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _children_of_attribute(name: str, key: str, child: Any) -> Iterator[tuple[str, Any]]:
    """What an attribute holds; modules keep weights and parts in tables whose names nobody writes."""
    if key in ("_parameters", "_buffers", "_modules"):
        holder = name.removesuffix(key).rstrip(".")
        yield from ((_joined(holder, part), value) for part, value in child.items())
        # a table itself changes where a buffer is replaced
        yield holder, child
    else:
        yield name, child


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # a name that is not bound yet
        return _UNBOUND


def _holds(cell: CellType, saved: Any) -> bool:
    return _contents(cell) is saved


def _has(scope: Mapping[str, Any], key: str, saved: Any) -> bool:
    return scope.get(key, _UNBOUND) is saved


def _put_back(cell: CellType, saved: Any) -> None:
    if saved is not _UNBOUND:
        cell.cell_contents = saved


def _global_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


def _same_tensor(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return bool(torch.equal(left, right)) or bool(((left == right) | (left.isnan() & right.isnan())).all())


def _same_container(left: Any, right: Any) -> bool:
    if len(left) != len(right):
        return False
    if isinstance(left, Mapping):
        return all(key in right and right[key] is value for key, value in left.items())
    if isinstance(left, set | bytearray):
        return bool(left == right)
    return all(one is other for one, other in zip(left, right, strict=True))


class FileWatch:
    """Which files a call reads as an earlier call wrote them; one that each call writes first is scratch."""

    def __init__(self) -> None:
        # file systems round the time of a change down
        self._started = time.time() - 0.01
        self._opened: set[str] = set()
        self._stamps: dict[str, tuple[int, int]] = {}
        self._read: set[str] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch one call."""
        _active.append(self)
        _install_hook()
        try:
            yield
        finally:
            _active.remove(self)

    def kept_files(self, call: Callable[[], object]) -> list[str]:
        """The files that changed since the watch began and that one more call reads before it writes them."""
        candidates = [path for path in self._opened if not any(part in path for part in COMPILER_CACHES)]
        stamps = {path: stamp for path in candidates if (stamp := _stamp(path)) is not None}
        self._stamps = {path: stamp for path, stamp in stamps.items() if stamp[0] >= self._started * 1e9}
        if not self._stamps:
            return []
        # times of changes are some milliseconds coarse: what the call writes must get another one
        time.sleep(0.02)
        self._read.clear()
        call()
        kept = sorted(self._read)
        self._stamps = {}
        return kept

    def note(self, path: str) -> None:
        """Note that a file is opened, before it is."""
        self._opened.add(path)
        if path in self._stamps and _stamp(path) == self._stamps[path]:
            self._read.add(path)


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


_active: list[FileWatch] = []
_hooks: list[Callable[..., None]] = []


def _install_hook() -> None:
    # a hook cannot be removed: one serves all watches, and does nothing between them
    if not _hooks:
        _hooks.append(_on_event)
        sys.addaudithook(_on_event)


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    if not _active or event not in ("open", "sqlite3.connect"):
        return
    path = arguments[0]
    if not isinstance(path, str | bytes):
        return
    mode = arguments[1] if event == "open" else "r"
    # a file that is opened with w or x begins empty
    if isinstance(mode, str) and ("w" in mode or "x" in mode):
        return
    for watch in _active:
        watch.note(os.path.abspath(os.fsdecode(path)))
