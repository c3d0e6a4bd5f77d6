"""What torch's devices can do, what fits into their memory, and what they lack, in sentences for people.

Each kind of device is one entry of `KINDS`, and no other module names one. Cards of any maker answer to the type under
which torch has them: those that run ROCm are `cuda`. Models that cannot fit are refused before they are built."""

import math
import os
import platform
import re
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from manyformer.base.errors import UserError
from manyformer.nn.runtime.shapes_alone import on_meta_device

SMALLER_MODEL = "make dim, ff_dim, depth, vocab or max_length smaller, or what else decides the number of weights"
SMALLER_WORK = "make the batch, the length of the rows or the model (dim, depth, vocab) smaller"
"""What reduces the memory of any other work."""
MAX_MODULES = 50_000
"""The most modules that a model may have: creating more takes minutes, whatever their size."""
_SMALL_PRODUCT = 1 << 22
_SMALL_VALUE = 1 << 12
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
# what torch, its CPU and CUDA allocators, C++, NumPy and FAISS say if memory cannot be allocated
_FAILED_ALLOCATION = re.compile(
    r"can't allocate memory|out of memory|bad_alloc|bad_array_new|unable to allocate|failed to allocate|"
    r"cannot allocate memory|storage size calculation overflowed|multiplication overflow|ALLOC_FAILED",
    re.IGNORECASE,
)
_REQUESTED = re.compile(r"allocate (\d+) bytes|allocate ([\d.]+ ?[KMGTPE]?i?B)", re.IGNORECASE)
# what torch says of an operator without a kernel, on MPS and elsewhere, and of float64 on MPS
_MISSING_OPERATOR = re.compile(
    r"The operator '(?P<need>[\w:.]+)' is not currently implemented for the (?P<device>\w+) device"
    r"|Could not run '(?P<other_need>[\w:.]+)' with arguments from the '(?P<other_device>\w+)' backend"
)
_NOT_DETERMINISTIC = re.compile(r"(?P<operator>[\w:.]+) does not have a deterministic implementation")
_MISSING_TYPE = re.compile(r"Cannot convert a (?P<device>\w+) Tensor to (?P<need>\w+) dtype")


def _never() -> bool:
    return False


def _always() -> bool:
    return True


def _no_number(device: torch.device) -> None:
    return None


def _no_generation(device: torch.device) -> int:
    return 0


def _no_action(device: torch.device) -> None:
    pass


class DeviceKind(NamedTuple):
    """A type of device of torch, and what can be done there; by default what is true of one nothing is known of."""

    type: str
    is_available: Callable[[], bool] = _never
    how_many: Callable[[], int] = lambda: 1
    describe: Callable[[torch.device], str] = str
    """The name of the device for people."""
    is_host: bool = False
    """Whether it computes while Python waits, in the memory of the host: a number is read at no cost."""
    has_float64: bool = True
    has_bfloat16: Callable[[], bool] = _never
    """Whether its own arithmetic has bfloat16."""
    emulates_bfloat16: bool = False
    """Whether it computes with bfloat16 where its arithmetic has none."""
    has_float16: bool = False
    half_by_default: bool = False
    """Whether `precision=auto` means bfloat16, where the device has it: only where that is known to be faster."""
    is_complete: bool = True
    """Whether torch has all of its operators there."""
    fallback: str | None = None
    """The environment variable with which torch, when it is imported, chooses the CPU for what the device lacks."""
    has_ctc_loss: bool = True
    """Whether torch has its loss of speech recognition there, in all of its versions that are served."""
    multiplies_tf32: bool = False
    """Whether products of float32 can be rounded to TF32, which is faster."""
    compiles_by_default: bool = False
    """Whether `compile=auto` compiles."""
    compiles_attention: bool = False
    """Whether FlexAttention becomes one kernel, and the kernels in Triton of fla-core run."""
    capability: Callable[[torch.device], int] = _no_generation
    """The generation of its arithmetic by CUDA's numbers, which ROCm has too; 0 where there is none."""
    captures_graphs: bool = False
    """Whether steps are captured once, as `torch.cuda.CUDAGraph` does, and replayed."""
    pins_copies: bool = False
    """Whether copies from pinned memory of the host go on beside the computation."""
    collectives: str | None = None
    """The backend of torch.distributed for its tensors; None if several processes cannot share work on it."""
    generators: bool = False
    """Whether it draws random numbers by a generator of its own, one for each device."""
    memory: Callable[[torch.device], int | None] = _no_number
    """The bytes that can be used at most; None if that is unknown."""
    synchronize: Callable[[torch.device], None] = _no_action
    """Wait until the device has computed all that it was given."""
    measures_memory: bool = False
    """Whether torch records the peak of the memory that it has allocated."""

    @property
    def module(self) -> ModuleType:
        """The module of torch with the functions for this type."""
        module: ModuleType = getattr(torch, self.type)
        return module


def _describe_processor(device: torch.device) -> str:
    return platform.processor() or platform.machine()


# functions of torch are looked up when they are called: tests put others in their place
CPU = DeviceKind(
    "cpu",
    is_available=_always,
    describe=_describe_processor,
    is_host=True,
    # slower than float32 on most processors, but every processor computes it
    has_bfloat16=_always,
    has_float16=True,
    collectives="gloo",
)
CUDA = DeviceKind(
    "cuda",
    is_available=lambda: torch.cuda.is_available(),
    how_many=lambda: torch.cuda.device_count(),
    describe=lambda device: torch.cuda.get_device_name(device),
    # older cards only emulate it, slower than float32
    has_bfloat16=lambda: torch.cuda.is_bf16_supported(including_emulation=False),
    emulates_bfloat16=True,
    has_float16=True,
    half_by_default=True,
    multiplies_tf32=True,
    compiles_by_default=True,
    compiles_attention=True,
    capability=lambda device: torch.cuda.get_device_capability(device)[0],
    captures_graphs=True,
    pins_copies=True,
    collectives="nccl",
    generators=True,
    memory=lambda device: torch.cuda.get_device_properties(device).total_memory,
    synchronize=lambda device: torch.cuda.synchronize(device),
    measures_memory=True,
)
MPS = DeviceKind(
    "mps",
    is_available=lambda: torch.backends.mps.is_available(),
    describe=lambda device: torch.backends.mps.get_name(),
    has_float64=False,
    is_complete=False,
    fallback="PYTORCH_ENABLE_MPS_FALLBACK",
    has_ctc_loss=False,
    # Metal has it from macOS 14 on
    has_bfloat16=lambda: torch.backends.mps.is_macos_or_newer(14, 0),
    has_float16=True,
    generators=True,
    memory=lambda device: torch.mps.recommended_max_memory(),
    synchronize=lambda device: torch.mps.synchronize(),
)
KINDS = {kind.type: kind for kind in (CUDA, MPS, CPU)}
"""The types of devices that a model is run on, the one to prefer first."""


_COMPILING_ATTENTION = frozenset(kind.type for kind in KINDS.values() if kind.compiles_attention)


def compiles_attention(device: torch.device) -> bool:
    """Whether FlexAttention becomes one kernel on a device, and kernels in Triton run; torch.compile reads this too."""
    return device.type in _COMPILING_ATTENTION


def device_kind(device: torch.device) -> DeviceKind:
    """What can be done on a device; also one that no entry is for, such as torch's meta device."""
    return KINDS.get(device.type) or DeviceKind(device.type)


def available_devices() -> tuple[str, ...]:
    """The types of devices of this machine, the one to prefer first; the CPU is always the last."""
    return tuple(kind.type for kind in KINDS.values() if kind.is_available())


def best_device() -> torch.device:
    """A GPU if torch has one to use, else the CPU."""
    return torch.device(available_devices()[0])


def gpu_name(device: torch.device) -> str | None:
    """The name of a GPU for people; None for the CPU."""
    kind = device_kind(device)
    if kind.is_host:
        return None
    return kind.describe(device)


def collective_device(backend: str) -> torch.device:
    """The device whose tensors a backend of torch.distributed sends."""
    return torch.device(next(kind.type for kind in KINDS.values() if kind.collectives == backend))


def use_device(device: torch.device) -> None:
    """Let a device that has a number be the one that torch means by its type."""
    if device.index is not None:
        device_kind(device).module.set_device(device)


def send(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on `device`: one of the host is copied from pinned memory where the device has such copies.

    The host does not wait for them to arrive. A tensor that is there already stays as it is."""
    if x.device.type == device.type:
        return x.to(device)
    if not device_kind(device).pins_copies:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def wide_dtype(device: torch.device) -> torch.dtype:
    """The widest floating-point type of a device."""
    if device_kind(device).has_float64:
        return torch.float64
    return torch.float32


def float64_device(device: torch.device) -> torch.device:
    """Where what a device must know in float64 is computed: there, or on the CPU where it has none."""
    if device_kind(device).has_float64:
        return device
    return torch.device(CPU.type)


def generator_states() -> dict[str, Tensor]:
    """The states of the generators of this process's devices, by their types."""
    drawing = [kind for kind in KINDS.values() if kind.generators and kind.is_available()]
    return {kind.type: kind.module.get_rng_state() for kind in drawing}


def restore_generator(device_type: str, state: Tensor) -> None:
    """Restore the generator of a device, where this machine has such a one."""
    kind = KINDS.get(device_type)
    if kind is not None and kind.generators and kind.is_available():
        kind.module.set_rng_state(state)


def drawing_devices(devices: Iterable[torch.device]) -> list[torch.device]:
    """Those of `devices`, all of one type but for the CPU, that have a generator of their own; each once."""
    return list(dict.fromkeys(device for device in devices if device_kind(device).generators))


def forked_generators(devices: Iterable[torch.device]) -> AbstractContextManager[object]:
    """Restore the generators of the CPU and of these devices at the end of the block."""
    drawing = drawing_devices(devices)
    # torch forks the generators of one type of device, and of the CPU with it
    types = {device.type for device in drawing} or {CPU.type}
    assert len(types) == 1, f"tensors of one model are on {sorted(types)}"
    return torch.random.fork_rng(drawing, device_type=types.pop())


def device_generator_state(device: torch.device) -> Tensor:
    """The state of the generator of a device that has one."""
    state: Tensor = device_kind(device).module.get_rng_state(device)
    return state


def set_device_generator(device: torch.device, state: Tensor) -> None:
    """Set the generator of a device that has one."""
    device_kind(device).module.set_rng_state(state, device)


class OutOfMemory(UserError):
    """Memory for some work could not be allocated, or cannot suffice; the sentence says what makes the work smaller."""


def device_memory(device: torch.device) -> int:
    """The bytes of memory that this process can use at most on a device."""
    # the host has no entry: its limits are those of the process
    of_device = device_kind(device).memory(device)
    if of_device is not None:
        return of_device
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    # a container or a shell may allow less than the machine has
    limits += [limit for limit in resource.getrlimit(resource.RLIMIT_AS) if limit != resource.RLIM_INFINITY]
    for file in _CGROUP_LIMITS:
        if file.is_file() and (text := file.read_text().strip()).isdecimal():
            limits.append(int(text))
    return min(limits)


def check_model_fits(
    build: Callable[[], nn.Module], name: str, keywords: Mapping[str, Any], *, copies: int, device: torch.device
) -> None:
    """Raise OutOfMemory if `copies` of the parameters of the model that `build` creates do not fit on the device.

    The model is built without storage, and only if the keywords are large; `build` must not be called in vain.
    """
    numbers = sorted((value for value in keywords.values() if type(value) is int), reverse=True)[:3]
    is_small = math.prod(numbers) < _SMALL_PRODUCT and max(numbers, default=0) < _SMALL_VALUE
    # a model that is small anyway is not built twice
    if is_small or torch.get_default_device().type == "meta":
        return
    try:
        with torch.random.fork_rng(devices=[]), bounded_model(name), on_meta_device():
            model = build()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        # one of its tensors has more bytes than an address can count
        raise _beyond_memory(name, f"{format_memory(2.0**63)} or more", copies, device) from error
    check_memory_of(model, name, copies=copies, device=device)


def check_memory_of(model: nn.Module, name: str, *, copies: int, device: torch.device) -> None:
    """Raise OutOfMemory if `copies` of the parameters of a model do not fit into the memory of a device."""
    needed = copies * sum(tensor.nbytes for tensor in chain(model.parameters(), model.buffers()))
    if needed > device_memory(device):
        raise _beyond_memory(name, format_memory(needed), copies, device)


def _beyond_memory(name: str, needed: str, copies: int, device: torch.device) -> OutOfMemory:
    purpose = " for its weights"
    if copies > 1:
        purpose = f" to train it, {copies} numbers for each weight"
    memory = format_memory(device_memory(device))
    return OutOfMemory(
        f"{name} does not fit into the memory of this {device.type.upper()}, {memory}: {needed} are needed{purpose}; "
        f"{SMALLER_MODEL}"
    )


@contextmanager
def bounded_model(name: str) -> Iterator[None]:
    """Raise OutOfMemory as soon as the modules created in the block are too many."""
    modules = 0

    def add_module(module: nn.Module, key: str, child: nn.Module | None) -> None:
        nonlocal modules
        modules += 1
        if modules > MAX_MODULES:
            raise OutOfMemory(
                f"{name} has more than {MAX_MODULES:,} modules, the most that are built; make depth smaller"
            )

    hook = register_module_module_registration_hook(add_module)
    try:
        yield
    finally:
        hook.remove()


def format_memory(size: float) -> str:
    """A number of bytes with three digits and a unit."""
    power = min(5, max(0, int(math.log(max(1, size), 1024))))
    unit = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")[power]
    return f"{size / 1024**power:,.4g} {unit}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of any library means that memory could not be allocated."""
    is_kind = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return is_kind or (isinstance(error, RuntimeError | ValueError) and bool(_FAILED_ALLOCATION.search(str(error))))


def describe_request(error: BaseException) -> str:
    """`(16.4 GiB at once)`: the size of a failed allocation with a space before it, empty if the message has none."""
    match = _REQUESTED.search(str(error))
    if match is None:
        return ""
    # a number of bytes, or one with a unit already
    size = match[2]
    if match[1]:
        size = format_memory(int(match[1]))
    return f" ({size} at once)"


@contextmanager
def report_out_of_memory(work: str | Callable[[], str], remedy: str) -> Iterator[None]:
    """Convert failed allocations in the block into OutOfMemory: which `work` asked for memory, and the `remedy`.

    A function is asked for the work where it changes within the block."""
    try:
        yield
    except OutOfMemory:
        raise
    except (MemoryError, RuntimeError, ValueError) as error:
        if not is_out_of_memory(error):
            raise
        current_work = work if isinstance(work, str) else work()
        raise OutOfMemory(f"out of memory {current_work}{describe_request(error)}; {remedy}") from error


class MissingOperator(UserError):
    """A device lacks an operator of torch, or a type of numbers, that some work needs."""


def missing_need(error: BaseException) -> tuple[str, str] | None:
    """What an error of torch says is missing, an operator or a type, and on which device; None for other errors."""
    if not isinstance(error, NotImplementedError | TypeError | RuntimeError):
        return None
    if (match := _MISSING_OPERATOR.search(str(error))) is not None:
        need = match["need"] or match["other_need"]
        device = match["device"] or match["other_device"]
        return need, device.lower()
    if (match := _MISSING_TYPE.search(str(error))) is not None:
        return match["need"], match["device"].lower()
    return None


def describe_missing(error: BaseException, subject: str) -> str | None:
    """The sentence for an error of torch about something that its device lacks and `subject` needs; else None."""
    if (match := _NOT_DETERMINISTIC.search(str(error))) is not None:
        problem = f"{match['operator']} has no deterministic implementation, and {subject} needs it"
        return f"{problem} on this device; set deterministic=false"
    missing = missing_need(error)
    if missing is None:
        return None
    need, device = missing
    remedy = "use the device cpu"
    kind = KINDS.get(device)
    if kind is not None and kind.fallback is not None and "::" in need:
        remedy += f", or set {kind.fallback}=1, with which torch computes it on the CPU"
    return f"the device {device} has no {need} in this version of torch, which {subject} needs; {remedy}"


@contextmanager
def report_missing_operator(subject: str) -> Iterator[None]:
    """Convert torch's errors about what a device lacks into a MissingOperator: it names what `subject` needs."""
    try:
        yield
    except (NotImplementedError, TypeError, RuntimeError) as error:
        sentence = describe_missing(error, subject)
        if sentence is None:
            raise
        raise MissingOperator(sentence) from error
