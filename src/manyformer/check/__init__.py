"""The promises of a model as a library: `check` any recipe, run or foreign module, and read the report."""

from manyformer.check.adapter import Adapter
from manyformer.check.contract import Contract
from manyformer.check.promises import CONTRACTS
from manyformer.check.report import Report, Row
from manyformer.check.verb import check

__all__ = ["CONTRACTS", "Adapter", "Contract", "Report", "Row", "check"]
