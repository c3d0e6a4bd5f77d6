"""What each operator of torch does where the pretended device is involved: refuse, count a wait, compute, say where."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._decomp import decomposition_table

from manyformer.nn.runtime.torch_internals import TorchDispatchMode
from pretended_device.tensor import PretendedTensor
from pretended_device.waits import Waits

aten = torch.ops.aten
CPU = torch.device("cpu")

COPIES = {aten._to_copy, aten.copy_, aten.copy, aten._foreach_copy_}
"""Operators whose tensors may be on two devices, of any size."""

TAKE_HOST_INDEX = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
"""Operators with indices that CUDA takes from the CPU, too; it copies them, and the host waits."""

TAKE_HOST_NUMBERS = {
    aten.masked_fill,
    aten.masked_fill_,
    aten.index_fill,
    aten.index_fill_,
    aten.fill,
    aten.fill_,
    *TAKE_HOST_INDEX,
}
"""Operators beside the pointwise ones that take a tensor of no dimension from the CPU as a number."""

TAKE_HOST_LENGTHS = {
    aten._pack_padded_sequence,
    aten._pack_padded_sequence_backward,
    aten._thnn_fused_lstm_cell,
    aten.lstm,
    aten.gru,
}
"""Operators of packed sequences, whose lengths are on the CPU with CUDA, too."""

CHECK_THEIR_RESULT = {aten._linalg_check_errors}
"""Operators that read, on the host, whether another operator has failed."""


class WrongDeviceError(RuntimeError):
    """Tensors of two devices meet in an operator that takes those of one."""


class OperatorFacts(NamedTuple):
    """What the rules for tensors of two devices ask about an operator."""

    name: str
    packet: Any
    takes_host_numbers: bool
    is_random: bool
    reads_values: bool
    written: tuple[int, ...]
    """The positions of the arguments that it writes to."""


@functools.cache
def facts_of(func: Any) -> OperatorFacts:
    packet, name = func.overloadpacket, str(func.overloadpacket)
    parameters = enumerate(func._schema.arguments)
    return OperatorFacts(
        name=name,
        packet=packet,
        takes_host_numbers=packet in TAKE_HOST_NUMBERS or torch.Tag.pointwise in func.tags or "foreach" in name,
        is_random=torch.Tag.nondeterministic_seeded in func.tags,
        reads_values=torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags,
        written=tuple(i for i, par in parameters if par.alias_info is not None and par.alias_info.is_write),
    )


class PretendedOperators(TorchDispatchMode):  # type: ignore[misc]
    """Within it, whatever is made or moved to "cuda" is a `PretendedTensor`; waits are counted in `waits`."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits
        self.random_state = torch.Generator().manual_seed(0).get_state()
        """The state of the pretended device's random numbers, which are not those of the CPU."""
        self.is_meta_meant = False
        """Whether Python has asked for "meta", which is also what torch's C++ code calls this device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, facts = kwargs or {}, facts_of(func)
        tensors: list[Tensor] = []
        _collect_tensors(args, tensors)
        _collect_tensors(list(kwargs.values()), tensors)
        pretended = [tensor for tensor in tensors if isinstance(tensor, PretendedTensor)]
        is_pretended = self._is_result_pretended(facts, args, kwargs, tensors, pretended)
        if not pretended and not is_pretended:
            return func(*args, **_without_pinning(kwargs))
        if len(pretended) < len(tensors):
            self._refuse_mixtures(facts, args, tensors, pretended)
        self._count_waits(facts, args, kwargs, is_pretended=is_pretended)
        inner_args = _map_tensors(args, _numbers)
        inner_kwargs = {name: _map_tensors(value, _numbers) for name, value in _without_pinning(kwargs).items()}
        if inner_kwargs.get("device") is not None:
            inner_kwargs["device"] = CPU
        out = self._compute(func, facts, inner_args, inner_kwargs, is_pretended=is_pretended)
        return _wrapped(facts, out, pretended, is_pretended=is_pretended)

    def _is_result_pretended(
        self, facts: OperatorFacts, args: Any, kwargs: Any, tensors: list[Tensor], pretended: list[PretendedTensor]
    ) -> bool:
        if facts.packet is aten.copy_:
            return isinstance(args[0], PretendedTensor)
        device = kwargs.get("device")
        if device is None:
            return bool(pretended)
        if torch.device(device).type != "meta":
            return torch.device(device).type == "cuda"
        if pretended:
            return True
        # torch's C++ code makes something beside a pretended tensor, or else a model without weights is being made
        return not self.is_meta_meant and not any(tensor.is_meta for tensor in tensors)

    def _refuse_mixtures(
        self, facts: OperatorFacts, args: Any, tensors: list[Tensor], pretended: list[PretendedTensor]
    ) -> None:
        """Raise WrongDeviceError where CUDA would, and count the copies of indices that it makes instead."""
        if not pretended or facts.packet in COPIES or facts.packet in TAKE_HOST_LENGTHS:
            return
        written = [args[position] for position in facts.written if position < len(args)]
        for tensor in tensors:
            if isinstance(tensor, PretendedTensor):
                continue
            is_written = any(tensor is other for other in written)
            is_on_host = not tensor.is_meta
            if is_on_host and tensor.ndim == 0 and facts.takes_host_numbers and not is_written:
                continue
            if is_on_host and facts.packet in TAKE_HOST_INDEX and any(tensor is index for index in args[1]):
                self.waits.add("index copied to the device")
                continue
            shapes = ", ".join(str(tuple(other.shape)) for other in pretended)
            device = "the CPU" if is_on_host else "meta"
            raise WrongDeviceError(
                f"{facts.name} was given tensors on cuda:0 of shape {shapes}, and one on {device} of shape "
                f"{tuple(tensor.shape)}"
            )

    def _count_waits(self, facts: OperatorFacts, args: Any, kwargs: Any, *, is_pretended: bool) -> None:
        packet = facts.packet
        if packet in COPIES:
            self._count_copy(packet, args, kwargs, is_pretended=is_pretended)
        elif packet in TAKE_HOST_INDEX:
            if _reads_mask(packet, args):
                self.waits.add("index by a mask")
        elif packet is aten.repeat_interleave:
            if kwargs.get("output_size") is None:
                self.waits.add("repeat_interleave without output_size")
        elif packet in CHECK_THEIR_RESULT:
            self.waits.add("check of a result")
        elif packet is aten._local_scalar_dense:
            self.waits.add("item")
        elif facts.reads_values:
            self.waits.add(facts.name.removeprefix("aten.").strip("_"))

    def _count_copy(self, packet: Any, args: Any, kwargs: Any, *, is_pretended: bool) -> None:
        source = args[0] if packet is aten._to_copy else args[1]
        if not isinstance(source, Tensor) or isinstance(source, PretendedTensor) == is_pretended:
            return
        if not is_pretended:
            self.waits.add("copy to the host")
            return
        is_asynchronous = kwargs.get("non_blocking") or (packet is aten.copy_ and len(args) > 2 and args[2])
        if not (is_asynchronous and is_pinned(source)):
            self.waits.add("copy to the device")

    def _compute(self, func: Any, facts: OperatorFacts, args: Any, kwargs: Any, *, is_pretended: bool) -> Any:
        # the lazy bits of these two are resolved above the key that calls us, so they would be lost
        if facts.packet is aten._conj:
            return aten.conj_physical.default(*args)
        if facts.packet is aten._neg_view:
            return aten.neg.default(*args)
        if not is_pretended or not facts.is_random:
            try:
                return func(*args, **kwargs)
            except NotImplementedError:
                # a kernel that only CUDA has; torch knows it as a formula of other operators
                return decomposition_table[func](*args, **kwargs)
        if kwargs.get("generator") is not None:
            raise WrongDeviceError(f"{facts.name} draws numbers on cuda:0 from a generator of the CPU")
        state_of_cpu = torch.default_generator.get_state()
        torch.default_generator.set_state(self.random_state)
        try:
            return func(*args, **kwargs)
        finally:
            self.random_state = torch.default_generator.get_state()
            torch.default_generator.set_state(state_of_cpu)


def _collect_tensors(value: Any, tensors: list[Tensor]) -> None:
    """Add the tensors among the arguments of an operator, which are in tuples and lists alone."""
    for item in value:
        if isinstance(item, Tensor):
            tensors.append(item)
        elif isinstance(item, list | tuple):
            _collect_tensors(item, tensors)


def _map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)([_map_tensors(item, function) for item in value])
    return value


def _numbers(tensor: Tensor) -> Tensor:
    return tensor.numbers if isinstance(tensor, PretendedTensor) else tensor


def _reads_mask(packet: Any, args: Any) -> bool:
    """Whether an index is a mask on the device, whose number of elements decides on shapes."""
    masks = [index for index in args[1] if isinstance(index, PretendedTensor) and index.dtype == torch.bool]
    if not masks:
        return False
    # torch writes one number under one mask as `masked_fill` does
    is_fill = packet not in (aten.index, aten._unsafe_index) and args[2].numel() == 1
    return not (is_fill and sum(index is not None for index in args[1]) == 1)


def _without_pinning(kwargs: Any) -> Any:
    return {**kwargs, "pin_memory": False} if kwargs.get("pin_memory") else kwargs


def is_pinned(tensor: Tensor) -> bool:
    """Whether `pin_memory` has made this tensor of the CPU."""
    return getattr(tensor, "is_pretended_pinned", False)


def _wrapped(facts: OperatorFacts, out: Any, pretended: list[PretendedTensor], *, is_pretended: bool) -> Any:
    """The result of an operator on its device; what was written in place is the argument itself."""
    arguments = {id(tensor.numbers): tensor for tensor in pretended}

    def wrap(tensor: Tensor) -> Tensor:
        if id(tensor) in arguments:
            return arguments[id(tensor)]
        return PretendedTensor(tensor) if is_pretended else tensor

    if facts.packet is aten._pack_padded_sequence:
        data, lengths = out
        return wrap(data), lengths
    if facts.packet is aten._to_copy and not is_pretended:
        # a copy on the host shares no memory with the device
        return out.clone()
    return _map_tensors(out, wrap)
