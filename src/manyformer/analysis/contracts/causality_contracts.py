"""The contracts that no output depends on a later token, by exchanging later tokens and by gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from manyformer.analysis.contracts.isolation import (
    has_float64,
    in_dtype,
    restoring_attributes,
    restoring_buffers,
    training_mode,
)
from manyformer.analysis.contracts.subject import Untestable
from manyformer.analysis.contracts.token_exchange import (
    Exchange,
    ExchangeTest,
    Forward,
    Leak,
    is_larger_leak,
    measure_leaks,
    record_calls,
    training_forward,
)
from manyformer.analysis.contracts.trial import (
    FLOAT32_TOLERANCE,
    ContractFinding,
    ContractTrial,
    contract,
    differentiate,
    failed,
    passed,
)
from manyformer.nn.model_inputs import Inputs
from manyformer.nn.runtime.training_hooks import run_post_step_updates

if TYPE_CHECKING:
    from jaxtyping import Float

MAX_CUTS = 16

PROBE_CUTS = 4
"""The number of cuts of the probe, whose sequences are longer than those in which every token is exchanged."""

NEEDS = ("causal", "per_token")


@contract("causal", "changing later tokens does not change earlier outputs", needs=NEEDS)
def causal(trial: ContractTrial) -> ContractFinding:
    """Exchange each token alone, and all tokens from a cut on, and compare the outputs before it.

    They must be equal in every bit if the same operators run on the same shapes. If the operators depend on token
    values (`content_based`), rounding differs as well, and with the processor: then float64 and a tolerance decide. A
    third-party module does not declare this, and grouped products keep their shapes: then float64 decides where bits
    differ slightly.
    """
    return _judge_leaks(trial, lambda inputs: trial.subject(inputs).logits, "exchanged tokens change no earlier output")


@contract("causal-training", "the same in training mode, with gradients and dropout", needs=(*NEEDS, "module"))
def causal_training(trial: ContractTrial) -> ContractFinding:
    """As `causal`, in training mode: each call begins with the same buffers and the same random numbers.

    The buffers are those of a new model, which its first batch may change, and then those after a first step, if that
    has changed any."""
    inputs = trial.draw(1, trial.length)
    other_inputs = trial.draw(1, trial.length)
    sentence = "in training mode, exchanged tokens change no earlier output"
    # the buffers of a new model first: k-means or a running norm may look at the whole first batch
    with training_forward(trial, inputs, other_inputs, after_step=False) as forward:
        finding = _judge_leaks(trial, forward, sentence)
    if not finding.passed or not _first_step_changes_buffers(trial, inputs):
        return finding
    with training_forward(trial, inputs, other_inputs) as forward:
        return _judge_leaks(trial, forward, sentence)


def _first_step_changes_buffers(trial: ContractTrial, inputs: Inputs) -> bool:
    """Whether a training step changes tensors without gradients, from which later calls would begin."""
    module = trial.subject.module
    assert module is not None
    # clones, because a step may also replace or resize a buffer
    initial = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with training_mode(module), restoring_buffers(module), restoring_attributes(module):
        trial.subject(inputs)
        run_post_step_updates(module, 1)
        updated = dict(module.named_buffers())
        return initial.keys() != updated.keys() or any(
            buffer.shape != initial[name].shape or not torch.equal(buffer, initial[name])
            for name, buffer in updated.items()
        )


def _judge_leaks(trial: ContractTrial, forward: Forward, sentence: str) -> ContractFinding:
    """The finding of all exchanges; `sentence` begins that of a model without a leak."""
    tests = _exchange_tests(trial)
    sentence = f"{sentence}, at {trial.long_length} tokens"
    if trial.probe_length is not None:
        sentence = f"{sentence}, and at {PROBE_CUTS} cuts of {trial.probe_length}"
    exact_leak = None
    same_operators = False
    if not trial.subject.content_based:
        # bits first: a tolerance would hide a leak that is small, such as a mean over the whole sequence
        exact_leak = measure_leaks(forward, tests, tolerance=0.0)
        if exact_leak.exchange is None:
            return _leak_finding(exact_leak, sentence)
        # other operators or other shapes round differently without any leak, as where experts get other numbers of
        # tokens
        calls, calls_after = (record_calls(forward, x) for x in (exact_leak.inputs, exact_leak.exchanged_inputs()))
        same_operators = calls == calls_after
        if same_operators and (trial.subject.exact or not exact_leak.size <= FLOAT32_TOLERANCE * exact_leak.scale):
            return _leak_finding(exact_leak, sentence)
    dtype = None
    if has_float64(trial.subject.token_ids.device):
        dtype = torch.float64
    try:
        with in_dtype(trial.subject.module, dtype):
            leak = measure_leaks(forward, tests, tolerance=None)
    # a kernel without float64, or a constant of float32 inside of the model
    except (RuntimeError, TypeError) as error:
        if exact_leak is None or trial.subject.exact:
            raise
        size = f"{exact_leak.size / exact_leak.scale:.1e} of the logits"
        sentence = f"earlier outputs change by {size}, and float64, which would tell rounding, raises"
        raise Untestable(f"{sentence} {type(error).__name__}") from None
    # the model computes in its own dtype whatever its weights have: float64 could not settle the difference
    if exact_leak is not None and same_operators and leak.dtype != torch.float64:
        return _leak_finding(exact_leak, sentence)
    return _leak_finding(leak, sentence.replace(", at", " but for rounding, at", 1))


def _exchange_tests(trial: ContractTrial) -> list[ExchangeTest]:
    """Every token after the first, alone, and all tokens from several cuts on; for the probe, from a few cuts on."""
    # a long source would take most of the time
    length = trial.long_length
    source = trial.length
    inputs = trial.draw(1, length, source=source)
    cuts = [
        *((start, start + 1) for start in range(1, length)),
        *((cut, length) for cut in cut_positions(trial, length)),
    ]
    tests = [ExchangeTest(inputs, [_draw_exchange(trial, inputs, *cut) for cut in cuts])]
    if (probe_length := trial.probe_length) is not None:
        inputs = trial.draw(1, probe_length, source=source)
        probe_cuts = cut_positions(trial, probe_length, PROBE_CUTS)
        tests.append(ExchangeTest(inputs, [_draw_exchange(trial, inputs, cut, probe_length) for cut in probe_cuts]))
    return tests


def _draw_exchange(trial: ContractTrial, inputs: Inputs, start: int, stop: int) -> Exchange:
    return Exchange(start, stop, trial.different_tokens(inputs.tokens[:, start:stop])[0])


def _leak_finding(leak: Leak, sentence: str) -> ContractFinding:
    """The finding of a measured leak; `sentence` is that of a model without one."""
    if leak.exchange is not None:
        sentence = f"{leak.exchange} outputs from {leak.first_output} on by up to {leak.size:.1e}"
        sentence = f"the future leaks: {sentence} (and those they may change by {leak.effect:.1e})"
        return failed(sentence, leak.size, leak.allowed)
    # a model that ignores its inputs leaks nothing, and shows nothing; `not >` also catches a NaN
    if not leak.effect > leak.allowed:
        sentence = "changing a token changes no output at all, so causality cannot be shown"
        return failed(sentence, leak.size, leak.allowed)
    return passed(sentence, leak.size, leak.allowed)


@contract("causal-gradient", "no output has a gradient from a later token's embedding", needs=NEEDS)
def causal_gradient(trial: ContractTrial) -> ContractFinding:
    """d output i / d embedding j = 0 for j > i; discrete choices (hashes, top-k) are not tested by this."""
    inputs = trial.draw(1, trial.long_length)
    leak = 0.0
    effect = 0.0
    output_position = 0
    source_position = 0
    # every other cut from the end: each one costs a backward pass over the whole sequence
    for cut in cut_positions(trial, trial.long_length)[::-2]:
        sizes = differentiate(trial, lambda output=cut - 1: gradient_sizes(trial, inputs, output))  # type: ignore[misc]
        effect = max(effect, float(sizes[:cut].max()))
        if is_larger_leak(float(sizes[cut:].max()), leak):
            leak = float(sizes[cut:].max())
            output_position = cut - 1
            source_position = cut + int(sizes[cut:].argmax())
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
    # random weights, because the gradient of a plain sum of logits may cancel
    weight = torch.randn(logits.shape, generator=trial.generator).to(logits)
    grads = torch.autograd.grad((logits * weight).sum(), leaves, allow_unused=True)
    sizes = [grad[0].abs().amax(-1) for grad in grads if grad is not None]
    if sizes:
        return torch.stack(sizes).amax(0).cpu()
    return torch.zeros(inputs.tokens.shape[1])


def cut_positions(trial: ContractTrial, length: int, count: int = MAX_CUTS) -> list[int]:
    """Cut positions: the ends, and positions around multiples of powers of two, where chunks meet."""
    if length < 2:
        raise Untestable("one token has no later token")
    # two cuts that are no power of two, for patterns whose blocks have other sizes
    cuts = {length // 3, length // 2}
    for power in range(2, length.bit_length()):
        for multiple in (1 << power, (length - 1) >> power << power):
            cuts |= {multiple - 1, multiple, multiple + 1}
    middle = sorted(cut for cut in cuts if 1 < cut < length - 1)
    sampled = torch.randperm(len(middle), generator=trial.generator)[: count - 2].tolist()
    return sorted({1, length - 1, *(middle[index] for index in sampled)})


@contextmanager
def embedding_leaves(tokens: Tensor) -> Iterator[list[Tensor]]:
    """A context in which the output of every `nn.Embedding` for exactly these tokens is a leaf with gradients."""
    leaves: list[Tensor] = []

    def hook(module: nn.Module, arguments: tuple[object, ...], output: Tensor) -> Tensor | None:
        token_ids = None
        if isinstance(module, nn.Embedding) and arguments:
            token_ids = arguments[0]
        # other tables look up positions, segments or sources, whose gradients say nothing of the tokens
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
