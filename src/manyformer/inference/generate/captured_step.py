"""A static step captured once as a graph of kernels, and replayed for every further token.

The modes of dispatch at the end find what a captured step must not do, reading numbers of tensors or bringing numbers
of the host to the device, and the tensors that a graph reads at fixed addresses."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol, final, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.base.errors import UserError
from manyformer.models.static_step import StaticModelState, StaticStepFn
from manyformer.nn.attention.kv_cache.static_cache import NotStaticError
from manyformer.nn.core import MemorySequence, State, tree_map
from manyformer.nn.runtime.torch_internals import TorchDispatchMode, tree_leaves

WARM_UPS = 2
"""Runs of a step on a side stream, so that libraries have what they allocate when they are first used."""

CHECKED_REPLAYS = 2
"""The first replays are compared with the step itself: at the position of the capture and at a later one."""

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""How far logits may differ by rounding, as a share of the largest; of lower precision by `HALF_TOLERANCE`."""

HALF_TOLERANCE = 5e-2


@runtime_checkable
class Graph(Protocol):
    """The part of `torch.cuda.CUDAGraph` that is used."""

    def replay(self) -> None: ...


@runtime_checkable
class GraphEngine(Protocol):
    """How a device runs work on a side stream, and captures work as a graph without running it."""

    def side_stream(self) -> AbstractContextManager[Any]: ...
    def graph(self) -> Graph: ...
    def capture(self, graph: Graph) -> AbstractContextManager[Any]: ...


@final
class CudaGraphEngine:
    """CUDA graphs of torch."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def side_stream(self) -> AbstractContextManager[Any]:
        """The context of a fresh stream, which waits for the current one; the current one waits for its end."""
        return _SideStream(self.device)

    def graph(self) -> Graph:
        """A graph without kernels."""
        return torch.cuda.CUDAGraph()

    def capture(self, graph: Graph) -> AbstractContextManager[Any]:
        """The context whose kernels are captured; other threads may go on to use the GPU."""
        assert isinstance(graph, torch.cuda.CUDAGraph)
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local")


class _SideStream:
    def __init__(self, device: torch.device) -> None:
        self.current = torch.cuda.current_stream(device)
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._context = torch.cuda.stream(self.stream)

    def __enter__(self) -> None:
        self.stream.wait_stream(self.current)
        self._context.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)
        self.current.wait_stream(self.stream)


@final
class CapturedStep:
    """One graph for one number of rows and columns: call it with tokens (b, 1) for logits (b, 1, v).

    Tokens, the state and a copy of the encoded source are in buffers that are never replaced, and logits are copied out
    of theirs. `state` becomes these buffers: it holds the current state after every call. `weights` are tensors that
    the graph may read and that their owner holds. Raises UserError if a replay and the step itself give different
    logits."""

    def __init__(
        self,
        step: StaticStepFn,
        tokens: Int[Tensor, "b 1"],
        state: StaticModelState,
        memory: MemorySequence | None,
        engine: GraphEngine,
        weights: Iterable[Tensor] = (),
    ) -> None:
        self.tokens = tokens.clone()
        self.state = state
        self.replays = 0
        self.memory = tree_map(lambda tensor: tensor.clone(memory_format=torch.contiguous_format), memory)
        self._step: StaticStepFn | None = step
        with engine.side_stream():
            for _ in range(WARM_UPS):
                # caches are written at the place that the state names, which stays as it is
                check_form(self.state, self._run_step()[1])
        # what is allocated within the capture lives in the graph's own pool, so that a replay finds it at the same
        # addresses
        self._graph = engine.graph()
        outer = OuterTensors()
        with engine.capture(self._graph), outer:
            self.logits, next_state = self._run_step()
            # `resume` compares with them: a step that reads other tensors needs another graph
            self._addresses = addresses_of(outer.tensors)
            # captured, too: each replay moves the state one token further by itself
            copy_state(self.state, next_state)
        weight_addresses = addresses_of(weights)
        # with the weights among them, a model that moves to another device would leave its memory occupied
        self._outer = [tensor for tensor in outer.tensors if not addresses_of([tensor]) <= weight_addresses]

    def __call__(self, tokens: Int[Tensor, "b 1"]) -> Float[Tensor, "b 1 v"]:
        self.tokens.copy_(tokens)
        expected = None
        if self.replays < CHECKED_REPLAYS:
            # before the replay, which moves the state on
            expected = self._run_step()[0]
        logits = self._replay()
        if expected is not None:
            difference = logits_difference(logits, expected)
            if difference:
                raise UserError(
                    f"the captured step and the step itself give {difference}: decode with step_path='eager'"
                )
        return logits

    def select_rows(self, rows: Int[Tensor, " b"]) -> None:
        """Exchange the rows of the state in its buffers."""
        copy_state(self.state, tree_map(lambda tensor: tensor.index_select(0, rows), self.state))

    def suspend(self) -> None:
        """Let go of the step itself, which holds the model's parts, until the graph is resumed."""
        self._step = None

    def resume(
        self, step: StaticStepFn, tokens: Int[Tensor, "b 1"], state: StaticModelState, memory: MemorySequence | None
    ) -> Float[Tensor, "b 1 v"] | None:
        """Go on with a state and a source of the same form; the logits after these tokens.

        None if the graph is no longer that of the step: it then reads other tensors, such as a table that was computed
        from earlier weights, or gives other logits. `state` stays as it is."""
        self._step = step
        self.tokens.copy_(tokens)
        copy_state(self.state, state)
        copy_state(self.memory, memory)
        with OuterTensors() as outer:
            expected = self._run_step()[0]
        # the step has run on copies in the buffers of the graph, so that nothing is lost by giving up here
        if addresses_of(outer.tensors) != self._addresses:
            return None
        logits = self._replay()
        if logits_difference(logits, expected):
            return None
        return logits

    def _run_step(self) -> tuple[Tensor, StaticModelState]:
        assert self._step is not None
        return self._step(self.tokens, self.state, self.memory)

    def _replay(self) -> Float[Tensor, "b 1 v"]:
        self._graph.replay()
        self.replays += 1
        # the next replay overwrites the buffer
        return self.logits.clone()


def addresses_of(tensors: Iterable[Tensor]) -> set[int]:
    """Where the numbers of these tensors are in memory, those of views once."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}


def check_form(state: State, next_state: State) -> None:
    """Raise NotStaticError unless both have the same numbers and tensors of the same shapes and types."""

    def compare(old: Tensor, new: Tensor) -> Tensor:
        if old.shape != new.shape or old.dtype != new.dtype:
            raise NotStaticError(f"a state grows from {tuple(old.shape)} to {tuple(new.shape)} at a step")
        return old

    try:
        tree_map(compare, state, next_state)
    except NotStaticError:
        raise
    except (ValueError, TypeError) as error:
        raise NotStaticError("a state counts in numbers of the host") from error


def copy_state(state: State, next_state: State) -> None:
    """Write the tensors of another state of this form into those of this one, except those that are the same."""
    pairs: list[tuple[Tensor, Tensor]] = []

    def pair(old: Tensor, new: Tensor) -> Tensor:
        pairs.append((old, new))
        return old

    tree_map(pair, state, next_state)
    buffers = storages_of(state)
    # a view of a buffer is copied before any buffer is written
    # a tensor that is its own next value needs no copy
    changed = [
        (old, new.clone() if new.untyped_storage().data_ptr() in buffers else new)
        for old, new in pairs
        if old is not new
    ]
    for old, new in changed:
        old.copy_(new)


def storages_of(state: State) -> set[int]:
    """The addresses of the memory of a state's tensors."""
    storages: set[int] = set()

    def visit(tensor: Tensor) -> Tensor:
        storages.add(tensor.untyped_storage().data_ptr())
        return tensor

    tree_map(visit, state)
    return storages


def own_buffers(state: State, in_use: State = None) -> State:
    """The state with a copy of every tensor that shares its memory with another one, with `in_use` or with itself."""
    storages = storages_of(in_use)

    def own(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage().data_ptr()
        # an expanded tensor, with strides of 0, has many elements at one address
        is_shared = storage in storages or (tensor.numel() > 1 and 0 in tensor.stride())
        storages.add(storage)
        if is_shared:
            return tensor.clone(memory_format=torch.contiguous_format)
        return tensor

    return tree_map(own, state)


def logits_difference(logits: Tensor, expected: Tensor) -> str:
    """How logits differ by more than rounding, "" if they do not."""
    difference = float((logits - expected).abs().max())
    # relative to the largest logit: small ones differ by more than their own size
    largest = float(expected.abs().max())
    tolerance = max(TOLERANCES.get(tensor.dtype, HALF_TOLERANCE) for tensor in (logits, expected))
    if difference <= tolerance * largest:
        return ""
    return f"logits that are {difference:.1e} apart, the largest being {largest:.1e}"


@final
class OuterTensors(TorchDispatchMode):
    """Collects the tensors that operators read although none of them made it: weights, tables, caches, inputs.

    A captured graph reads them at their addresses, so they must exist as long as it does."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: list[Tensor] = []
        self._storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            self._add(leaf, is_outer=True)
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            self._add(leaf, is_outer=False)
        return out

    def _add(self, leaf: Any, *, is_outer: bool) -> None:
        if isinstance(leaf, Tensor) and (storage := leaf.untyped_storage()._cdata) not in self._storages:
            self._storages.add(storage)
            if is_outer:
                self.tensors.append(leaf)


READS_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
"""Operators whose numbers or shapes depend on the content of tensors."""


@final
class StaticOperatorsOnly(TorchDispatchMode):
    """Raises NotStaticError at the first operator that a captured graph could not replay.

    On a CPU it refuses what would have to wait for a GPU or be copied to one, so that the answer is the same."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.index:
            # torch tags all indexing as of dynamic shape, although that of a boolean mask alone is
            reads_values = any(ids is not None and ids.dtype == torch.bool for ids in args[1])
        else:
            reads_values = any(tag in func.tags for tag in READS_VALUES)
        if reads_values:
            raise NotStaticError(f"the host reads what {func} finds in tensors")
        if func.overloadpacket is torch.ops.aten.lift_fresh:
            raise NotStaticError("numbers of the host are made a tensor at every step")
        out = func(*args, **(kwargs or {}))
        devices = {leaf.device for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)}
        if len(devices) > 1:
            raise NotStaticError(f"{func} moves numbers between {' and '.join(sorted(map(str, devices)))}")
        return out


def module_of(traceback: TracebackType | None) -> str:
    """The type of the innermost module in which an exception was raised, with a space; "" outside all modules."""
    name = ""
    # from the outermost frame inwards: the last module found is the innermost
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            name = f"{type(owner).__name__}: "
        traceback = traceback.tb_next
    return name
