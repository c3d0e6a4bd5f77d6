"""The contracts of models; `CONTRACTS` lists them in the order of the report."""

from manyformer.check.contracts import (
    causality_contracts,
    decoding_contracts,
    precision_contracts,
    repeatability_contracts,
    row_contracts,
    saving_contracts,
    training_contracts,
)
from manyformer.check.trial import Contract

MODULES = (
    repeatability_contracts,
    causality_contracts,
    decoding_contracts,
    row_contracts,
    training_contracts,
    precision_contracts,
    saving_contracts,
)

CONTRACTS = {item.name: item for module in MODULES for item in vars(module).values() if isinstance(item, Contract)}
