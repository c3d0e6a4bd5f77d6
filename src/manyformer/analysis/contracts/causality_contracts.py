"""The contracts that no output depends on a later token, by exchanging later tokens and by gradients."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Sequence
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
    OperatorCall,
    is_larger_leak,
    measure_leaks,
    record_calls,
    training_forward,
)
from manyformer.analysis.contracts.trial import (
    FLOAT64_TOLERANCE,
    ContractFinding,
    ContractTrial,
    contract,
    differentiate,
    failed,
    join_numbers,
    passed,
)
from manyformer.nn.model_inputs import Inputs
from manyformer.nn.runtime.training_hooks import run_post_step_updates

if TYPE_CHECKING:
    from jaxtyping import Float

MAX_CUTS = 16

CAUSALITY_SECONDS = 20.0
"""The time for the exchanges of one contract; a model that takes longer for all of them gets fewer."""

PROBE_CUTS = 4
"""The number of cuts of the probe, whose sequences are longer than those in which every token is exchanged."""

SHORT_LENGTHS = (3, 13, 33)
"""Short and odd lengths: the padding and the borders of a model that leaks at these alone are no powers of two."""

SHORT_CUTS = 4

CHOOSING = re.compile("sort|topk|grouped|arg(max|min)|nonzero|bincount|unique")
"""Operators whose results, and with them all that follows, may change in steps with the rounding of their inputs."""

BFLOAT16_ROUNDING = 1 / 128
CAST_ROUNDING = 8 * torch.finfo(torch.float32).eps
"""Differences up to which are rounding, relative to the logits: of 8 bits, and of some numbers in float32."""

BEYOND = 9
"""The number of tokens beyond a model's longest sequence in a test that such a model may refuse."""

NEEDS = ("causal", "per_token")


@contract("causal", "changing later tokens does not change earlier outputs", needs=NEEDS)
def causal(trial: ContractTrial) -> ContractFinding:
    """Exchange each token alone, and all tokens from a cut on, and compare the outputs before it.

    They must be equal in every bit if the same operators run on the same shapes. If the operators depend on token
    values (`content_based`), rounding differs as well, and with the processor: then float64 and a tolerance decide. A
    third-party module does not declare this, and grouped products keep their shapes: then float64 decides where bits
    differ slightly.
    """

    def forward(inputs: Inputs) -> Float[Tensor, "b l v"]:
        return trial.subject(inputs).logits

    finding = _judge_leaks(trial, forward, "exchanged tokens change no earlier output")
    if not finding.passed or (beyond := _length_beyond(trial)) is None:
        return finding
    cuts = [1, trial.long_length - 1, trial.long_length, beyond - 1]
    try:
        leak = measure_leaks(forward, [_draw_later(trial, beyond, cuts)], tolerance=None)
    # as it should: longer sequences are not allowed
    except Exception:
        return finding
    if leak.exchange is None:
        return finding
    note = f"{beyond} tokens, beyond its limit, do not raise, and there the future leaks by {leak.size:.1e}"
    return finding._replace(sentence=f"{finding.sentence}; but {note}")


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
    exact_leak = None
    bits_decide = trial.subject.exact and trial.subject.bits_decide
    if not trial.subject.content_based:
        # bits first: a tolerance would hide a leak that is small, such as a mean over the whole sequence
        exact_leak = measure_leaks(forward, tests, tolerance=0.0)
        if exact_leak.exchange is None:
            return _leak_finding(exact_leak, tests, sentence)
        # other operators or other shapes round differently without any leak, as where experts get other numbers of
        # tokens
        calls, calls_after = (record_calls(forward, x) for x in (exact_leak.inputs, exact_leak.exchanged_inputs()))
        same_operators = calls == calls_after
        rounding = trial.subject.float32_tolerance * exact_leak.scale
        bits_alone = bits_decide or trial.subject.module is None
        if same_operators and (bits_alone or not exact_leak.size <= rounding):
            return _leak_finding(exact_leak, tests, sentence)
    sentence = f"{sentence} but for rounding"
    dtype = None
    if has_float64(trial.subject.token_ids.device):
        dtype = torch.float64
    try:
        with in_dtype(trial.subject.module, dtype):
            tolerance = None if bits_decide else _rounding_of_casts(trial, record_calls(forward, tests[0].inputs))
            leak = measure_leaks(forward, tests, tolerance=tolerance)
    # a kernel without float64, or a constant of float32 inside of the model
    except (RuntimeError, TypeError) as error:
        if exact_leak is None or bits_decide:
            raise
        if not trial.subject.float64_decides:
            leak = measure_leaks(forward, tests, tolerance=trial.subject.float32_tolerance)
            return _leak_finding(leak, tests, sentence)
        size = f"{exact_leak.size / exact_leak.scale:.1e} of the logits"
        reason = f"earlier outputs change by {size}, and float64, which would tell rounding, raises"
        raise Untestable(f"{reason} {type(error).__name__}") from None
    return _leak_finding(leak, tests, sentence)


def _rounding_of_casts(trial: ContractTrial, calls: Sequence[OperatorCall]) -> float | None:
    """How far logits may differ by rounding, relative to the largest, if the weights are in float64.

    None if everything is in float64. Models cast their logits, norms and tables to float32 whatever the weights have.
    """
    dtypes = {call.dtype for call in calls}
    transformed = any("fft" in call.name and call.dtype in (torch.float32, torch.complex64) for call in calls)
    if transformed or dtypes & {torch.bfloat16, torch.float16}:
        return trial.subject.float32_tolerance
    if torch.float32 in dtypes:
        return CAST_ROUNDING
    return None


def _exchange_tests(trial: ContractTrial) -> list[ExchangeTest]:
    """Every token after the first, alone, and all tokens from several cuts on; for the probe, from a few cuts on."""
    length = trial.long_length
    single_tokens = [(start, start + 1) for start in range(1, length)]
    all_later_tokens = [(cut, length) for cut in cut_positions(trial, length)]
    tests = [_draw_test(trial, length, [*single_tokens, *all_later_tokens])]
    if (probe_length := trial.probe_length) is not None:
        tests.append(_draw_later(trial, probe_length, cut_positions(trial, probe_length, PROBE_CUTS)))
    for short in shorter_lengths(trial, (*SHORT_LENGTHS, length - 1, 2 + trial.random_int(length - 2))):
        cuts = cut_positions(trial, short, SHORT_CUTS)
        tests.append(_draw_later(trial, short, cuts)._replace(may_raise=True))
    return _within_budget(trial, tests)


def _within_budget(trial: ContractTrial, tests: list[ExchangeTest]) -> list[ExchangeTest]:
    """The tests with as many of their exchanges, at least two each, as a slow model can be called for in time."""
    # one row and a batch without exchanges come first
    tokens = sum((len(test.exchanges) + 2) * test.inputs.tokens.shape[1] for test in tests)
    seconds = tokens * trial.subject.seconds_per_token
    if seconds <= CAUSALITY_SECONDS:
        return tests
    kept = []
    for test in tests:
        count = max(math.ceil(len(test.exchanges) * CAUSALITY_SECONDS / seconds), 2)
        chosen = torch.randperm(len(test.exchanges), generator=trial.generator)[:count].sort().values.tolist()
        exchanges = [test.exchanges[index] for index in chosen]
        kept.append(test._replace(exchanges=exchanges, omitted=len(test.exchanges) - len(exchanges)))
    return kept


def shorter_lengths(trial: ContractTrial, lengths: Sequence[int]) -> list[int]:
    """Those of the lengths, rounded as the subject needs it, that are shorter than `long_length`, in order."""
    rounded = {trial.round_length(length) for length in lengths}
    return sorted(length for length in rounded if 1 < length < trial.long_length)


def _length_beyond(trial: ContractTrial) -> int | None:
    """A length just beyond the longest sequence of the subject, if that is what is tested."""
    limit = trial.subject.max_length
    multiple = trial.subject.length_multiple
    # an accelerator does not raise at an index out of range, it fails for the rest of the process
    on_cpu = trial.subject.token_ids.device.type == "cpu"
    if limit is None or trial.long_length + multiple <= limit or not on_cpu:
        return None
    return trial.long_length + trial.round_length(max(BEYOND, multiple))


def _draw_later(trial: ContractTrial, length: int, cuts: Sequence[int]) -> ExchangeTest:
    """A test that exchanges all tokens from each of the cuts on."""
    return _draw_test(trial, length, [(cut, length) for cut in cuts])


def _draw_test(trial: ContractTrial, length: int, ranges: Sequence[tuple[int, int]]) -> ExchangeTest:
    # a long source would take most of the time
    inputs = trial.draw(1, length, source=trial.length)
    exchanges: list[Exchange] = []
    for index, (start, stop) in enumerate(ranges):
        new_tokens = trial.different_tokens(inputs.tokens[:, start:stop])[0]
        # every other time one earlier token repeats: it crowds out its like where experts have little room
        if stop - start > 2 and index % 2:
            new_tokens[:] = inputs.tokens[0, trial.random_int(start)]
        exchanges.append(Exchange(start, stop, new_tokens))
    return ExchangeTest(inputs, exchanges)


def _leak_finding(leak: Leak, tests: Sequence[ExchangeTest], sentence: str) -> ContractFinding:
    """The finding of a measured leak; `sentence` begins that of a model without one."""
    if leak.exchange is not None:
        sentence = f"{leak.exchange} outputs from {leak.first_output} on by up to {leak.size:.1e}"
        sentence = f"the future leaks: {sentence} (and those they may change by {leak.effect:.1e})"
        sentence = f"{sentence}, in {leak.inputs.tokens.shape[1]} tokens"
        return failed(sentence, leak.size, leak.allowed)._replace(evidence=leak)
    # a model that ignores its inputs leaks nothing, and shows nothing; `not >` also catches a NaN
    if not leak.effect > leak.allowed:
        sentence = "changing a token changes no output at all, so causality cannot be shown"
        return failed(sentence, leak.size, leak.allowed)
    return passed(f"{sentence}, {_describe_lengths(tests, leak.refused)}", leak.size, leak.allowed)


def _describe_lengths(tests: Sequence[ExchangeTest], refused: Sequence[int]) -> str:
    """The lengths that were tested, and those at which the model raised."""
    whole, *others = (test.inputs.tokens.shape[1] for test in tests)
    text = f"at {whole} tokens"
    if tests[0].omitted:
        text = (
            f"{text} ({tests[0].omitted} of {tests[0].omitted + len(tests[0].exchanges)} exchanges left out for time)"
        )
    tested = sorted(length for length in others if length not in refused)
    if tested:
        text = f"{text}, and at a few cuts of {join_numbers(tested)}"
    if refused_shorter := [length for length in refused if length < whole]:
        text = f"{text} ({join_numbers(refused_shorter)} tokens raise)"
    return text


@contract("causal-autocast", "the same as `causal` in bfloat16 autocast", needs=NEEDS)
def causal_autocast(trial: ContractTrial) -> ContractFinding:
    """Exchange each token of a short sequence, and all tokens from a few cuts of a long one on, in bfloat16 autocast.

    Masks and scores that are right in float32 may be wrong in 8 bits. Where other operators run, or tokens are sorted
    or chosen, 8 bits are too few to tell rounding from a leak, unless most exchanges of a single token show it.
    """
    short = trial.round_length(trial.length // 2)
    tests = [_draw_test(trial, short, [(start, start + 1) for start in range(1, short)])]
    if trial.long_length > short:
        tests.append(_draw_later(trial, trial.long_length, cut_positions(trial, trial.long_length, PROBE_CUTS)))

    def forward(inputs: Inputs) -> Float[Tensor, "b l v"]:
        # torch warns where it takes a slower kernel, which is no failure
        with warnings.catch_warnings(), torch.autocast(trial.subject.token_ids.device.type, torch.bfloat16):
            warnings.simplefilter("ignore")
            return trial.subject(inputs).logits

    leak = measure_leaks(forward, tests, tolerance=0.0)
    sentence = "in bfloat16 autocast, exchanged tokens change no earlier output"
    if leak.exchange is not None:
        calls, calls_after = (record_calls(forward, inputs) for inputs in (leak.inputs, leak.exchanged_inputs()))
        may_choose = calls != calls_after or any(CHOOSING.search(call.name) for call in calls)
        if may_choose and not _most_exchanges_leak(forward, tests[0]):
            raise Untestable("tokens are sorted or chosen, and 8 bits are too few to tell rounding from a leak")
        if not (trial.subject.exact and trial.subject.bits_decide) and leak.size <= BFLOAT16_ROUNDING * leak.scale:
            no_leak = leak._replace(allowed=BFLOAT16_ROUNDING * leak.scale, exchange=None)
            return _leak_finding(no_leak, tests, f"{sentence} but for rounding")
    return _leak_finding(leak, tests, sentence)


def _most_exchanges_leak(forward: Forward, test: ExchangeTest) -> bool:
    """Whether more than half of the exchanges, each alone, change an earlier output by more than rounding would."""
    alone = [test._replace(exchanges=[exchange]) for exchange in test.exchanges]
    leaks = [measure_leaks(forward, [exchange], tolerance=BFLOAT16_ROUNDING) for exchange in alone]
    return 2 * sum(leak.exchange is not None for leak in leaks) > len(leaks)


@contract("causal-gradient", "no output has a gradient from a later token's embedding", needs=NEEDS)
def causal_gradient(trial: ContractTrial) -> ContractFinding:
    """d output i / d embedding j = 0 for j > i; discrete choices (hashes, top-k) are not tested by this."""
    finding = _judge_exactly(trial, trial.long_length)
    # what reaches beyond the length of a short sequence alone shows in no long one
    if not finding.passed or trial.length == trial.long_length:
        return finding
    short = _judge_exactly(trial, trial.length)
    if not short.passed:
        return short
    return finding._replace(sentence=f"{finding.sentence} and at {trial.length}")


def _judge_exactly(trial: ContractTrial, length: int) -> ContractFinding:
    """The finding of gradients at one length, in float64 where a rounding decides."""
    inputs = trial.draw(1, length)
    finding = _judge_gradients(trial, inputs, tolerance=0.0)
    if finding.passed or (trial.subject.exact and trial.subject.bits_decide):
        return finding
    # a Fourier transform rounds, and its gradients reach everywhere
    if not trial.subject.float64_decides:
        return _judge_gradients(trial, inputs, tolerance=trial.subject.float32_tolerance)
    with in_dtype(trial.subject.module, torch.float64):
        return _judge_gradients(trial, inputs, tolerance=FLOAT64_TOLERANCE)


def _judge_gradients(trial: ContractTrial, inputs: Inputs, *, tolerance: float) -> ContractFinding:
    """The finding of gradients; `tolerance` is relative to the largest one of earlier tokens."""
    length = inputs.tokens.shape[1]
    leak = 0.0
    effect = 0.0
    output_position = 0
    source_position = 0
    # every other cut from the end: each one costs a backward pass over the whole sequence
    for cut in cut_positions(trial, length)[::-2]:
        sizes = differentiate(trial, lambda output=cut - 1: gradient_sizes(trial, inputs, output))  # type: ignore[misc]
        effect = max(effect, float(sizes[:cut].max()))
        if is_larger_leak(float(sizes[cut:].max()), leak):
            leak = float(sizes[cut:].max())
            output_position = cut - 1
            source_position = cut + int(sizes[cut:].argmax())
    # not `>`, which is False for a NaN
    if not leak <= tolerance * effect:
        sentence = f"output {output_position} has a gradient from token {source_position}, which comes later"
        return failed(sentence, leak, tolerance * effect)
    if not effect:
        return failed("no output has a gradient from any token, so causality cannot be shown", 0.0, 0.0)
    rounding = ", but for rounding," if leak else ""
    sentence = f"gradients reach only the same and earlier tokens{rounding} at {length} tokens"
    return passed(sentence, leak, tolerance * effect)


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
