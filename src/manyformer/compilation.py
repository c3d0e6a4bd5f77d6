"""Functions that `torch.compile` leaves out of its graphs."""

import functools
from collections.abc import Callable
from types import CodeType
from typing import ParamSpec, TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

P = ParamSpec("P")
T = TypeVar("T")


def compiler_disabled(function: Callable[P, T]) -> Callable[P, T]:
    """Make `torch.compile` break its graph at calls of `function`, as the decorator `torch.compiler.disable` does.

    That decorator imports the compiler, which takes seconds; this one imports nothing.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)

    # at functions with this attribute, a graph that is being traced ends
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_orig_callable = function  # type: ignore[attr-defined]
    # neither this frame nor those that it calls are compiled
    code: CodeType = call.__code__  # type: ignore[attr-defined]
    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return call
