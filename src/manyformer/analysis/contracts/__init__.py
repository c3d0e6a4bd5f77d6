"""Contract tests of models, scorers and data: `check` tells whether a model keeps what such models promise.

The modules of this package need torch and NumPy alone."""

from typing import TYPE_CHECKING

from manyformer.base.lazy_names import offer_names as _offer_names

if TYPE_CHECKING:
    from manyformer.analysis.contracts.check import CONTRACTS
    from manyformer.analysis.contracts.check_report import CheckReport, ContractRow
    from manyformer.analysis.contracts.data_check import check_data
    from manyformer.analysis.contracts.evaluators import check_evaluator
    from manyformer.analysis.contracts.scorers import check_scorer
    from manyformer.analysis.contracts.subject import Adapter, Subject
    from manyformer.analysis.contracts.trial import Contract
    from manyformer.analysis.own_models import check, find_subject

_MODULES = {
    "CONTRACTS": "manyformer.analysis.contracts.check",
    "Adapter": "manyformer.analysis.contracts.subject",
    "CheckReport": "manyformer.analysis.contracts.check_report",
    "Contract": "manyformer.analysis.contracts.trial",
    "ContractRow": "manyformer.analysis.contracts.check_report",
    "Subject": "manyformer.analysis.contracts.subject",
    "check": "manyformer.analysis.own_models",
    "check_data": "manyformer.analysis.contracts.data_check",
    "check_evaluator": "manyformer.analysis.contracts.evaluators",
    "check_scorer": "manyformer.analysis.contracts.scorers",
    "find_subject": "manyformer.analysis.own_models",
}

__all__ = [
    "CONTRACTS",
    "Adapter",
    "CheckReport",
    "Contract",
    "ContractRow",
    "Subject",
    "check",
    "check_data",
    "check_evaluator",
    "check_scorer",
    "find_subject",
]

_offer_names(__name__, _MODULES)
