"""Beam search: the rows of a state are permuted, repeated and dropped."""

from manyformer.check.chunks import in_chunks
from manyformer.check.contract import contract
from manyformer.check.trial import Finding, Trial, Worst

ORDER = (2, 0, 0, 1, 2)


@contract("beams", "a state of chosen rows goes on as those rows", needs=("streams", "tokenwise"), exact=True)
def beams(trial: Trial) -> Finding:
    """Reorder in the middle and go on, twice; each row must be as if it had been there from the start."""
    rows, worst = trial.draw(3, trial.length), Worst()
    half = trial.length // 2
    _, state = in_chunks(trial, rows, [half])
    for order in (ORDER, tuple(reversed(range(len(ORDER))))):
        state, rows = trial.subject.reorder(state, order), rows.rows(order)
        # equal pasts get different futures: rows must not stay tied together
        rows = rows._replace(tokens=rows.tokens.clone())
        rows.tokens[:, half:] = trial.tokens(len(order), trial.length - half)
        full = trial.subject(rows).logits
        for column in range(half, half + min(4, trial.length - half)):
            result = trial.subject(rows.columns(column, column + 1), state)
            state = result.state
            worst.add(result.logits, full[:, column : column + 1], f"after rows {list(order)} were chosen")
        half += min(4, trial.length - half)
    return worst.finding("chosen rows, repeated and dropped ones too, go on as their own", trial.tolerance)
