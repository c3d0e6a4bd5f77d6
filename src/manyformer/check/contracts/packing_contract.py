"""Documents packed into one row do not see each other."""

from manyformer.check.chunks import in_chunks
from manyformer.check.contract import contract
from manyformer.check.padded_rows import DocumentSlot, RowItem, pack
from manyformer.check.subject import Inputs
from manyformer.check.trial import ContractFinding, ContractTrial, WorstDifference

ROWS = ((RowItem(0), RowItem(1), RowItem(2)), (RowItem(3, 2), RowItem(4), RowItem(5, 1)))


def _packed(trial: ContractTrial) -> tuple[list[Inputs], Inputs, list[DocumentSlot]]:
    """Six documents in two rows, one of a single token, with padding before, between and after."""
    third = trial.length // 3
    lengths = [third, 1, third + 2, 2, third + 1, third - 2]
    documents = trial.documents(lengths)
    return documents, *pack(trial, documents, ROWS)


@contract("packing", "documents packed in a row == each alone", needs=("padding_invariant", "packing"), exact=True)
def packing(trial: ContractTrial) -> ContractFinding:
    """Several documents a row, told apart by segment numbers alone."""
    worst = WorstDifference()
    documents, inputs, spots = _packed(trial)
    together = trial.subject(inputs)
    for number, (document, spot) in enumerate(zip(documents, spots)):
        where = f"document {number}, row {spot.row}, tokens {spot.begin} to {spot.end}"
        worst.add(spot.of(together, tokenwise=True), trial.subject(document).logits[0], where)
    return worst.finding(f"{len(documents)} documents in {len(ROWS)} rows give what each gives alone", trial.tolerance)


@contract(
    "packing-state",
    "packed rows through a state == each alone",
    needs=("incremental_decoding", "padding_invariant", "packing"),
    exact=True,
)
def packing_state(trial: ContractTrial) -> ContractFinding:
    """Packed rows in chunks that cut through documents."""
    worst = WorstDifference()
    documents, inputs, spots = _packed(trial)
    width = inputs.tokens.shape[1]
    alone = [trial.subject(document).logits[0] for document in documents]
    for size in (1, 3, width):
        sizes = [size] * (width // size) + ([width % size] if width % size else [])
        got, _ = in_chunks(trial, inputs, sizes)
        for number, spot in enumerate(spots):
            worst.add(got[spot.row, spot.begin : spot.end], alone[number], f"document {number}, chunks of {size}")
    return worst.finding("packed rows, cut anywhere, give what each document gives alone", trial.tolerance)
