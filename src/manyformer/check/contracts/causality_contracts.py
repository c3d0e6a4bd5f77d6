"""The contracts that no output depends on a later token, by exchanging later tokens and by gradients."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from manyformer.check.isolation import in_dtype
from manyformer.check.subject import Subject
from manyformer.check.trial import (
    FLOAT32_TOLERANCE,
    FLOAT64_TOLERANCE,
    ContractFinding,
    ContractTrial,
    Untestable,
    contract,
    differentiate,
    failed,
    passed,
)
from manyformer.model_summary import is_content_based
from manyformer.tasks import Inputs

MAX_CUTS = 16


@contract("causal", "changing later tokens does not change earlier outputs", needs=("causal", "per_token"))
def causal(trial: ContractTrial) -> ContractFinding:
    """Exchange one token, or all tokens from a cut on, and compare the outputs before the cut.

    They must be equal in every bit if the same operators run on the same shapes. If the operators depend on token
    values (`content_based`), rounding differs as well, and with the processor: then float64 and a tolerance decide. A
    third-party module does not declare this, and grouped products keep their shapes: then float64 decides where bits
    differ slightly.
    """
    inputs, length = trial.draw(1, trial.long_length), trial.long_length
    variants = []
    for cut in cut_positions(trial, length):
        tokens = trial.different_tokens(inputs.tokens[:, cut:])
        for stop in (cut + 1, length):
            changed = inputs.tokens.clone()
            changed[:, cut:stop] = tokens[:, : stop - cut]
            variants.append(Variant(cut, changed))
    sentence = f"exchanged tokens change no earlier output, at {length} tokens"
    exact_leak, same_operators = None, False
    if trial.subject.module is None or not is_content_based(trial.subject.module):
        exact_leak = measure_leak(trial, inputs, variants, tolerance=0.0)
        if exact_leak.variant is None:
            return leak_finding(exact_leak, sentence)
        same_operators = same_calls(trial.subject, inputs, inputs._replace(tokens=exact_leak.variant.tokens))
        if same_operators and (trial.subject.exact or not exact_leak.size <= FLOAT32_TOLERANCE * exact_leak.scale):
            return leak_finding(exact_leak, sentence)
    dtype = None if trial.subject.token_ids.device.type == "mps" else torch.float64
    try:
        with in_dtype(trial.subject.module, dtype):
            leak = measure_leak(trial, inputs, variants, tolerance=None)
    except (RuntimeError, TypeError) as error:
        if exact_leak is not None and same_operators:
            return leak_finding(exact_leak, sentence)
        raise Untestable(f"shapes depend on token values, and float64 raises {type(error).__name__}") from None
    if exact_leak is not None and same_operators and leak.dtype != torch.float64:
        return leak_finding(exact_leak, sentence)
    return leak_finding(leak, sentence.replace(", at", " but for rounding, at"))


def same_calls(subject: Subject, first: Inputs, second: Inputs) -> bool:
    """Whether the model runs the same operators on tensors of the same shapes for both inputs."""
    recorders = CallRecorder(), CallRecorder()
    for recorder, inputs in zip(recorders, (first, second)):
        with recorder:
            subject(inputs)
    return recorders[0].calls == recorders[1].calls


@final
class CallRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operator that torch dispatches, with the shapes of its tensor arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, tuple[torch.Size, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        self.calls.append((str(func), tuple(tensor.shape for tensor in tensors)))
        return func(*args, **(kwargs or {}))


class Variant(NamedTuple):
    """Tokens that differ from the original ones from position `cut` on."""

    cut: int
    tokens: Int[Tensor, "1 l"]


class Leak(NamedTuple):
    """The largest change of outputs before the cut (`size`), its bound, and the first output and variant beyond it.

    `scale` is the largest logit, and `effect` the largest change of outputs from the cut on.
    """

    dtype: torch.dtype
    scale: float
    allowed: float
    size: float = 0.0
    effect: float = 0.0
    first: int = 0
    variant: Variant | None = None


def measure_leak(trial: ContractTrial, inputs: Inputs, variants: Sequence[Variant], *, tolerance: float | None) -> Leak:
    """Measure the largest change before the cut; `tolerance` is relative to the logits, None that of their dtype."""
    logits = trial.subject(inputs).logits[0]
    if tolerance is None:
        tolerance = FLOAT64_TOLERANCE if logits.dtype == torch.float64 else FLOAT32_TOLERANCE
    scale = float(logits.abs().max())
    leak = Leak(logits.dtype, scale, tolerance * scale)
    for variant in variants:
        changes = (trial.subject(inputs._replace(tokens=variant.tokens)).logits[0] - logits).abs().amax(-1)
        leak = leak._replace(effect=max(leak.effect, float(changes[variant.cut :].max())))
        size = float(changes[: variant.cut].max())
        if is_larger_leak(size, leak.size):
            leak = leak._replace(size=size)
            # not `>`, which is False for a NaN
            beyond = (~(changes[: variant.cut] <= leak.allowed)).nonzero()
            if len(beyond):
                leak = leak._replace(first=int(beyond[0]), variant=variant)
    return leak


def leak_finding(leak: Leak, sentence: str) -> ContractFinding:
    """The finding of a measured leak; `sentence` is that of a model without one."""
    if leak.variant is not None:
        sentence = f"tokens from {leak.variant.cut} on change outputs from {leak.first} on by up to {leak.size:.1e}"
        sentence = f"the future leaks: {sentence} (and those they may change by {leak.effect:.1e})"
        return failed(sentence, leak.size, leak.allowed)
    if not leak.effect > leak.allowed:
        sentence = "changing a token changes no output at all, so causality cannot be shown"
        return failed(sentence, leak.size, leak.allowed)
    return passed(sentence, leak.size, leak.allowed)


@contract("causal-gradient", "no output has a gradient from a later token's embedding", needs=("causal", "per_token"))
def causal_gradient(trial: ContractTrial) -> ContractFinding:
    """d output i / d embedding j = 0 for j > i; discrete choices (hashes, top-k) are not tested by this."""
    inputs = trial.draw(1, trial.long_length)
    leak, effect, output_position, source_position = 0.0, 0.0, 0, 0
    for cut in cut_positions(trial, trial.long_length)[::-2]:
        sizes = differentiate(trial, lambda output=cut - 1: gradient_sizes(trial, inputs, output))  # type: ignore[misc]
        effect = max(effect, float(sizes[:cut].max()))
        if is_larger_leak(float(sizes[cut:].max()), leak):
            leak, output_position, source_position = float(sizes[cut:].max()), cut - 1, cut + int(sizes[cut:].argmax())
    if leak:
        sentence = f"output {output_position} has a gradient from token {source_position}, which comes later"
        return failed(sentence, leak, 0.0)
    if not effect:
        return failed("no output has a gradient from any token, so causality cannot be shown", 0.0, 0.0)
    return passed(f"gradients reach only the same and earlier tokens, at {trial.long_length} tokens", leak, 0.0)


def gradient_sizes(trial: ContractTrial, inputs: Inputs, output: int) -> Float[Tensor, " l"]:
    """The largest gradient of a random function of one output with respect to each token's embedding."""
    with embedding_leaves(inputs.tokens) as leaves:
        logits = trial.subject(inputs).logits[0, output]
    if not leaves:
        raise Untestable("no nn.Embedding looks up the tokens, so there is no embedding to differentiate by")
    weight = torch.randn(logits.shape, generator=trial.generator).to(logits)
    grads = torch.autograd.grad((logits * weight).sum(), leaves, allow_unused=True)
    sizes = [grad[0].abs().amax(-1) for grad in grads if grad is not None]
    return torch.stack(sizes).amax(0).cpu() if sizes else torch.zeros(inputs.tokens.shape[1])


def is_larger_leak(new: float, old: float) -> bool:
    """Whether `new` is the larger leak; a NaN is larger than every number."""
    return not math.isnan(old) and not new <= old


def cut_positions(trial: ContractTrial, length: int) -> list[int]:
    """Cut positions: the ends, and positions around multiples of powers of two, where chunks meet."""
    if length < 2:
        raise Untestable("one token has no later token")
    cuts = {length // 3, length // 2}
    for power in range(2, length.bit_length()):
        for multiple in (1 << power, (length - 1) >> power << power):
            cuts |= {multiple - 1, multiple, multiple + 1}
    middle = sorted(cut for cut in cuts if 1 < cut < length - 1)
    sampled = torch.randperm(len(middle), generator=trial.generator)[: MAX_CUTS - 2].tolist()
    return sorted({1, length - 1, *(middle[index] for index in sampled)})


@contextmanager
def embedding_leaves(tokens: Tensor) -> Iterator[list[Tensor]]:
    """A context in which the output of every `nn.Embedding` for exactly these tokens is a leaf with gradients."""
    leaves: list[Tensor] = []

    def hook(module: nn.Module, arguments: tuple[object, ...], output: Tensor) -> Tensor | None:
        token_ids = arguments[0] if isinstance(module, nn.Embedding) and arguments else None
        if not isinstance(token_ids, Tensor) or not torch.equal(token_ids, tokens):
            return None
        leaves.append(output.detach().requires_grad_())
        # a copy, because some models add positions in place, which a leaf forbids
        return leaves[-1].clone()

    # torch's annotation omits that a hook may replace the output
    handle = register_module_forward_hook(hook)  # type: ignore[arg-type]
    try:
        yield leaves
    finally:
        handle.remove()
