"""What a contract is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from manyformer.check.trial import ContractFinding, ContractTrial


@final
@dataclass(frozen=True)
class Contract:
    """A promise as a function of a trial.

    `needs` are what a model must promise for it. `exact` runs it in float64 where the model can be converted. A
    contract that is not `usual` runs only when asked for by name.
    """

    name: str
    promise: str
    run: Callable[[ContractTrial], ContractFinding]
    needs: tuple[str, ...] = ()
    exact: bool = False
    usual: bool = True


def contract(
    name: str, promise: str, *, needs: tuple[str, ...] = (), exact: bool = False, usual: bool = True
) -> Callable[[Callable[[ContractTrial], ContractFinding]], Contract]:
    """Make a function a contract; `promises.CONTRACTS` lists them all."""

    def make(run: Callable[[ContractTrial], ContractFinding]) -> Contract:
        return Contract(name, promise, run, needs, exact, usual)

    return make
