"""What all tests share: one thread, a fixed seed, and shapes checked at run time."""

import gc
import os
import signal
import sys
import zlib
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from jaxtyping import Float, Int
from torch import Tensor

import shapes

# where it is set, every process of the tests compiles all sources again, which is a tenth of their time
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False

# with the default, which looks after every 700 new objects, garbage collection is a twelfth of the time of all tests
gc.set_threshold(50_000, 20, 50)

# jobs in the background of a shell ignore Ctrl-C, and so would every process that a test interrupts
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# whatever is imported from the library after this line is checked
shapes.check_shapes_of(shapes.CHECKED)

from manyformer.nn import Kernel, KernelCall  # noqa: E402
from manyformer.nn.core import LayerOutput  # noqa: E402

_call_kernel = Kernel.__call__


@shapes.checked_once
def _check_kernel_call(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b g s e"],
    v: Float[Tensor, "b g s f"],
    y: Float[Tensor, "b h l f"],
    query_positions: Int[Tensor, "#b l"],
    key_positions: Int[Tensor, "#b s"],
) -> None:
    """The shapes of a `KernelCall` and of its output, which no function signature states."""


def _call_kernel_checked(kernel: Kernel, call: KernelCall) -> LayerOutput:
    output = _call_kernel(kernel, call)
    if not torch.compiler.is_compiling():
        q, k, v, query_positions, key_positions, *_ = call
        q, v = q[..., : q.shape[-1] - kernel.extra_query_dim], v[..., : v.shape[-1] - kernel.gate_dim]
        _check_kernel_call(q, k, v, output.y, query_positions.position_ids, key_positions.position_ids)
    return output


Kernel.__call__ = _call_kernel_checked  # type: ignore[method-assign]

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow-share", metavar="K/N", help="of the tests marked slow, keep those of share K (0 to N - 1) alone"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is slow; a share of it is the same on every machine, and all shares together are all of it."""
    cases: Counter[str] = Counter()
    for item in items:
        if (marker := item.get_closest_marker("thinned")) and not item.get_closest_marker("slow"):
            test = item.nodeid.partition("[")[0]
            if cases[test] % marker.args[0]:
                item.add_marker(pytest.mark.slow)
            cases[test] += 1
    if (share := config.getoption("--slow-share")) is None:
        return
    number, _, total = share.partition("/")
    if not (number.isdecimal() and total.isdecimal() and int(number) < int(total)):
        raise pytest.UsageError(f"--slow-share ({share}) must be K/N with K from 0 to N - 1, such as 3/20")
    outside = [
        item
        for item in items
        if item.get_closest_marker("slow") and zlib.crc32(item.nodeid.encode()) % int(total) != int(number)
    ]
    config.hook.pytest_deselected(items=outside)
    left_out = set(outside)
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """Leave thousands of collected tests out of every later garbage collection, each of which would take a second."""
    gc.collect()
    gc.freeze()


# of devices that are not there, `torch.manual_seed` writes down each call with the stack, a millisecond every time
_set_seed = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test draws the same random numbers, whichever tests ran before it."""
    _set_seed(0)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """No shape checks for a test that traces the library with `torch.compile`: their bookkeeping cannot be traced."""
    shapes.enabled = False
    Kernel.__call__ = _call_kernel  # type: ignore[method-assign]
    yield
    shapes.enabled = True
    Kernel.__call__ = _call_kernel_checked  # type: ignore[method-assign]
