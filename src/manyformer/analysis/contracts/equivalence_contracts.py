"""The contracts that one model in several forms gives the same outputs.

Called again it agrees in every bit, whatever was called between, and so does a saved and loaded or rebuilt model; lower
precision changes outputs only slightly, never to NaN, and compilation not at all."""

import json
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from manyformer.analysis.contracts.isolation import has_float64, in_dtype
from manyformer.analysis.contracts.subject import Untestable, seed_everything
from manyformer.analysis.contracts.trial import ContractFinding, ContractTrial, contract, failed, passed
from manyformer.base.files.json_text import json_text
from manyformer.nn.model_inputs import Inputs
from manyformer.nn.runtime.torch_internals import compiler_backend


@contract("repeatable", "the same input twice, with the same seed, gives the same finite output")
def repeatable(trial: ContractTrial) -> ContractFinding:
    """Compare two calls with the same seed, which must agree in every bit."""
    inputs = trial.draw(2, trial.length)
    first, second = (trial.subject(inputs).logits for _ in range(2))
    if not torch.isfinite(first).all():
        share = float((~torch.isfinite(first)).float().mean())
        return failed(f"{share:.1%} of the logits are not finite", None, 0.0)
    difference = float((first - second).abs().max())
    if difference:
        return failed("not deterministic: two calls with the same input and seed differ", difference, 0.0)
    return passed("the same call twice gives the same bits", 0.0, 0.0)


@contract("seed", "in evaluation, another seed of the random generators changes nothing")
def seed(trial: ContractTrial) -> ContractFinding:
    """Compare two calls with different seeds: a model that draws a new pattern in each call scores by chance."""
    inputs = trial.draw(2, trial.length)
    first, second = _with_two_seeds(trial, inputs)
    difference = float((first - second).abs().max() / first.abs().max().clamp(min=1e-12))
    if difference:
        sentence = f"random numbers are drawn in evaluation: another seed changes the logits by {difference:.1e}"
        return failed(sentence, difference, 0.0)
    return passed("another seed gives the same bits", 0.0, 0.0)


def largest_difference(actual: Tensor, expected: Tensor) -> float:
    """The largest absolute difference of two tensors."""
    return float((actual - expected).abs().max())


def _with_two_seeds(trial: ContractTrial, inputs: Inputs) -> tuple[Tensor, Tensor]:
    seed = trial.subject.seed
    first = trial.subject(inputs).logits
    try:
        trial.subject.seed = seed + 1
        return first, trial.subject(inputs).logits
    finally:
        trial.subject.seed = seed


@contract("traceless", "calls leave no trace in the model")
def traceless(trial: ContractTrial) -> ContractFinding:
    """Repeat a long call after a short one and a few decoding steps: it must agree with the first in every bit."""
    inputs = trial.draw(1, trial.long_length)
    first = trial.subject(inputs).logits
    # a cache of positions, masks or plans that grew with the long call must not be cut by a short one
    short = trial.draw(1, trial.round_length(max(trial.long_length // 8, 4)))
    trial.subject(short)
    if not {"incremental_decoding", "per_token"} & trial.subject.not_promised.keys():
        trial.run_in_chunks(short, [short.tokens.shape[1] - 1, 1])
    difference = float((trial.subject(inputs).logits - first).abs().max())
    if difference:
        sentence = f"a call with {short.tokens.shape[1]} tokens changes what {trial.long_length} tokens give"
        return failed(sentence, difference, 0.0)
    return passed("a long call gives the same bits after short calls and steps", 0.0, 0.0)


HALF_TOLERANCE = 0.05
"""The largest error in bfloat16 (8 bits), relative to the logits: a dozen roundings of 1/256 each."""

SINGLE_TOLERANCE = 1e-4
COMPILED_TOLERANCE = 1e-4


@contract("float64", "float32 is near float64", needs=("module",))
def float64(trial: ContractTrial) -> ContractFinding:
    """Compare float32 with float64 for the same weights: the difference is the rounding of float32."""
    if not has_float64(trial.subject.token_ids.device):
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
    if not torch.equal(*_with_two_seeds(trial, inputs)):
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
    # torch falls back to eager without a word, and eager equals eager
    backend = CountingBackend(torch_backend)

    def forward(inputs: Inputs) -> Tensor:
        return trial.subject.forward(inputs).logits

    torch.compiler.reset()
    try:
        with warnings.catch_warnings():
            # warnings about tracing are no failure
            warnings.simplefilter("ignore")
            compiled_forward = torch.compile(forward, backend=backend)
            # a second length makes torch compile for sizes that vary
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


@contract("saving", "a saved and loaded model gives the same bits", needs=("saving",))
def saving(trial: ContractTrial) -> ContractFinding:
    """Compare a saved and loaded model, whose outputs must agree in every bit and whose spec must be equal."""
    inputs = trial.draw(2, trial.length)
    loaded = trial.subject.saved_copy()
    difference = largest_difference(trial.subject(inputs).logits, loaded(inputs).logits)
    # not `> 0`, which is False for a NaN
    if difference != 0:
        return failed(f"the loaded model differs by {difference:.1e}", difference, 0.0)
    if loaded.spec != trial.subject.spec:
        return failed(f"the loaded model has the spec {loaded.spec}, not {trial.subject.spec}")
    return passed("the loaded model gives the same bits", difference, 0.0)


@contract("spec", "the spec is sufficient to build the model again", needs=("spec",))
def spec(trial: ContractTrial) -> ContractFinding:
    """Build the model from its recipe and keywords after a round trip through JSON; names and shapes must be equal."""
    original = trial.subject
    assert original.module is not None
    keywords = original.spec.keywords
    try:
        # as a saved model does it: tuples and numbers may come back as other types
        restored = json.loads(json_text(keywords))
    except TypeError as error:
        return failed(f"the keywords are not JSON: {error}")
    if changed := sorted(name for name in keywords if restored[name] != keywords[name]):
        return failed(f"the keyword {changed[0]} ({keywords[changed[0]]!r}) does not survive JSON")
    rebuilt = original.rebuild(restored)
    assert rebuilt.module is not None
    if rebuilt.spec != original.spec:
        return failed(f"building {original.spec} gives {rebuilt.spec}")
    shapes = _tensor_shapes(original.module)
    rebuilt_shapes = _tensor_shapes(rebuilt.module)
    # names and shapes alone: values are random in a new model
    if different := shapes.items() ^ rebuilt_shapes.items():
        name = min(name for name, _ in different)
        return failed(f"{name} is {shapes.get(name)} in this model and {rebuilt_shapes.get(name)} in the rebuilt one")
    return passed(
        f"{len(shapes)} tensors of the same names and shapes from {original.spec.recipe} and {len(restored)} keywords"
    )


def _tensor_shapes(module: nn.Module) -> dict[str, torch.Size]:
    tensors: dict[str, Tensor] = module.state_dict()
    return {name: tensor.shape for name, tensor in tensors.items()}
