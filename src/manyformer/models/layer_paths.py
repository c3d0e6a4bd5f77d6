"""Which path computes each layer of a model: in training, for a prompt, and for one more token after it."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from manyformer.models.embedding import SourceEmbedding
from manyformer.models.generative_model import GenerativeModel
from manyformer.nn.core import Layer
from manyformer.nn.kernels.kernel import Kernel, KernelCall, named_kernels
from manyformer.nn.residual import Residual
from manyformer.nn.streams import StreamLayer

PACKAGE = Path(__file__).parents[1]
NAMES_SHOWN = 2
FORWARD = "forward"
OWN_STEP = "its own one-token step"


class LayerPath(NamedTuple):
    """How one layer is computed in training, for a prompt (prefill) and for one more token (step), and in which file.

    The path of a layer with a kernel is the kernel's, and so is the file. A phase that the layer does not have is "".
    """

    name: str
    kind: str
    file: str
    training: str
    prefill: str
    step: str


class Explanation(dict[str, str]):
    """For each kernel by name, which path computes it for the inputs and why; printed, the paths of all layers.

    `undecoded` says why a model that generates cannot continue these inputs; "" for all others. `stream` names the
    modules whose output is the residual stream, in their order: hooks on them read and edit it."""

    def __init__(
        self, kernels: dict[str, str], layers: Sequence[LayerPath], undecoded: str = "", stream: Sequence[str] = ()
    ) -> None:
        super().__init__(kernels)
        self.layers = tuple(layers)
        self.stream = tuple(stream)
        self.undecoded = undecoded

    def __str__(self) -> str:
        names: dict[tuple[str, ...], list[str]] = {}
        for layer in self.layers:
            # layers that differ in nothing but their names are one block
            names.setdefault(layer[1:], []).append(layer.name)
        blocks = []
        for (kind, file, *paths), alike in names.items():
            others = len(alike) - NAMES_SHOWN
            title = ", ".join(alike[:NAMES_SHOWN]) + (f" and {others} more" if others > 0 else "")
            phases = zip(("training", "prefill", "step"), paths, strict=True)
            lines = [f"  {phase:<9} {path}" for phase, path in phases if path]
            blocks.append("\n".join([f"{title}: {kind}, {file}", *lines]))
        if self.undecoded:
            blocks.append(f"no prompt and no step: {self.undecoded}")
        return "\n".join(blocks)


class _PhasePaths(NamedTuple):
    """The path of each kernel that was called, by phase; `decodes` says that there is a prompt and a step at all."""

    training: dict[str, str]
    prefill: dict[str, str]
    step: dict[str, str]
    decodes: bool
    undecoded: str = ""


def explain_paths(model: nn.Module, inputs: Sequence[Any]) -> Explanation:
    """The paths of the kernels in `model(*inputs)`, and those of all layers in each phase.

    The model computes the inputs four times; its buffers, its mode and the random numbers of the CPU stay as they were.
    """
    with _undisturbed(model):
        with torch.no_grad():
            kernels = _kernel_paths(model, lambda: model(*inputs))
        paths = _phase_paths(model, inputs)
        # branches whose outputs a stack writes itself are not called as modules
        written = {part for module in model.modules() if isinstance(module, StreamLayer) for part in module.modules()}
        stream = [
            name
            for name, module in model.named_modules()
            if isinstance(module, Residual | SourceEmbedding) and module not in written
        ]
        return Explanation(kernels, list(_layer_paths(model, paths)), paths.undecoded, stream)


def _layer_paths(model: nn.Module, paths: _PhasePaths) -> Iterator[LayerPath]:
    """The layers without layers inside them, in the order of the model."""
    by_forward: list[str] = []
    decoding_layers: set[nn.Module] = set()
    if isinstance(model, GenerativeModel) and paths.decodes:
        by_forward = model.layers_without_step()
        decoding_layers = set(model.decoder_stack.modules())
    for name, layer in model.named_modules():
        if not isinstance(layer, Layer) or any(
            isinstance(part, Layer) for part in layer.modules() if part is not layer
        ):
            continue
        kernels = {f"{name}.{inner}" if name else inner: kernel for inner, kernel in named_kernels(layer).items()}
        # the outermost; a layer that has none, or that does not call it, has one path
        path_name = next((kernel_name for kernel_name in kernels if kernel_name in paths.training), "")
        computing = kernels.get(path_name, layer)
        default = "" if path_name else FORWARD
        step = ""
        if layer in decoding_layers:
            is_by_forward = any(f"{name}.".startswith(f"{other}.") for other in by_forward)
            if is_by_forward:
                step = paths.step.get(path_name, default)
            else:
                step = OWN_STEP
        yield LayerPath(
            name,
            type(computing).__name__,
            _file_of(computing),
            paths.training.get(path_name, default),
            paths.prefill.get(path_name, default if paths.decodes else ""),
            step,
        )


def _phase_paths(model: nn.Module, inputs: Sequence[Any]) -> _PhasePaths:
    """What kernels say of their calls in training, and of a prompt and one more token where the model reads tokens."""
    with torch.enable_grad():
        training = _kernel_paths(model.train(), lambda: model(*inputs))
    arguments = [each for each in inputs if each is not None]
    if not isinstance(model, GenerativeModel) or not _are_tokens(arguments[-1]):
        return _PhasePaths(training, {}, {}, decodes=False)
    decoder: Any = model.eval()
    sequences = 2 if hasattr(decoder, "encode") else 1
    if len(arguments) != sequences:
        return _PhasePaths(training, {}, {}, decodes=False, undecoded="the inputs are more than the tokens of a text")
    tokens = arguments[-1]
    # all tokens but the last, which is the one more token of the step
    prompt = tokens[:, : max(1, tokens.shape[1] - 1)]
    last = tokens[:, -1:]
    state = None
    memory = None

    def read_prompt() -> None:
        nonlocal state, memory
        if len(arguments) > 1:
            memory = decoder.encode(arguments[0])
        _, state = decoder.forward_token(prompt, decoder.init_state(len(tokens)), memory)

    with torch.no_grad():
        try:
            prefill = _kernel_paths(model, read_prompt)
            step = _kernel_paths(model, lambda: decoder.forward_token(last, state, memory))
        except (ValueError, NotImplementedError) as error:
            # layers that look at the whole text refuse a state
            return _PhasePaths(training, {}, {}, decodes=False, undecoded=str(error))
    return _PhasePaths(training, prefill, step, decodes=True)


def _are_tokens(value: Any) -> bool:
    """Whether an input is rows of token ids."""
    return isinstance(value, Tensor) and value.ndim == 2 and not value.is_floating_point()


def _kernel_paths(model: nn.Module, run: Callable[[], object]) -> dict[str, str]:
    """What each kernel of the model says of its last call while `run` computes."""
    paths: dict[str, str] = {}

    def record(name: str, kernel: Kernel, _: nn.Module, arguments: tuple[KernelCall]) -> None:
        # asked before the call, with what the kernel is called with
        paths[name] = kernel.explain(*arguments)

    handles = [
        kernel.register_forward_pre_hook(partial(record, name, kernel)) for name, kernel in named_kernels(model).items()
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return paths


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Restore after the block what a forward pass in training changes: buffers, the mode, random numbers."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in buffers and buffer.shape == buffers[name].shape:
                    # a buffer that has grown, such as a table, holds the same numbers as before and some more
                    buffer.copy_(buffers[name])
        for module, mode in modes.items():
            module.training = mode


def _file_of(module: nn.Module) -> str:
    """The file of a module's class, from the folder of the package where it is one of ours."""
    path = Path(inspect.getfile(type(module)))
    if path.is_relative_to(PACKAGE):
        return str(path.relative_to(PACKAGE))
    return str(path)
