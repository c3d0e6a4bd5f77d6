"""The contracts that padding changes no output: on either side, in the source, and in a decoding state."""

import itertools

import torch

from manyformer.check.chunks import run_in_chunks
from manyformer.check.contract import contract
from manyformer.check.padded_rows import pad_documents, pad_tokens
from manyformer.check.subject import PaddingSide
from manyformer.check.trial import ContractFinding, ContractTrial, WorstDifference
from manyformer.core import PADDING_SEGMENT
from manyformer.tasks import Inputs


def document_lengths(trial: ContractTrial) -> list[int]:
    """The lengths of four documents, one of them a single token."""
    full_length = trial.length
    return [full_length, full_length // 2 - 1, 1, full_length - 1]


def _compare_padded(trial: ContractTrial, side: PaddingSide) -> ContractFinding:
    worst, per_token = WorstDifference(), trial.subject.per_token
    documents = trial.documents(document_lengths(trial))
    inputs, slots = pad_documents(trial, documents, side)
    batched = trial.subject(inputs)
    for row, (document, slot) in enumerate(zip(documents, slots)):
        unpadded = trial.subject(document).logits[0]
        where = f"row {row}, {slot.stop - slot.start} tokens padded on the {side} to {inputs.tokens.shape[1]}"
        worst.add(slot.logits_of(batched, per_token=per_token), unpadded, where)
    return worst.finding(f"rows padded on the {side} with random tokens give the same as each alone", trial.tolerance)


@contract("padding-right", "padding after the tokens changes nothing", needs=("padding_invariant",), exact=True)
def padding_right(trial: ContractTrial) -> ContractFinding:
    """Compare rows of different lengths, padded on the right, with each alone."""
    return _compare_padded(trial, "right")


@contract("padding-left", "padding before the tokens changes nothing", needs=("padding_invariant",), exact=True)
def padding_left(trial: ContractTrial) -> ContractFinding:
    """Compare rows of different lengths, padded on the left, with each alone."""
    return _compare_padded(trial, "left")


@contract(
    "source-padding",
    "padding of the source changes nothing",
    needs=("cross_attention", "padding_invariant"),
    exact=True,
)
def source_padding(trial: ContractTrial) -> ContractFinding:
    """Compare padded sources of different lengths, with targets of one length, with each alone."""
    worst = WorstDifference()
    documents = [trial.draw(1, trial.length, source=length) for length in document_lengths(trial)]
    target = torch.cat([document.tokens for document in documents])
    unpadded = [trial.subject(document).logits[0] for document in documents]
    for side in trial.subject.source_sides:
        sources = [document.source for document in documents if document.source is not None]
        source, segments, _ = pad_tokens(trial, sources, side)
        batched = trial.subject(Inputs(target, None, source, segments)).logits
        for row in range(len(documents)):
            worst.add(batched[row], unpadded[row], f"row {row}, source padded on the {side}")
    return worst.finding(
        f"sources padded on the {' and '.join(trial.subject.source_sides)} give the same as each alone", trial.tolerance
    )


@contract(
    "padding-state",
    "a state after padding decodes as one without",
    needs=("incremental_decoding", "padding_invariant"),
    exact=True,
)
def padding_state(trial: ContractTrial) -> ContractFinding:
    """Feed padded prompts, then single tokens for every row; padding is on the left, as in generation, or right."""
    worst, steps = WorstDifference(), 4
    documents = trial.documents([max(length, steps + 1) for length in document_lengths(trial)])
    prompts = [document.columns(0, document.tokens.shape[1] - steps) for document in documents]
    continuation = torch.cat([document.tokens[:, -steps:] for document in documents])
    unpadded = [trial.subject(document).logits[0, -steps:] for document in documents]
    sides: tuple[PaddingSide, ...] = ("left",) if "ragged" in trial.subject.not_promised else ("left", "right")
    for side, reserved in itertools.product(
        sides, (None,) if "capacity" in trial.subject.not_promised else (None, steps)
    ):
        inputs, _ = pad_documents(trial, prompts, side)
        width = inputs.tokens.shape[1]
        _, state = run_in_chunks(trial, inputs, [width], capacity=None if reserved is None else width + reserved)
        following = inputs._replace(tokens=continuation, segments=None)
        for column in range(steps):
            result = trial.subject(following.columns(column, column + 1), state)
            state = result.state
            for row in range(len(documents)):
                where = f"row {row}, {column + 1} tokens after a prompt padded on the {side}"
                worst.add(result.logits[row, 0], unpadded[row][column], where)
    return worst.finding(
        f"prompts padded on the {' and '.join(sides)}, then steps, give the same as each alone", trial.tolerance
    )


@contract(
    "padding-ragged",
    "rows may get padding at any step",
    needs=("incremental_decoding", "padding_invariant", "ragged"),
    exact=True,
)
def padding_ragged(trial: ContractTrial) -> ContractFinding:
    """Scatter the tokens of each row among padding at random columns, and decode in chunks of 1 to 5 columns."""
    worst, rows = WorstDifference(), 3
    text_length = trial.length // 2
    documents = trial.draw(rows, text_length)
    width = trial.length
    tokens, segments = (
        trial.tokens(rows, width),
        torch.full((rows, width), PADDING_SEGMENT, device=documents.tokens.device),
    )
    token_columns = []
    for row in range(rows):
        columns = torch.randperm(width, generator=trial.generator)[:text_length].sort().values.to(tokens.device)
        tokens[row, columns], segments[row, columns] = documents.tokens[row], 3
        token_columns.append(columns)
    inputs = documents._replace(tokens=tokens, segments=segments)
    if documents.source is not None:
        inputs = inputs._replace(source_segments=torch.full_like(documents.source, 3))
    sizes: list[int] = []
    while sum(sizes) < width:
        sizes.append(min(1 + trial.random_int(5), width - sum(sizes)))
    actual, _ = run_in_chunks(trial, inputs, sizes)
    unpadded = trial.subject(documents).logits
    for row in range(rows):
        worst.add(actual[row, token_columns[row]], unpadded[row], f"row {row}, its tokens scattered among padding")
    return worst.finding("tokens scattered among padding over many steps give the same as one pass", trial.tolerance)
