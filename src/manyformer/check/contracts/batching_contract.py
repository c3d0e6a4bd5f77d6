"""The contract that the outputs of a row do not depend on the other rows of its batch."""

from manyformer.check.contract import contract
from manyformer.check.trial import ContractFinding, ContractTrial, WorstDifference

ROWS = 4


@contract("batch", "a row alone == the row in a batch", exact=True)
def batch(trial: ContractTrial) -> ContractFinding:
    """Compare each row alone with the same row in a batch."""
    inputs, worst = trial.draw(ROWS, trial.length), WorstDifference()
    batched = trial.subject(inputs).logits
    for row in range(ROWS):
        worst.add(batched[row], trial.subject(inputs.rows([row])).logits[0], f"row {row} of {ROWS}")
    return worst.finding("each row alone gives the same as in a batch", trial.tolerance)
