"""The table of paths of softmax attention: which computation each kind of call takes, and that each row is needed."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from manyformer.nn import KernelCall, SoftmaxKernel
from manyformer.nn.core import (
    PADDING_SEGMENT,
    AlignedLayout,
    ContiguousLayout,
    PackedLayout,
    StepLayout,
    TokenPositions,
    tree_map,
)
from manyformer.nn.masks import AllKeys, Causal, Mask, Window
from manyformer.nn.positions import (
    AlibiPosition,
    DistanceAwarePosition,
    NoPosition,
    Position,
    ShawPosition,
    T5BiasPosition,
    TransformerXLPosition,
)
from manyformer.nn.runtime.handwritten_gradient import plain_operations
from manyformer.nn.softmax.softmax_kernel import TABLE, Refusal, Row, choose

HEADS, WIDTH = 2, 16


def contiguous(length: int, start: int = 0) -> TokenPositions:
    position_ids = torch.arange(start, start + length).expand(2, -1)
    return TokenPositions(position_ids, torch.zeros_like(position_ids), ContiguousLayout(start))


def packed(*lengths: int) -> TokenPositions:
    """Two rows of documents of these lengths."""
    ids = torch.cat([torch.arange(length) for length in lengths]).expand(2, -1)
    segments = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).expand(2, -1)
    ends = [sum(lengths[: number + 1]) for number in range(len(lengths))]
    documents = [(row, end - length, end) for row in (0, 1) for end, length in zip(ends, lengths, strict=True)]
    return TokenPositions(ids, segments, PackedLayout(tuple(documents)))


def right_padded(length: int, padding: int) -> TokenPositions:
    """Two rows, the second of which ends in padding."""
    whole = contiguous(length)
    segments = whole.segment_ids.clone()
    segments[1, length - padding :] = PADDING_SEGMENT
    layout = PackedLayout(((0, 0, length), (1, 0, length - padding)))
    return TokenPositions(whole.position_ids, segments, layout)


def step() -> tuple[TokenPositions, TokenPositions]:
    """The static step of the last of 40 tokens."""
    keys = contiguous(40)
    layout = StepLayout(torch.full((2,), 39), keys, 64)
    return TokenPositions(torch.full((2, 1), 39), torch.zeros(2, 1, dtype=torch.long), layout), keys


def with_roles(positions: TokenPositions) -> TokenPositions:
    return positions._replace(roles=torch.zeros_like(positions.position_ids))


class Case(NamedTuple):
    """A call of a kernel, and what it says of it: its path and reason, or why it refuses."""

    says: str
    mask: Mask = Causal()
    positions: TokenPositions | tuple[TokenPositions, TokenPositions] = contiguous(200)
    position: Callable[[], Position] = NoPosition
    path: Any = "auto"
    device: str = "cpu"
    dropout: float = 0.0
    watched: bool = False
    width: int = WIDTH
    plain: bool = False


ALIBI = lambda: AlibiPosition(HEADS)  # noqa: E731
SHAW = lambda: ShawPosition(WIDTH)  # noqa: E731
XL = lambda: TransformerXLPosition(HEADS * WIDTH, HEADS)  # noqa: E731
PAIRWISE = lambda: DistanceAwarePosition(HEADS)  # noqa: E731

SEES_SCORES = "acts on the score of each pair"
WINDOW = repr(Window(20))
DENSE = f"sdpa: the dense mask of {WINDOW} for these positions"
CASES = (
    Case("naive: forced", path="naive"),
    Case("naive: the weights are watched, and only this path forms them", watched=True),
    Case("path 'sdpa' cannot serve this call: the weights are watched", path="sdpa", watched=True),
    # one token
    Case("sdpa: one token, with the mask Causal() of all columns", positions=step()),
    Case("sdpa: one token, with the mask Causal() of all columns", positions=step(), path="sdpa"),
    Case("naive: one token, with the scores that AlibiPosition changes", positions=step(), position=ALIBI),
    Case("path 'sdpa' cannot serve the static step of one token", positions=step(), position=ALIBI, path="sdpa"),
    Case("path 'sparse' cannot serve the static step of one token", positions=step(), path="sparse"),
    # a position that acts on pairs
    Case(f"path 'sparse' cannot serve this call: AlibiPosition {SEES_SCORES}", position=ALIBI, path="sparse"),
    Case(f"naive: AlibiPosition {SEES_SCORES}, and there are few pairs", positions=contiguous(100), position=ALIBI),
    Case(
        f"naive: AlibiPosition {SEES_SCORES}, and there are few pairs",
        positions=(contiguous(16, 2000), contiguous(2016)),
        position=ALIBI,
    ),
    Case("blocked: AlibiPosition adds a number for each distance: one fused call per 256 queries", position=ALIBI),
    Case("blocked: AlibiPosition adds a number", positions=contiguous(100), position=ALIBI, path="blocked"),
    Case("blocked: AlibiPosition adds a number", positions=packed(80, 120), position=ALIBI),
    Case(f"blocked: AlibiPosition {SEES_SCORES}: computed in blocks of 128", position=ALIBI, dropout=0.1),
    Case(f"blocked: AlibiPosition {SEES_SCORES}: computed in blocks", positions=packed(*[50] * 6), position=ALIBI),
    Case("blocked: ShawPosition clips distances: a band of close keys, fused calls for all other keys", position=SHAW),
    Case(
        f"blocked: T5BiasPosition {SEES_SCORES}: computed in blocks of 128 queries",
        position=lambda: T5BiasPosition(HEADS, max_distance=4096),
    ),
    Case("blocked: TransformerXLPosition has a vector for each distance: computed in blocks of 128", position=XL),
    Case("blocked: TransformerXLPosition has a vector", position=XL, positions=contiguous(100)),
    Case(
        "blocked: TransformerXLPosition has a vector for each distance: computed in blocks of 128 queries, distance "
        "terms as a view, in rows of contiguous tokens",
        position=XL,
        positions=contiguous(200)._replace(layout=AlignedLayout(0)),
    ),
    Case("naive: TransformerXLPosition", position=XL, positions=contiguous(16)),
    Case(
        f"naive: DistanceAwarePosition {SEES_SCORES}, and there are few", positions=contiguous(128), position=PAIRWISE
    ),
    Case(f"blocked: DistanceAwarePosition {SEES_SCORES}: computed in blocks of 128 queries", position=PAIRWISE),
    Case("blocked: NoPosition does not change scores: computed in blocks of 128 queries", path="blocked"),
    Case(
        f"blocked: DistanceAwarePosition {SEES_SCORES}: computed in visible blocks for ",
        Window(20),
        contiguous(1024),
        PAIRWISE,
    ),
    Case(
        f"flex: AlibiPosition {SEES_SCORES}: one compiled kernel that indexes its terms by distance",
        position=ALIBI,
        device="cuda",
    ),
    Case(
        f"naive: AlibiPosition {SEES_SCORES}, and there are fewer than 128 queries",
        positions=(contiguous(100, 400), contiguous(500)),
        position=ALIBI,
        device="cuda",
    ),
    Case("flex: AlibiPosition", position=ALIBI, path="flex"),
    Case("path 'flex' needs a position that adds to scores by distance alone", position=PAIRWISE, path="flex"),
    Case("path 'flex' needs a position", position=ALIBI, path="flex", dropout=0.1),
    Case("blocked: AlibiPosition adds a number", position=ALIBI, device="cuda", width=8),
    Case("blocked: TransformerXLPosition has a vector", position=XL, device="cuda"),
    Case("naive: TransformerXLPosition", position=XL, positions=contiguous(100), device="cuda"),
    # forced paths under a mask alone
    Case("documents: forced", positions=packed(80, 120), path="documents"),
    Case("path 'documents' needs packed self-attention with the mask Causal() or AllKeys()", path="documents"),
    Case("path 'documents' needs packed", Window(20), packed(80, 120), path="documents"),
    Case("sparse: forced", path="sparse"),
    Case("path 'sparse' does not form the weights that dropout acts on", path="sparse", dropout=0.1),
    Case("flex: forced", path="flex"),
    Case("path 'flex' does not form the weights that dropout acts on", path="flex", dropout=0.1),
    Case("path 'flex' needs heads of 16 channels or more", path="flex", device="cuda", width=8),
    Case(DENSE, Window(20), contiguous(1024), path="sdpa"),
    # masks without a tensor
    Case("sdpa: every key is visible", AllKeys()),
    Case("sdpa: every key is visible", AllKeys(), (contiguous(30), contiguous(50)), device="cuda"),
    Case("sdpa: every key lies in the past", positions=(contiguous(1, 199), contiguous(200))),
    Case("sdpa: causal from the first token on, by torch's flag", dropout=0.1),
    Case("sdpa: causal with padding on the right, which no token sees", positions=right_padded(200, 80)),
    # other masks on a CPU
    Case("sdpa: the dense mask of Causal() for these positions", positions=(contiguous(20, 50), contiguous(70))),
    Case("sdpa: the dense mask of AllKeys() for these positions", AllKeys(), packed(2, 3)),
    Case("documents: 4 documents in 2 packed rows, one call each", AllKeys(), packed(150, 150)),
    Case("documents: 4 documents in 2 packed rows, one call each", AllKeys(), packed(150, 150), device="meta"),
    Case("documents: 4 documents in 2 packed rows, one call each", Window(20), packed(500, 524)),
    Case(DENSE, Window(20)),
    Case(f"{DENSE}: a sparse plan for each row would cost more than it saves", Window(20), with_roles(contiguous(400))),
    Case(f"{DENSE}, because dropout acts on the weights", Window(20), contiguous(1024), dropout=0.1),
    Case(f"sparse: {WINDOW} for ", Window(20), contiguous(1024)),
    Case(f"sparse: {WINDOW} for ", Window(20), with_roles(contiguous(1024))),
    Case(f"sdpa: the dense mask of {Window(390)} for these positions, which has too few", Window(390), contiguous(400)),
    # operations that torch can differentiate again
    Case("sdpa: causal from the first token on, by torch's flag", plain=True),
    Case(f"{DENSE}: only operations of torch", Window(20), contiguous(1024), plain=True),
    Case("naive: ShawPosition acts on the score and value of each pair: only op", position=SHAW, plain=True),
    # other masks on a GPU
    Case(f"flex: {WINDOW} compiled, for its visible blocks", Window(20), device="cuda"),
    Case(f"{DENSE}: FlexAttention is for 128 queries or more", Window(20), contiguous(100), device="cuda"),
    Case(f"{DENSE}: FlexAttention needs 16 channels a head", Window(20), device="cuda", width=8),
    Case(DENSE, Window(20), device="cuda", dropout=0.1),
)


def on_device(positions: TokenPositions, device: str) -> TokenPositions:
    if device == "cpu":
        return positions
    moved: TokenPositions = tree_map(lambda t: torch.empty(t.shape, dtype=t.dtype, device=device), positions)
    return moved


def make_call(case: Case) -> tuple[SoftmaxKernel, KernelCall]:
    queries, keys = case.positions if isinstance(case.positions[0], TokenPositions) else (case.positions,) * 2  # type: ignore[misc]
    query_positions = on_device(queries, case.device)
    key_positions = query_positions if queries is keys else on_device(keys, case.device)
    shapes = [(2, HEADS, each.position_ids.shape[1], case.width) for each in (queries, keys, keys)]
    q, k, v = (torch.empty(shape, device=case.device) for shape in shapes)
    kernel = SoftmaxKernel(case.mask, path=case.path, dropout=case.dropout)
    call = KernelCall(q, k, v, query_positions, key_positions, case.position())
    return kernel, call._replace(watch=lambda *_: None) if case.watched else call


def row_of(case: Case) -> tuple[str, Row | Refusal]:
    """What the kernel says of the call, and the row that decides."""
    # shapes alone stand for tensors on a GPU
    shapes_alone = FakeTensorMode(allow_non_fake_inputs=True) if case.device == "cuda" else nullcontext()
    with shapes_alone, plain_operations() if case.plain else nullcontext():
        kernel, call = make_call(case)
        softmax = kernel._softmax_call(call)
        try:
            return kernel.explain(call), choose(softmax)
        except ValueError as error:
            refusals = [row for section in TABLE if section.applies(softmax) for row in section.rows]
            refused = next(row for row in refusals if isinstance(row, Refusal) and row.applies(softmax))
            return str(error).removeprefix("SoftmaxKernel: "), refused


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.says)
def test_a_call_takes_its_path(case: Case) -> None:
    says, _ = row_of(case)
    # a reason with numbers of a plan, or one that was given in full before, is given by its beginning
    assert says.startswith(case.says)
    if case.says in (DENSE, "naive: forced") or case.says.endswith("for these positions"):
        assert says == case.says


@pytest.mark.usefixtures("unchecked")
def test_every_row_of_the_table_decides_some_call() -> None:
    taken = {id(row_of(case)[1]) for case in CASES}
    rows = [(section.title, row) for section in TABLE for row in section.rows]
    assert [(title, row.reason) for title, row in rows if id(row) not in taken] == []
