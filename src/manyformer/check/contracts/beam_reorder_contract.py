"""Beam search: the rows of a state are permuted, repeated and dropped."""

from manyformer.check.chunks import in_chunks
from manyformer.check.contract import contract
from manyformer.check.trial import ContractFinding, ContractTrial, WorstDifference

ORDERS = ((2, 0, 0, 1, 2), (4, 3, 2, 1, 0))
STEPS = 4


@contract(
    "beams", "a state of chosen rows goes on as those rows", needs=("incremental_decoding", "per_token"), exact=True
)
def beams(trial: ContractTrial) -> ContractFinding:
    """Choose rows in the middle and go on, twice; each must be as if it had been there from the start."""
    worst = WorstDifference()
    for capacity in (None,) if "capacity" in trial.subject.not_promised else (None, trial.length):
        rows, begin = trial.draw(3, trial.length), trial.length // 2
        _, state = in_chunks(trial, rows, [begin], capacity=capacity)
        for order in ORDERS:
            state, rows = trial.subject.reorder(state, order), rows.rows(order)
            # rows with one past get different futures: they must not stay tied together
            rows.tokens[:, begin:] = trial.tokens(len(order), trial.length - begin)
            full = trial.subject(rows).logits
            for column in range(begin, min(begin + STEPS, trial.length)):
                result = trial.subject(rows.columns(column, column + 1), state)
                state = result.state
                worst.add(result.logits, full[:, column : column + 1], f"after rows {list(order)} were chosen")
            begin = min(begin + STEPS, trial.length)
    return worst.finding("chosen rows, repeated and dropped ones too, go on as their own", trial.tolerance)
