"""The contract of beam search: the rows of a state can be permuted, repeated and dropped."""

from manyformer.check.chunks import run_in_chunks
from manyformer.check.contract import contract
from manyformer.check.trial import ContractFinding, ContractTrial, WorstDifference

ORDERS = ((2, 0, 0, 1, 2), (4, 3, 2, 1, 0))
STEPS = 4


@contract(
    "beams",
    "a state with selected rows decodes like those rows",
    needs=("incremental_decoding", "per_token"),
    exact=True,
)
def beams(trial: ContractTrial) -> ContractFinding:
    """Reorder the state midway and continue, twice; each row must equal a full pass over its own tokens."""
    worst = WorstDifference()
    for capacity in (None,) if "capacity" in trial.subject.not_promised else (None, trial.length):
        rows, start = trial.draw(3, trial.length), trial.length // 2
        _, state = run_in_chunks(trial, rows, [start], capacity=capacity)
        for order in ORDERS:
            state, rows = trial.subject.reorder(state, order), rows.rows(order)
            # rows with the same history get different continuations: they must not share memory
            rows.tokens[:, start:] = trial.tokens(len(order), trial.length - start)
            full = trial.subject(rows).logits
            for column in range(start, min(start + STEPS, trial.length)):
                result = trial.subject(rows.columns(column, column + 1), state)
                state = result.state
                worst.add(result.logits, full[:, column : column + 1], f"after rows {list(order)} were selected")
            start = min(start + STEPS, trial.length)
    return worst.finding("selected rows, also repeated and dropped ones, decode independently", trial.tolerance)
