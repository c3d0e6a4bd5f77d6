"""Contract tests for models: `check` verifies the promises of any recipe, run or third-party module."""

from manyformer.check.check import CONTRACTS, check
from manyformer.check.check_report import CheckReport, ContractRow
from manyformer.check.subject import Adapter
from manyformer.check.trial import Contract

__all__ = ["CONTRACTS", "Adapter", "CheckReport", "Contract", "ContractRow", "check"]
