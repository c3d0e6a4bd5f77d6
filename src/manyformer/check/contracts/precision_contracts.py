"""The contracts that lower precision changes outputs only slightly, never to NaN, and compilation not at all."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from manyformer.check.isolation import in_dtype
from manyformer.check.subject import seed_everything
from manyformer.check.trial import ContractFinding, ContractTrial, Untestable, contract, failed
from manyformer.system.devices import device_kind
from manyformer.tasks import Inputs
from manyformer.torch_internals import compiler_backend

HALF_TOLERANCE = 0.05
"""The largest error in bfloat16 (8 bits), relative to the logits: a dozen roundings of 1/256 each."""

SINGLE_TOLERANCE = COMPILED_TOLERANCE = 1e-4


@contract("float64", "float32 is near float64", needs=("module",))
def float64(trial: ContractTrial) -> ContractFinding:
    """Compare float32 with float64 for the same weights: the difference is the rounding of float32."""
    if not device_kind(trial.subject.token_ids.device).has_float64:
        raise Untestable("this device has no float64")
    inputs = _draw_inputs(trial)
    with in_dtype(trial.subject.module, torch.float32):
        single = trial.subject(inputs).logits
    with in_dtype(trial.subject.module, torch.float64):
        double = trial.subject(inputs).logits
    return _compare_precision(single, double, SINGLE_TOLERANCE, "float32 against float64")


@contract("bfloat16", "bfloat16 autocast is near float32, and finite", needs=("module",))
def bfloat16(trial: ContractTrial) -> ContractFinding:
    """Compare autocast to bfloat16, as in training on an accelerator, with float32."""
    return _autocast(trial, torch.bfloat16, HALF_TOLERANCE)


@contract("float16", "float16 autocast is near float32, and finite", needs=("module",))
def float16(trial: ContractTrial) -> ContractFinding:
    """Compare autocast to float16, whose narrow range a mask bias of -1e5 overflows, with float32."""
    if trial.subject.token_ids.device.type == "cpu":
        # measured: a CPU has no float16 products and emulates them
        raise Untestable("half-precision products are a hundred times slower on a CPU; runs on an accelerator")
    return _autocast(trial, torch.float16, HALF_TOLERANCE)


def _autocast(trial: ContractTrial, dtype: torch.dtype, tolerance: float) -> ContractFinding:
    inputs = _draw_inputs(trial)
    with in_dtype(trial.subject.module, torch.float32):
        single = trial.subject(inputs).logits
        with torch.autocast(trial.subject.token_ids.device.type, dtype):
            half = trial.subject(inputs).logits
    return _compare_precision(half, single, tolerance, f"{str(dtype).removeprefix('torch.')} against float32")


def _draw_inputs(trial: ContractTrial) -> Inputs:
    """Random inputs, for models that draw no random numbers themselves, which would differ between precisions."""
    inputs = trial.draw(2, trial.length)
    seed = trial.subject.seed
    first = trial.subject(inputs).logits
    trial.subject.seed = seed + 1
    second = trial.subject(inputs).logits
    trial.subject.seed = seed
    if not torch.equal(first, second):
        raise Untestable("the model draws random numbers, which differ in another precision")
    return inputs


def _compare_precision(actual: Tensor, expected: Tensor, tolerance: float, label: str) -> ContractFinding:
    """Compare the root mean square of the difference with the standard deviation of the logits."""
    actual = actual.cpu().double()
    expected = expected.cpu().double()
    if not torch.isfinite(actual).all():
        return failed(f"{label}: not finite", float("nan"), tolerance)
    spread = (expected - expected.mean()).square().mean().sqrt().clamp(min=1e-12)
    measured = float((actual - expected).square().mean().sqrt() / spread)
    sentence = f"{label}: {measured:.1e} of the logits' standard deviation"
    return ContractFinding(measured <= tolerance, sentence, measured, tolerance)


class CountingBackend:
    """A backend of `torch.compile` that counts graphs and nodes; a function that falls back to eager has none."""

    def __init__(self, backend: Callable[..., Any]) -> None:
        self.backend = backend
        self.graphs = 0
        self.nodes = 0

    def __call__(self, graph: torch.fx.GraphModule, examples: list[Tensor]) -> Any:
        self.graphs += 1
        self.nodes += len(graph.graph.nodes)
        return self.backend(graph, examples)


@contract("compile", "compiled == eager")
def compiled(trial: ContractTrial) -> ContractFinding:
    """Compare compiled with eager outputs for two lengths.

    The backend "aot_eager" traces and differentiates as compilation does but runs torch's operators, within seconds.
    "inductor" also generates code, which needs a C++ compiler or a GPU and up to a minute. All compiled functions of
    the process are reset, because torch stops compiling a function that it has recompiled too often.
    """
    torch_backend = compiler_backend(trial.backend)
    if torch_backend is None:
        raise Untestable(f"torch {torch.__version__} does not show its backends, so that graphs cannot be counted")
    backend = CountingBackend(torch_backend)

    def forward(inputs: Inputs) -> Tensor:
        return trial.subject.forward(inputs).logits

    torch.compiler.reset()
    try:
        with warnings.catch_warnings():
            # warnings about tracing are no failure
            warnings.simplefilter("ignore")
            compiled_forward = torch.compile(forward, backend=backend)
            for length in (trial.length, trial.round_length(trial.length - 1)):
                inputs = trial.draw(2, length)
                seed_everything(0)
                actual = compiled_forward(inputs)
                seed_everything(0)
                trial.compare(actual, forward(inputs), f"compiled, {length} tokens")
    finally:
        torch.compiler.reset()
    if not backend.graphs:
        return failed("torch compiled no graph")
    sentence = f"{trial.backend}: {backend.graphs} graphs of {backend.nodes} nodes give the same as eager"
    return trial.finding(sentence, COMPILED_TOLERANCE)
