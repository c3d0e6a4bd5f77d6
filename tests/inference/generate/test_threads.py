"""Several threads generate with one model at once: each writes what it writes alone, whatever state the model has."""

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jaxtyping
import pytest
import torch
from torch import Tensor, nn

import manyformer as mf
from manyformer.nn.core import TokenPositions, contiguous_positions
from manyformer.nn.positions.absolute import SinusoidalPosition
from manyformer.nn.positions.rotary import RotaryPosition
from manyformer.nn.runtime.device_reads import ConstantTensor
from manyformer.nn.runtime.module_places import SharedTable
from perturbing import perturb

THREADS = 8
SMALL = {"vocab": 29, "dim": 16, "depth": 2, "heads": 4}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("transformer-lm", {"dropout": 0.3}),  # keys and values, and sines that are looked up
    ("llama", {"kv_heads": 2, "window": 6}),  # a ring, and tables of rotations, which grow
    ("transformer-xl", {"dropout": 0.3}),  # memories of segments, and projected distances
    ("infini-attention", {}),
    ("linear-transformer", {"dropout": 0.3}),
    ("gated-deltanet", {}),
    ("mamba-2", {}),
    ("rwkv-7", {"head_dim": 8}),
    ("lstm-lm", {"dropout": 0.3}),
    ("mixtral", {"num_experts": 4}),
    ("depth-adaptive-lm", {}),  # exits of single tokens
    ("universal-transformer-lm", {}),
    ("nsa", {}),
    ("reformer", {}),
    ("routing-transformer", {}),  # no cache: all is computed again
    ("transformer", {"dropout": 0.3}),  # an encoder-decoder
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"seed": 3, "temperature": 0.8},
    {"seed": 4, "temperature": 1.5, "samples": 2},
    {"seed": 3, "top_k": 5},
    {"seed": 9, "top_p": 0.9, "repetition_penalty": 1.3},
    {"beam": 3, "best": 2},
    {"no_repeat_ngram": 2},
    {"use_cache": False, "seed": 5},
]
"""What each thread asks for."""


@pytest.fixture(autouse=True)
def switch_often() -> Iterator[None]:
    """Threads of Python take turns after a few operations, so that one that is out of turn shows."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    # the checks of shapes, which tests alone have, are no work of several threads
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
    sys.setswitchinterval(interval)


def at_once(work: Callable[[int], Any]) -> list[Any]:
    """The results of `work(0)` to `work(THREADS - 1)`, begun by as many threads at the same moment."""
    barrier = threading.Barrier(THREADS)

    def begin(number: int) -> Any:
        barrier.wait()
        return work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(begin, range(THREADS)))


def writer(name: str, keywords: dict[str, Any]) -> Any:
    """A model in training mode, from which threads take turns to put it into evaluation mode."""
    torch.manual_seed(0)
    sizes = {size: SMALL[size] for size in SMALL.keys() & mf.recipes()[name].signature.parameters}
    model: Any = mf.build(name, **sizes, **keywords)
    perturb(model, 0.2)
    return model.train()


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("name", "keywords"), MODELS, ids=[f"{name} {keywords or ''}" for name, keywords in MODELS])
def test_threads_write_what_each_writes_alone(name: str, keywords: dict[str, Any]) -> None:
    shared = writer(name, keywords)
    # tables that a model computes once and extends are in none of them yet
    alone = copy.deepcopy(shared)

    def write(model: Any, number: int) -> Any:
        # unlike lengths, so that threads need tables of unlike sizes
        prompts = [list(range(1, 3 + 3 * number)), [number + 1, 2]]
        result = mf.generate(model, prompts, max_new=3 + number // 2, **OPTIONS[number])
        return result.rows, result.seeds

    assert at_once(lambda number: write(shared, number)) == [write(alone, number) for number in range(THREADS)]
    assert shared.training


def test_threads_stream_what_each_streams_alone() -> None:
    shared = writer("llama", {"kv_heads": 2})

    def stream(number: int) -> list[Any]:
        pieces: list[Any] = []
        prompts = [[1, 2, 3][: 1 + number % 3], [number + 1]]
        mf.generate(shared, prompts, max_new=12, seed=number, on_piece=pieces.append)
        return pieces

    assert at_once(stream) == list(map(stream, range(THREADS)))


def rotated(position: RotaryPosition, tokens: TokenPositions) -> Tensor:
    return position.query(torch.ones(1, 1, 600, 8), tokens)


def added(position: SinusoidalPosition, tokens: TokenPositions) -> Tensor:
    return position.embed(torch.ones(1, 600, 8), tokens)


@pytest.mark.parametrize(
    ("kind", "holder", "table", "use"),
    [
        (RotaryPosition, SharedTable, "table", rotated),
        (SinusoidalPosition, SinusoidalPosition, "_table", added),
    ],
)
def test_a_table_that_another_thread_replaces_by_a_shorter_one_is_used_as_it_was(
    kind: type[nn.Module], holder: type, table: str, use: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = contiguous_positions(1, 0, 600, torch.device("cpu"))
    expected = use(kind(8), tokens)
    position = kind(8)

    original = holder.__setattr__

    def replace_at_once(owner: object, name: str, value: Any) -> None:
        original(owner, name, value[:1] if name == table and value is not None else value)

    monkeypatch.setattr(holder, "__setattr__", replace_at_once)
    assert torch.equal(use(position, tokens), expected)


def test_constants_that_threads_make_at_once_have_names_of_their_own() -> None:
    def make(number: int) -> list[ConstantTensor]:
        return [ConstantTensor((float(number), float(index)), torch.float64) for index in range(50)]

    constants = [constant for constants in at_once(make) for constant in constants]
    assert len({constant.name for constant in constants}) == len(constants)
    assert all(constant.on(torch.device("cpu")).tolist() == list(constant.values) for constant in constants)
