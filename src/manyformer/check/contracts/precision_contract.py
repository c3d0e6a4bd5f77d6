"""Less precision changes the result a little, and never to NaN."""

import torch
from torch import Tensor

from manyformer.check.contract import contract
from manyformer.check.isolation import in_dtype
from manyformer.check.subject import Inputs
from manyformer.check.trial import ContractFinding, ContractTrial, Untestable, failed

COARSE = 0.05
"""How far bfloat16 (8 bits) may be off, relative to the logits: a dozen roundings of 1/256 each."""

FINE = 1e-4


@contract("float64", "float32 is near float64", needs=("module",))
def float64(trial: ContractTrial) -> ContractFinding:
    """The same weights in double precision: what differs is the rounding of float32."""
    if trial.subject.token_ids.device.type == "mps":
        raise Untestable("this device knows no float64")
    inputs = _drawn(trial)
    with in_dtype(trial.subject.module, torch.float32):
        single = trial.subject(inputs).logits
    with in_dtype(trial.subject.module, torch.float64):
        double = trial.subject(inputs).logits
    return _near(single, double, FINE, "float32 against float64")


@contract("bfloat16", "bfloat16 autocast is near float32, and finite", needs=("module",))
def bfloat16(trial: ContractTrial) -> ContractFinding:
    """Matrix products in bfloat16, as training on an accelerator does them."""
    return _autocast(trial, torch.bfloat16, COARSE)


@contract("float16", "float16 autocast is near float32, and finite", needs=("module",))
def float16(trial: ContractTrial) -> ContractFinding:
    """Matrix products in float16, whose range is narrow: a mask of -1e5 overflows there."""
    if trial.subject.token_ids.device.type == "cpu":
        # measured: a CPU has no float16 products and emulates them
        raise Untestable("half-precision products are a hundred times slower on a CPU; runs on an accelerator")
    return _autocast(trial, torch.float16, COARSE)


def _autocast(trial: ContractTrial, dtype: torch.dtype, bound: float) -> ContractFinding:
    inputs = _drawn(trial)
    with in_dtype(trial.subject.module, torch.float32):
        single = trial.subject(inputs).logits
        with torch.autocast(trial.subject.token_ids.device.type, dtype):
            coarse = trial.subject(inputs).logits
    return _near(coarse, single, bound, f"{str(dtype).removeprefix('torch.')} against float32")


def _drawn(trial: ContractTrial) -> Inputs:
    """Inputs, for a model that draws no random numbers of its own: they would differ between precisions."""
    inputs, before = trial.draw(2, trial.length), trial.subject.seed
    first = trial.subject(inputs).logits
    trial.subject.seed = before + 1
    second = trial.subject(inputs).logits
    trial.subject.seed = before
    if not torch.equal(first, second):
        raise Untestable("it draws random numbers, and draws others in another precision")
    return inputs


def _near(got: Tensor, want: Tensor, bound: float, what: str) -> ContractFinding:
    """The root mean square of the difference, relative to that of the logits about their mean."""
    got, want = got.double(), want.double()
    if not torch.isfinite(got).all():
        return failed(f"{what}: not finite", float("nan"), bound)
    spread = (want - want.mean()).square().mean().sqrt().clamp(min=1e-12)
    measured = float((got - want).square().mean().sqrt() / spread)
    return ContractFinding(measured <= bound, f"{what}: {measured:.1e} of the logits' spread", measured, bound)
