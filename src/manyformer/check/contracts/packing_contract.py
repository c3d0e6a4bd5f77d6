"""The contracts that documents packed into one row do not attend to each other."""

from manyformer.check.chunks import run_in_chunks
from manyformer.check.contract import contract
from manyformer.check.padded_rows import DocumentSlot, RowItem, pack_documents
from manyformer.check.trial import ContractFinding, ContractTrial, WorstDifference
from manyformer.tasks import Inputs

ROWS = ((RowItem(0), RowItem(1), RowItem(2)), (RowItem(3, 2), RowItem(4), RowItem(5, 1)))


def _draw_packed(trial: ContractTrial) -> tuple[list[Inputs], Inputs, list[DocumentSlot]]:
    """Draw six documents and pack them into two rows with padding; one document has a single token."""
    third = trial.length // 3
    lengths = [third, 1, third + 2, 2, third + 1, third - 2]
    documents = trial.documents(lengths)
    return documents, *pack_documents(trial, documents, ROWS)


@contract("packing", "documents packed in a row == each alone", needs=("padding_invariant", "packing"), exact=True)
def packing(trial: ContractTrial) -> ContractFinding:
    """Compare packed documents, which differ by segment ids alone, with each document alone."""
    worst = WorstDifference()
    documents, inputs, slots = _draw_packed(trial)
    packed = trial.subject(inputs)
    for index, (document, slot) in enumerate(zip(documents, slots)):
        where = f"document {index}, row {slot.row}, tokens {slot.start} to {slot.stop}"
        worst.add(slot.logits_of(packed, per_token=True), trial.subject(document).logits[0], where)
    return worst.finding(f"{len(documents)} documents in {len(ROWS)} rows give the same as each alone", trial.tolerance)


@contract(
    "packing-state",
    "packed rows through a state == each alone",
    needs=("incremental_decoding", "padding_invariant", "packing"),
    exact=True,
)
def packing_state(trial: ContractTrial) -> ContractFinding:
    """Compare packed rows, decoded in chunks that divide documents, with each document alone."""
    worst = WorstDifference()
    documents, inputs, slots = _draw_packed(trial)
    width = inputs.tokens.shape[1]
    unpacked = [trial.subject(document).logits[0] for document in documents]
    for size in (1, 3, width):
        sizes = [size] * (width // size) + ([width % size] if width % size else [])
        actual, _ = run_in_chunks(trial, inputs, sizes)
        for index, slot in enumerate(slots):
            worst.add(actual[slot.row, slot.start : slot.stop], unpacked[index], f"document {index}, chunks of {size}")
    return worst.finding("packed rows in chunks give the same as each document alone", trial.tolerance)
