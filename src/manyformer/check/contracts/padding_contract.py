"""Padding changes nothing: on either side, in the source, and when a state has seen it."""

import itertools

import torch

from manyformer.check.chunks import in_chunks
from manyformer.check.contract import contract
from manyformer.check.padded_rows import pad, pad_tokens
from manyformer.check.subject import Inputs, PaddingSide
from manyformer.check.trial import ContractFinding, ContractTrial, WorstDifference
from manyformer.core import PADDING_SEGMENT


def lengths(trial: ContractTrial) -> list[int]:
    """Four documents, one of them a single token."""
    whole = trial.length
    return [whole, whole // 2 - 1, 1, whole - 1]


def _padded(trial: ContractTrial, side: PaddingSide) -> ContractFinding:
    worst, tokenwise = WorstDifference(), trial.subject.per_token
    documents = trial.documents(lengths(trial))
    inputs, spots = pad(trial, documents, side)
    together = trial.subject(inputs)
    for number, (document, spot) in enumerate(zip(documents, spots)):
        alone = trial.subject(document).logits[0]
        where = f"row {number}, {spot.end - spot.begin} tokens padded on the {side} to {inputs.tokens.shape[1]}"
        worst.add(spot.of(together, tokenwise=tokenwise), alone, where)
    return worst.finding(f"rows padded on the {side} with random tokens give what each gives alone", trial.tolerance)


@contract("padding-right", "padding after the tokens changes nothing", needs=("padding_invariant",), exact=True)
def padding_right(trial: ContractTrial) -> ContractFinding:
    """Rows of different lengths, filled up at the end."""
    return _padded(trial, "right")


@contract("padding-left", "padding before the tokens changes nothing", needs=("padding_invariant",), exact=True)
def padding_left(trial: ContractTrial) -> ContractFinding:
    """Rows of different lengths, filled up at the beginning."""
    return _padded(trial, "left")


@contract(
    "source-padding",
    "padding of the source changes nothing",
    needs=("cross_attention", "padding_invariant"),
    exact=True,
)
def source_padding(trial: ContractTrial) -> ContractFinding:
    """Sources of different lengths, targets of one."""
    worst = WorstDifference()
    documents = [trial.draw(1, trial.length, source=length) for length in lengths(trial)]
    target = torch.cat([document.tokens for document in documents])
    alone = [trial.subject(document).logits[0] for document in documents]
    for side in trial.subject.source_sides:
        sources = [document.source for document in documents if document.source is not None]
        source, segments, _ = pad_tokens(trial, sources, side)
        together = trial.subject(Inputs(target, None, source, segments)).logits
        for number in range(len(documents)):
            worst.add(together[number], alone[number], f"row {number}, source padded on the {side}")
    return worst.finding(
        f"sources padded on the {' and '.join(trial.subject.source_sides)} give what each gives alone", trial.tolerance
    )


@contract(
    "padding-state",
    "a state that has seen padding goes on as without",
    needs=("incremental_decoding", "padding_invariant"),
    exact=True,
)
def padding_state(trial: ContractTrial) -> ContractFinding:
    """A padded prompt, then tokens for every row; on the left as generation does it, and on the right."""
    worst, more = WorstDifference(), 4
    documents = trial.documents([max(length, more + 1) for length in lengths(trial)])
    prompts = [document.columns(0, document.tokens.shape[1] - more) for document in documents]
    rest = torch.cat([document.tokens[:, -more:] for document in documents])
    alone = [trial.subject(document).logits[0, -more:] for document in documents]
    sides: tuple[PaddingSide, ...] = ("left",) if "ragged" in trial.subject.not_promised else ("left", "right")
    for side, room in itertools.product(sides, (None,) if "capacity" in trial.subject.not_promised else (None, more)):
        inputs, _ = pad(trial, prompts, side)
        width = inputs.tokens.shape[1]
        _, state = in_chunks(trial, inputs, [width], capacity=None if room is None else width + room)
        following = inputs._replace(tokens=rest, segments=None)
        for column in range(more):
            result = trial.subject(following.columns(column, column + 1), state)
            state = result.state
            for number in range(len(documents)):
                where = f"row {number}, {column + 1} tokens after a prompt padded on the {side}"
                worst.add(result.logits[number, 0], alone[number][column], where)
    return worst.finding(f"prompts padded on the {' and '.join(sides)}, then steps, as each alone", trial.tolerance)


@contract(
    "padding-ragged",
    "rows may get padding at any step",
    needs=("incremental_decoding", "padding_invariant", "ragged"),
    exact=True,
)
def padding_ragged(trial: ContractTrial) -> ContractFinding:
    """Every token of a row comes at a random step, padding at all others, in chunks of 1 to 5 columns."""
    worst, rows = WorstDifference(), 3
    count = trial.length // 2
    documents = trial.draw(rows, count)
    width = trial.length
    tokens, segments = (
        trial.tokens(rows, width),
        torch.full((rows, width), PADDING_SEGMENT, device=documents.tokens.device),
    )
    places = []
    for row in range(rows):
        columns = torch.randperm(width, generator=trial.generator)[:count].sort().values.to(tokens.device)
        tokens[row, columns], segments[row, columns] = documents.tokens[row], 3
        places.append(columns)
    inputs = documents._replace(tokens=tokens, segments=segments)
    if documents.source is not None:
        inputs = inputs._replace(source_segments=torch.full_like(documents.source, 3))
    sizes: list[int] = []
    while sum(sizes) < width:
        sizes.append(min(1 + trial.number(5), width - sum(sizes)))
    got, _ = in_chunks(trial, inputs, sizes)
    alone = trial.subject(documents).logits
    for row in range(rows):
        worst.add(got[row, places[row]], alone[row], f"row {row}, its tokens scattered among padding")
    return worst.finding("tokens scattered among padding over many steps give what one pass gives", trial.tolerance)
