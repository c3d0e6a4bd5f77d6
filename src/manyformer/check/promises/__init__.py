"""One module a promise; `CONTRACTS` has them all, in the order of a report."""

from manyformer.check.contract import Contract
from manyformer.check.promises import (
    batching,
    beams,
    causality,
    compiling,
    empty_rows,
    gradients,
    learning,
    losses,
    packing,
    padding,
    precision,
    repeatable,
    saving,
    streaming,
)

ORDER: tuple[Contract, ...] = (
    repeatable.repeatable,
    repeatable.traceless,
    causality.causal,
    causality.causal_gradient,
    streaming.cached,
    streaming.prefill,
    streaming.preallocated,
    streaming.rewind,
    beams.beams,
    padding.padding_right,
    padding.padding_left,
    padding.source_padding,
    padding.padding_state,
    padding.padding_ragged,
    batching.batch,
    packing.packing,
    packing.packing_state,
    empty_rows.empty_rows,
    gradients.gradients,
    losses.loss,
    precision.float64,
    precision.bfloat16,
    precision.float16,
    compiling.compiled,
    saving.saving,
    saving.spec,
    learning.learns,
)

CONTRACTS: dict[str, Contract] = {contract.name: contract for contract in ORDER}
