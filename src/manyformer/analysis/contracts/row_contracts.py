"""The contracts that rows, documents and padding of a batch do not change the outputs of each other."""

import itertools

import torch

from manyformer.analysis.contracts.subject import PaddingSide
from manyformer.analysis.contracts.token_exchange import training_forward
from manyformer.analysis.contracts.trial import (
    ContractFinding,
    ContractTrial,
    DocumentSlot,
    RowItem,
    contract,
    document_lengths,
    failed,
    gradients_of,
    pack_documents,
    pad_documents,
    pad_tokens,
    passed,
)
from manyformer.nn.model_inputs import PADDING_SEGMENT, Inputs

BATCH_ROWS = 4
LARGER_BATCH = 7

PACKED_ROWS = ((RowItem(0), RowItem(1), RowItem(2)), (RowItem(3, 2), RowItem(4), RowItem(5, 1)))

PADDED_STATE = ("incremental_decoding", "padding_invariant")
PADDED_SOURCE = ("cross_attention", "padding_invariant")


@contract("padding-right", "padding after the tokens changes nothing", needs=("padding_invariant",), exact=True)
def padding_right(trial: ContractTrial) -> ContractFinding:
    """Compare rows of different lengths, padded on the right, with each alone."""
    return _compare_padded(trial, "right")


@contract("padding-left", "padding before the tokens changes nothing", needs=("padding_invariant",), exact=True)
def padding_left(trial: ContractTrial) -> ContractFinding:
    """Compare rows of different lengths, padded on the left, with each alone.

    Where padding hides tokens but moves no others (`columns_count`), compare rows with other padding of equal lengths.
    """
    if trial.subject.columns_count:
        return _compare_contents(trial)
    return _compare_padded(trial, "left")


def _compare_contents(trial: ContractTrial) -> ContractFinding:
    documents = trial.documents(document_lengths(trial))
    inputs, slots = pad_documents(trial, documents, "left")
    assert inputs.segments is not None
    is_padding = inputs.segments == PADDING_SEGMENT
    other_padding = torch.where(is_padding, trial.different_tokens(inputs.tokens), inputs.tokens)
    first = trial.subject(inputs)
    second = trial.subject(inputs._replace(tokens=other_padding))
    for row, slot in enumerate(slots):
        where = f"row {row}, {slot.stop - slot.start} tokens after padding of other tokens"
        per_token = trial.subject.per_token
        trial.compare(slot.logits_of(second, per_token=per_token), slot.logits_of(first, per_token=per_token), where)
    return trial.finding("tokens in place of padding on the left change nothing")


def _compare_padded(trial: ContractTrial, side: PaddingSide) -> ContractFinding:
    documents = trial.documents(document_lengths(trial))
    inputs, slots = pad_documents(trial, documents, side)
    batched = trial.subject(inputs)
    for row, (document, slot) in enumerate(zip(documents, slots)):
        where = f"row {row}, {slot.stop - slot.start} tokens padded on the {side} to {inputs.tokens.shape[1]}"
        actual = slot.logits_of(batched, per_token=trial.subject.per_token)
        trial.compare(actual, trial.subject(document).logits[0], where)
    return trial.finding(f"rows padded on the {side} with random tokens give the same as each alone")


@contract("source-padding", "padding of the source changes nothing", needs=PADDED_SOURCE, exact=True)
def source_padding(trial: ContractTrial) -> ContractFinding:
    """Compare padded sources of different lengths, with targets of one length, with each alone."""
    documents = [trial.draw(1, trial.length, source=length) for length in document_lengths(trial)]
    target = torch.cat([document.tokens for document in documents])
    unpadded = [trial.subject(document).logits[0] for document in documents]
    sides = trial.subject.source_sides
    for side in sides:
        sources = [document.source for document in documents if document.source is not None]
        padded = pad_tokens(trial, sources, side)
        batched = trial.subject(Inputs(target, source=padded.tokens, source_segments=padded.segments)).logits
        for row, expected in enumerate(unpadded):
            trial.compare(batched[row], expected, f"row {row}, source padded on the {side}")
    return trial.finding(f"sources padded on the {' and '.join(sides)} give the same as each alone")


@contract("padding-state", "a state after padding decodes as one without", needs=PADDED_STATE, exact=True)
def padding_state(trial: ContractTrial) -> ContractFinding:
    """Feed padded prompts, then single tokens for every row; padding is on the left, as in generation, or right."""
    steps = 4
    documents = trial.documents([max(length, steps + 1) for length in document_lengths(trial)])
    # the last tokens are fed one by one, and a prompt needs at least one token before them
    prompts = [document.columns(0, document.tokens.shape[1] - steps) for document in documents]
    continuation = torch.cat([document.tokens[:, -steps:] for document in documents])
    unpadded = [trial.subject(document).logits[0, -steps:] for document in documents]
    if "ragged" in trial.subject.not_promised:
        # a third-party cache that knows padding before prompts only
        sides: tuple[PaddingSide, ...] = ("left",)
    else:
        sides = ("left", "right")
    for side in sides:
        inputs, _ = pad_documents(trial, prompts, side)
        following = inputs._replace(tokens=continuation, segments=None)
        width = inputs.tokens.shape[1]
        for capacity in trial.capacities(width + steps):
            _, state = trial.run_in_chunks(inputs, [width], capacity=capacity)
            actual, _ = trial.run_in_chunks(following, [1] * steps, state=state)
            for row, column in itertools.product(range(len(documents)), range(steps)):
                where = f"row {row}, {column + 1} tokens after a prompt padded on the {side}"
                trial.compare(actual[row, column], unpadded[row][column], where)
    return trial.finding(f"prompts padded on the {' and '.join(sides)}, then steps, give the same as each alone")


@contract("padding-ragged", "rows may get padding at any step", needs=(*PADDED_STATE, "ragged"), exact=True)
def padding_ragged(trial: ContractTrial) -> ContractFinding:
    """Scatter the tokens of each row among padding at random columns, and decode in chunks of 1 to 5 columns."""
    rows = 3
    width = trial.length
    text_length = trial.length // 2
    documents = trial.draw(rows, text_length)
    tokens = trial.tokens(rows, width)
    segments = torch.full_like(tokens, PADDING_SEGMENT)
    token_columns = []
    for row in range(rows):
        # in order, but with gaps of any length between two tokens
        columns = torch.randperm(width, generator=trial.generator)[:text_length].sort().values.to(tokens.device)
        tokens[row, columns] = documents.tokens[row]
        segments[row, columns] = 3
        token_columns.append(columns)
    inputs = documents._replace(tokens=tokens, segments=segments)
    if documents.source is not None:
        inputs = inputs._replace(source_segments=torch.full_like(documents.source, 3))
    sizes: list[int] = []
    while sum(sizes) < width:
        sizes.append(min(1 + trial.random_int(5), width - sum(sizes)))
    actual, _ = trial.run_in_chunks(inputs, sizes)
    unpadded = trial.subject(documents).logits
    for row in range(rows):
        trial.compare(actual[row, token_columns[row]], unpadded[row], f"row {row}, its tokens scattered among padding")
    return trial.finding("tokens scattered among padding over many steps give the same as one pass")


@contract("batch", "a row alone == the row in a batch", exact=True)
def batch(trial: ContractTrial) -> ContractFinding:
    """Compare each row alone with the same row in a batch, in a larger one, and in one whose other rows differ."""
    rows = trial.draw(LARGER_BATCH, trial.length)
    inputs = rows.rows(range(BATCH_ROWS))
    batched = trial.subject(inputs).logits
    for row in range(BATCH_ROWS):
        trial.compare(batched[row], trial.subject(inputs.rows([row])).logits[0], f"row {row} of {BATCH_ROWS}")
    # what experts have room for grows with the rows and is shared among them
    trial.compare(trial.subject(rows).logits[:BATCH_ROWS], batched, f"{BATCH_ROWS} of {LARGER_BATCH} rows")
    last = BATCH_ROWS - 1
    others = trial.subject(rows.rows([4, 5, 6, last])).logits
    trial.compare(others[last], batched[last], f"row {last} of {BATCH_ROWS}, the others exchanged")
    crowded = trial.subject(_crowd(trial, inputs, last)).logits
    trial.compare(crowded[last], batched[last], f"row {last} of {BATCH_ROWS}, the others full of one of its tokens")
    return trial.finding("each row alone gives the same as in a batch")


def _crowd(trial: ContractTrial, inputs: Inputs, row: int) -> Inputs:
    """The inputs with one token of a row all over the others: it crowds out its like where experts lack room."""
    tokens = inputs.tokens[row, trial.random_int(inputs.tokens.shape[1])].expand_as(inputs.tokens).clone()
    tokens[row] = inputs.tokens[row]
    return inputs._replace(tokens=tokens)


@contract("batch-training", "in training mode, a row does not depend on the others", needs=("module",), exact=True)
def batch_training(trial: ContractTrial) -> ContractFinding:
    """Exchange all other rows, with their sources, in training mode: with the same random numbers a row stays as it is.

    A row alone would draw other random numbers than in a batch.
    """
    both = trial.draw(2 * BATCH_ROWS, trial.length)
    rows = range(BATCH_ROWS)
    inputs = both.rows(rows)
    other_rows = both.rows(range(BATCH_ROWS, 2 * BATCH_ROWS))
    with training_forward(trial, inputs, other_rows) as forward:
        expected = forward(inputs)
        for row in rows:
            mixed = both.rows([index if index == row else index + BATCH_ROWS for index in rows])
            trial.compare(forward(mixed)[row], expected[row], f"row {row} of {BATCH_ROWS}, the others exchanged")
        last = BATCH_ROWS - 1
        crowded = forward(_crowd(trial, inputs, last))
        trial.compare(
            crowded[last], expected[last], f"row {last} of {BATCH_ROWS}, the others full of one of its tokens"
        )
    return trial.finding("in training mode, exchanged rows change no other row")


@contract("packing", "documents packed in a row == each alone", needs=("padding_invariant", "packing"), exact=True)
def packing(trial: ContractTrial) -> ContractFinding:
    """Compare packed documents, which differ by segment ids alone, with each document alone."""
    documents, inputs, slots = _draw_packed(trial)
    packed = trial.subject(inputs)
    for index, (document, slot) in enumerate(zip(documents, slots)):
        where = f"document {index}, row {slot.row}, tokens {slot.start} to {slot.stop}"
        trial.compare(slot.logits_of(packed, per_token=True), trial.subject(document).logits[0], where)
    return trial.finding(f"{len(documents)} documents in {len(PACKED_ROWS)} rows give the same as each alone")


@contract("packing-state", "packed rows through a state == each alone", needs=(*PADDED_STATE, "packing"), exact=True)
def packing_state(trial: ContractTrial) -> ContractFinding:
    """Compare packed rows, decoded in chunks that divide documents, with each document alone."""
    documents, inputs, slots = _draw_packed(trial)
    width = inputs.tokens.shape[1]
    unpacked = [trial.subject(document).logits[0] for document in documents]
    for size in (1, 3, width):
        sizes = [size] * (width // size) + ([width % size] if width % size else [])
        actual, _ = trial.run_in_chunks(inputs, sizes)
        for index, slot in enumerate(slots):
            where = f"document {index}, chunks of {size}"
            trial.compare(actual[slot.row, slot.start : slot.stop], unpacked[index], where)
    return trial.finding("packed rows in chunks give the same as each document alone")


def _draw_packed(trial: ContractTrial) -> tuple[list[Inputs], Inputs, list[DocumentSlot]]:
    """Draw six documents and pack them into two rows with padding; one document has a single token."""
    third = trial.length // 3
    documents = trial.documents([third, 1, third + 2, 2, third + 1, third - 2])
    return documents, *pack_documents(trial, documents, PACKED_ROWS)


@contract("empty-rows", "rows of padding alone are finite, gradients too", needs=("padding_invariant",))
def empty_rows(trial: ContractTrial) -> ContractFinding:
    """One empty row, one padded on the left and two full ones; in an encoder-decoder one has an empty source."""
    inputs = trial.draw(4, trial.length)
    segments = torch.zeros_like(inputs.tokens)
    segments[0] = PADDING_SEGMENT
    segments[1, : trial.length // 2] = PADDING_SEGMENT
    source_segments = None
    if inputs.source is not None:
        source_segments = torch.zeros_like(inputs.source)
        source_segments[[0, 2]] = PADDING_SEGMENT
    inputs = inputs._replace(segments=segments, source_segments=source_segments)
    logits = trial.subject(inputs).logits
    if not torch.isfinite(logits).all():
        rows = (~torch.isfinite(logits)).flatten(1).any(1).nonzero().flatten().tolist()
        return failed(f"logits of rows {rows} are not finite; row 0 is empty, row 1 begins with padding")
    if trial.subject.module is not None:
        grads = gradients_of(trial, lambda: trial.subject(inputs).logits.float().square().sum())
        for name, grad in grads.items():
            if grad is not None and not torch.isfinite(grad).all():
                return failed(f"the gradient of {name} is not finite")
    return passed("an empty row gives finite logits, and finite gradients everywhere")
