"""The contracts, one module per promise; `CONTRACTS` lists them in the order of the report."""

from manyformer.check.contract import Contract
from manyformer.check.contracts import (
    batching_contract,
    beam_reorder_contract,
    causality_contract,
    compile_contract,
    decoding_contract,
    empty_rows_contract,
    gradients_contract,
    learning_contract,
    loss_contract,
    packing_contract,
    padding_contract,
    precision_contract,
    repeatability_contract,
    saving_contract,
    streaming_contract,
)

ORDER: tuple[Contract, ...] = (
    repeatability_contract.repeatable,
    repeatability_contract.traceless,
    causality_contract.causal,
    causality_contract.causal_gradient,
    streaming_contract.cached,
    streaming_contract.prefill,
    streaming_contract.preallocated,
    streaming_contract.rewind,
    decoding_contract.decode,
    beam_reorder_contract.beams,
    padding_contract.padding_right,
    padding_contract.padding_left,
    padding_contract.source_padding,
    padding_contract.padding_state,
    padding_contract.padding_ragged,
    batching_contract.batch,
    packing_contract.packing,
    packing_contract.packing_state,
    empty_rows_contract.empty_rows,
    gradients_contract.gradients,
    loss_contract.loss,
    precision_contract.float64,
    precision_contract.bfloat16,
    precision_contract.float16,
    compile_contract.compiled,
    saving_contract.saving,
    saving_contract.spec,
    learning_contract.learns,
)

CONTRACTS: dict[str, Contract] = {contract.name: contract for contract in ORDER}
