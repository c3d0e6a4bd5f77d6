"""Contract tests for models: `check` verifies the promises of any recipe, run or third-party module."""

from manyformer.analysis.contracts.check import CONTRACTS, check
from manyformer.analysis.contracts.check_report import CheckReport, ContractRow
from manyformer.analysis.contracts.subject import Adapter
from manyformer.analysis.contracts.trial import Contract

__all__ = ["CONTRACTS", "Adapter", "CheckReport", "Contract", "ContractRow", "check"]
