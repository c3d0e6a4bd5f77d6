"""Shapes are checked in every call of a test run, each combination that a function meets once."""

import ast
import dataclasses
import functools
import marshal
import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import cache_from_source, source_hash
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Literal, TypeVar

import torch
from beartype import beartype
from jaxtyping import jaxtyped
from torch import Tensor

CHECKED = [
    f"manyformer.{part}"
    for part in (
        *("nn.core", "nn.masks", "nn.positions", "nn.kernels", "nn.ops", "nn.attention", "nn.softmax", "nn.sparse"),
        *("nn.linear", "nn.clustered", "nn.low_rank", "nn.recurrent", "nn.convolution", "nn.token_mixing", "nn.graphs"),
        *("nn.feed_forward", "nn.residual", "nn.depth", "models"),
        *("inference.generate.beam_search", "inference.generate.next_token", "inference.generate.sampling"),
    )
]
"""Packages whose shape annotations are checked at every call while the tests run."""

OWN_SOURCE = Path(__file__).read_bytes()
"""Compiled modules are made again where this file changes."""

SCALARS = {str, int, float, bool, type(None)}

enabled = True
"""False while a test traces the library with `torch.compile`: the bookkeeping cannot be traced."""


Function = TypeVar("Function", bound=Callable[..., Any])

_known: dict[tuple[CodeType, str], dict[Hashable, set[Hashable]]] = {}
"""For each function the types and shapes that it was given and returned; one inside another is defined many times."""


def checked_once(function: Function) -> Function:
    """`jaxtyped` with `beartype`, but values of the same types and shapes are not looked at again.

    Neither of the two runs for a call like an earlier one, so that most tests take a third of the time. A class is
    returned as it is; of a dataclass, `__init__` is checked.
    """
    if isinstance(function, type):
        if dataclasses.is_dataclass(function):
            function.__init__ = checked_once(function.__init__)  # type: ignore[misc]
        return function
    known = _known.setdefault((function.__code__, function.__module__), {})
    returned: list[Any] = []

    def call_or_return(*args: Any, **kwargs: Any) -> Any:
        return returned.pop() if returned else function(*args, **kwargs)

    @functools.cache
    def checked() -> Callable[..., Any]:
        # with the globals of the function, in which its annotations are read
        call = FunctionType(
            call_or_return.__code__, function.__globals__, function.__name__, None, call_or_return.__closure__
        )
        return jaxtyped(functools.wraps(function)(call), typechecker=beartype)

    @functools.wraps(function)
    def call_checked(*args: Any, **kwargs: Any) -> Any:
        if not enabled or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        given = _likeness(args)
        if kwargs:
            given += (*kwargs, *_likeness(kwargs.values()))
        try:
            outputs = known.get(given)
        except TypeError:
            # sizes without numbers, while torch writes a graph down
            return checked()(*args, **kwargs)
        if outputs is None:
            output = checked()(*args, **kwargs)
            known.setdefault(given, set()).add(_likeness((output,)))
            return output
        output = function(*args, **kwargs)
        kind = _likeness((output,))
        if kind not in outputs:
            returned.append(output)
            checked()(*args, **kwargs)
            outputs.add(kind)
        return output

    return call_checked  # type: ignore[return-value]


def _likeness(values: Iterable[object]) -> tuple[Hashable, ...]:
    """Equal for values of a call that annotations cannot tell apart."""
    # one flat loop: it runs for each call of most functions, and calls of its own would double its time
    parts: list[Hashable] = []
    for value in values:
        kind = type(value)
        form = _forms.get(kind)
        if form is None:
            form = _forms[kind] = _form_of(kind)
        parts.append(kind)
        if form == "tensor":
            parts += (value.dtype, value.shape)  # type: ignore[attr-defined]
        elif form == "scalar":
            parts.append(value)  # type: ignore[arg-type]
        elif form == "sequence":
            parts.append(_likeness(value))  # type: ignore[arg-type]
        elif form == "mapping":
            parts.append((*value, *_likeness(value.values())))  # type: ignore[misc, attr-defined]
    return tuple(parts)


Form = Literal["tensor", "scalar", "sequence", "mapping", "other"]

_forms: dict[type, Form] = {}
"""What `_likeness` looks at in the values of a type."""


def _form_of(kind: type) -> Form:
    if kind in SCALARS:
        return "scalar"
    if issubclass(kind, Tensor):
        return "tensor"
    if kind in (tuple, list):
        return "sequence"
    return "mapping" if kind is dict else "other"


def _states_shapes(node: ast.FunctionDef | ast.ClassDef) -> bool:
    """Whether an annotation of the function, or of a field of the class, has the shape of a tensor, a string."""
    if isinstance(node, ast.ClassDef):
        annotations = [field.annotation for field in node.body if isinstance(field, ast.AnnAssign)]
    else:
        of_arguments = [part.annotation for part in ast.walk(node.args) if isinstance(part, ast.arg)]
        annotations = [annotation for annotation in (*of_arguments, node.returns) if annotation is not None]
    parts = (part for annotation in annotations for part in ast.walk(annotation))
    return any(isinstance(part, ast.Subscript) and _is_shaped(part.slice) for part in parts)


def _is_shaped(index: ast.expr) -> bool:
    """Whether this is the inside of `Float[Tensor, "b l d"]`."""
    last = index.elts[-1] if isinstance(index, ast.Tuple) else None
    return isinstance(last, ast.Constant) and isinstance(last.value, str)


class _CheckingLoader(SourceFileLoader):
    """Compiles a module with `checked_once` on each of its functions and classes that state shapes."""

    def get_code(self, fullname: str) -> CodeType:
        # not from the cache of the interpreter, which holds the module as it is, but from one beside it
        source = self.get_data(self.path)
        cache = cache_from_source(self.path, optimization="shapes")
        key = source_hash(source + OWN_SOURCE)
        with suppress(OSError, EOFError, ValueError, TypeError):
            kept = self.get_data(cache)
            if kept.startswith(key):
                code: CodeType = marshal.loads(kept[len(key) :])
                return code
        code = self.source_to_code(source, self.path)
        if not sys.dont_write_bytecode:
            self.set_data(cache, key + marshal.dumps(code))
        return code

    def source_to_code(self, data: Any, path: Any) -> CodeType:  # type: ignore[override]
        tree = ast.parse(data)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and _states_shapes(node):
                decorator = ast.copy_location(ast.Name("checked_once", ast.Load()), node)
                # innermost of a function, for decorators remove annotations; outermost of a class, around `dataclass`
                node.decorator_list.insert(len(node.decorator_list) * isinstance(node, ast.FunctionDef), decorator)
        return compile(tree, path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        module.checked_once = checked_once  # type: ignore[attr-defined]
        super().exec_module(module)


class CheckingFinder(PathFinder):
    """Finds the modules of `packages`, with their shapes checked."""

    def __init__(self, packages: Collection[str]) -> None:
        self.packages = packages

    def find_spec(  # type: ignore[override]
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not any(fullname == package or fullname.startswith(f"{package}.") for package in self.packages):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _CheckingLoader(spec.loader.name, spec.loader.path)
        return spec


def check_shapes_of(packages: Collection[str]) -> None:
    """Checks the shapes of what is imported from `packages` after this."""
    sys.meta_path.insert(0, CheckingFinder(packages))
