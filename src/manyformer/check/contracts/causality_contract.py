"""No output depends on a later token: by changing the future, and by gradient."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from manyformer.check.calls import content_based, same_calls
from manyformer.check.contract import contract
from manyformer.check.isolation import in_dtype
from manyformer.check.subject import Inputs
from manyformer.check.trial import (
    EXACT,
    SINGLE,
    ContractFinding,
    ContractTrial,
    Untestable,
    differentiate,
    failed,
    passed,
)

CUTS = 16


@contract("causal", "changing later tokens leaves earlier outputs as they are", needs=("causal", "per_token"))
def causal(trial: ContractTrial) -> ContractFinding:
    """Change one token, and everything from it on; look at the outputs before it.

    They must be equal in every bit where the same operators run on the same shapes. Where what is computed follows from
    the content of tokens, so does rounding, differently on every processor: there float64 and a tolerance decide. A
    foreign module cannot say so, and products of groups keep their shapes: there float64 decides what bits leave open.
    """
    inputs, length = trial.draw(1, trial.long_length), trial.long_length
    variants = []
    for cut in borders(trial, length):
        tokens = trial.different_tokens(inputs.tokens[:, cut:])
        for end in (cut + 1, length):
            changed = inputs.tokens.clone()
            changed[:, cut:end] = tokens[:, : end - cut]
            variants.append(Variant(cut, changed))
    sentence = f"changed tokens leave all earlier outputs as they are, at {length} tokens"
    bits, same = None, False
    if not content_based(trial.subject.module):
        bits = compare(trial, inputs, variants, tolerance=0.0)
        if bits.guilty is None:
            return judge(bits, sentence)
        same = same_calls(trial.subject, inputs, inputs._replace(tokens=bits.guilty.tokens))
        if same and (trial.subject.exact or not bits.size <= SINGLE * bits.scale):
            return judge(bits, sentence)
    dtype = None if trial.subject.token_ids.device.type == "mps" else torch.float64
    try:
        with in_dtype(trial.subject.module, dtype):
            leak = compare(trial, inputs, variants, tolerance=None)
    except (RuntimeError, TypeError) as error:
        if bits is not None and same:
            return judge(bits, sentence)
        raise Untestable(f"shapes depend on the content of tokens, and float64 raises {type(error).__name__}") from None
    if bits is not None and same and leak.dtype != torch.float64:
        return judge(bits, sentence)
    return judge(leak, sentence.replace(", at", " but for rounding, at"))


class Variant(NamedTuple):
    """Tokens that differ from those of the trial from `cut` on."""

    cut: int
    tokens: Int[Tensor, "1 l"]


class Leak(NamedTuple):
    """How far outputs before the cut moved at most, and at most may; the first output beyond that, and the worst case.

    `scale` is the largest logit, and `effect` how far outputs moved that may depend on what was changed.
    """

    dtype: torch.dtype
    scale: float
    allowed: float
    size: float = 0.0
    effect: float = 0.0
    first: int = 0
    guilty: Variant | None = None


def compare(trial: ContractTrial, inputs: Inputs, variants: Sequence[Variant], *, tolerance: float | None) -> Leak:
    """The largest change of outputs before the cut; `tolerance` is relative to the logits, None that of their dtype."""
    logits = trial.subject(inputs).logits[0]
    if tolerance is None:
        tolerance = EXACT if logits.dtype == torch.float64 else SINGLE
    scale = float(logits.abs().max())
    leak = Leak(logits.dtype, scale, tolerance * scale)
    for variant in variants:
        apart = (trial.subject(inputs._replace(tokens=variant.tokens)).logits[0] - logits).abs().amax(-1)
        leak = leak._replace(effect=max(leak.effect, float(apart[variant.cut :].max())))
        size = float(apart[: variant.cut].max())
        if worse(size, leak.size):
            leak = leak._replace(size=size)
            # not "above", which no NaN is
            beyond = (~(apart[: variant.cut] <= leak.allowed)).nonzero()
            if len(beyond):
                leak = leak._replace(first=int(beyond[0]), guilty=variant)
    return leak


def judge(leak: Leak, sentence: str) -> ContractFinding:
    """The finding of a comparison; `sentence` says what holds where nothing leaks."""
    if leak.guilty is not None:
        sentence = f"tokens from {leak.guilty.cut} on change outputs from {leak.first} on by up to {leak.size:.1e}"
        sentence = f"the future leaks: {sentence} (and those they may change by {leak.effect:.1e})"
        return failed(sentence, leak.size, leak.allowed)
    if not leak.effect > leak.allowed:
        return failed("changing a token changes no output at all, so nothing is shown", leak.size, leak.allowed)
    return passed(sentence, leak.size, leak.allowed)


@contract("causal-gradient", "no output has a gradient from a later token's vector", needs=("causal", "per_token"))
def causal_gradient(trial: ContractTrial) -> ContractFinding:
    """d output i / d embedding j = 0 for j > i; discrete choices (hashes, top-k) do not count here."""
    inputs = trial.draw(1, trial.long_length)
    leak, effect, at, guilty = 0.0, 0.0, 0, 0
    for cut in borders(trial, trial.long_length)[::-2]:
        seen = differentiate(trial, lambda output=cut - 1: influence(trial, inputs, output))  # type: ignore[misc]
        effect = max(effect, float(seen[:cut].max()))
        if worse(float(seen[cut:].max()), leak):
            leak, at, guilty = float(seen[cut:].max()), cut - 1, cut + int(seen[cut:].argmax())
    if leak:
        return failed(f"output {at} has a gradient from token {guilty}, which comes later", leak, 0.0)
    if not effect:
        return failed("no output has a gradient from any token, so nothing is shown", 0.0, 0.0)
    return passed(f"gradients reach only the past and the present, at {trial.long_length} tokens", leak, 0.0)


def influence(trial: ContractTrial, inputs: Inputs, output: int) -> Float[Tensor, " l"]:
    """How strongly each token's vector moves a random function of one output: the largest gradient."""
    with embedded(inputs.tokens) as leaves:
        logits = trial.subject(inputs).logits[0, output]
    if not leaves:
        raise Untestable("no nn.Embedding looks up the tokens, so there is no vector to take a gradient of")
    weight = torch.randn(logits.shape, generator=trial.generator).to(logits)
    grads = torch.autograd.grad((logits * weight).sum(), leaves, allow_unused=True)
    found = [grad[0].abs().amax(-1) for grad in grads if grad is not None]
    return torch.stack(found).amax(0).cpu() if found else torch.zeros(inputs.tokens.shape[1])


def worse(new: float, old: float) -> bool:
    """Whether `new` is the larger leak; a NaN beats every number and stays."""
    return not math.isnan(old) and not new <= old


def borders(trial: ContractTrial, length: int) -> list[int]:
    """Positions from 1 on at which to cut: the ends, and around multiples of powers of two, where chunks meet."""
    if length < 2:
        raise Untestable("one token has no later token")
    found = {length // 3, length // 2}
    for power in range(2, length.bit_length()):
        for multiple in (1 << power, (length - 1) >> power << power):
            found |= {multiple - 1, multiple, multiple + 1}
    middle = sorted(cut for cut in found if 1 < cut < length - 1)
    kept = torch.randperm(len(middle), generator=trial.generator)[: CUTS - 2].tolist()
    return sorted({1, length - 1, *(middle[index] for index in kept)})


@contextmanager
def embedded(tokens: Tensor) -> Iterator[list[Tensor]]:
    """Inside, whatever any `nn.Embedding` looks up for exactly these tokens becomes a leaf that takes gradients."""
    leaves: list[Tensor] = []

    def hook(module: nn.Module, arguments: tuple[object, ...], output: Tensor) -> Tensor | None:
        looked_up = arguments[0] if isinstance(module, nn.Embedding) and arguments else None
        if not isinstance(looked_up, Tensor) or not torch.equal(looked_up, tokens):
            return None
        leaves.append(output.detach().requires_grad_())
        # a copy, because some models add positions in place, which a leaf forbids
        return leaves[-1].clone()

    # torch's own annotation leaves out that a hook may replace the output
    handle = register_module_forward_hook(hook)  # type: ignore[arg-type]
    try:
        yield leaves
    finally:
        handle.remove()
