"""The promises of a model as a library: `check` any recipe, run or foreign module, and read the report."""

from manyformer.check.adapter import Adapter
from manyformer.check.check import check
from manyformer.check.check_report import CheckReport, ContractRow
from manyformer.check.contract import Contract
from manyformer.check.contracts import CONTRACTS

__all__ = ["CONTRACTS", "Adapter", "CheckReport", "Contract", "ContractRow", "check"]
