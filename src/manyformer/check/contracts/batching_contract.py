"""A row does not depend on the other rows of its batch."""

from manyformer.check.contract import contract
from manyformer.check.trial import ContractFinding, ContractTrial, WorstDifference

ROWS = 4


@contract("batch", "a row alone == the row in a batch", exact=True)
def batch(trial: ContractTrial) -> ContractFinding:
    """Each row alone, and all together."""
    inputs, worst = trial.draw(ROWS, trial.length), WorstDifference()
    together = trial.subject(inputs).logits
    for row in range(ROWS):
        worst.add(together[row], trial.subject(inputs.rows([row])).logits[0], f"row {row} of {ROWS}")
    return worst.finding("each row gives alone what it gives among others", trial.tolerance)
