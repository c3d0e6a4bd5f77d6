"""No output depends on a later token: by changing the future, and by gradient."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from manyformer.check.contract import contract
from manyformer.check.subject import Inputs
from manyformer.check.trial import ContractFinding, ContractTrial, Untestable, differentiate, failed, passed

CUTS = 16


@contract("causal", "changing later tokens leaves earlier outputs equal in every bit", needs=("causal", "tokenwise"))
def causal(trial: ContractTrial) -> ContractFinding:
    """Change one token, and everything from it on; look at the outputs before it."""
    inputs = trial.draw(1, trial.long_length)
    before = trial.subject(inputs).logits[0]
    leak, effect, first, guilty = 0.0, 0.0, 0, 0
    for cut in borders(trial, trial.long_length):
        other = trial.different_tokens(inputs.tokens[:, cut:])
        for end in (cut + 1, trial.long_length):
            changed = inputs.tokens.clone()
            changed[:, cut:end] = other[:, : end - cut]
            apart = (trial.subject(inputs._replace(tokens=changed)).logits[0] - before).abs().amax(-1)
            effect = max(effect, float(apart[cut:].max()))
            if worse(float(apart[:cut].max()), leak):
                leak, first, guilty = float(apart[:cut].max()), int(apart[:cut].ne(0).nonzero()[0]), cut
    if leak:
        told = f"tokens from {guilty} on change outputs from {first} on by up to {leak:.1e}"
        return failed(f"the future leaks: {told} (and those they may change by {effect:.1e})", leak, 0.0)
    if not effect:
        return failed("changing a token changes no output at all, so nothing is shown", 0.0, 0.0)
    return passed(f"changed tokens leave all earlier outputs as they are, at {trial.long_length} tokens", leak, 0.0)


@contract("causal-gradient", "no output has a gradient from a later token's vector", needs=("causal", "tokenwise"))
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
