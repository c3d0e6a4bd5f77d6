"""The `Contract` record and the decorator that makes one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from manyformer.check.trial import ContractFinding, ContractTrial


@final
@dataclass(frozen=True)
class Contract:
    """A promise of a model, with the function that tests it.

    `needs` are the promises that it requires of a model. `exact` runs it in float64 if the model can be converted. A
    contract without `runs_by_default` runs only if it is named.
    """

    name: str
    promise: str
    run: Callable[[ContractTrial], ContractFinding]
    needs: tuple[str, ...] = ()
    exact: bool = False
    runs_by_default: bool = True


def contract(
    name: str, promise: str, *, needs: tuple[str, ...] = (), exact: bool = False, runs_by_default: bool = True
) -> Callable[[Callable[[ContractTrial], ContractFinding]], Contract]:
    """Decorate a test function to make it a `Contract`; `contracts.CONTRACTS` lists all contracts."""

    def make_contract(run: Callable[[ContractTrial], ContractFinding]) -> Contract:
        return Contract(name, promise, run, needs, exact, runs_by_default)

    return make_contract
