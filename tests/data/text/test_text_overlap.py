"""Documents overlap if they share enough text, wherever it begins; a comparison of all windows finds the same."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from manyformer.data.storage.token_shards import TokenShard, open_shard, write_shards
from manyformer.data.text import text_overlap
from manyformer.data.text.text_overlap import OVERLAP_CHARACTERS, PASSAGE_CHARACTERS, find_overlap
from manyformer.data.tokenizers.native_tokenizers import ByteTokenizer

DRAW = np.random.default_rng(0)


def drawn(length: int) -> list[int]:
    return DRAW.integers(5, 400, length).tolist()


def shard_of(folder: Path, *documents: list[int]) -> TokenShard:
    """Documents with a start and an end token, as many characters as tokens."""
    with write_shards(folder, ["text"], 1000) as writers:
        for document in documents:
            writers.shards["text"].add([1, *document, 2], starts_document=True, text="x" * (len(document) + 2))
    return open_shard(folder, "text", writers.facts["text"])


def pairs(text: TokenShard, reference: TokenShard) -> list[tuple[int, int]]:
    overlap = find_overlap(text, reference, ByteTokenizer())
    return list(zip(overlap.documents.tolist(), overlap.reference_documents.tolist(), strict=True))


def test_what_overlaps(tmp_path: Path) -> None:
    page, long, short = drawn(OVERLAP_CHARACTERS + 2 * PASSAGE_CHARACTERS), drawn(9000), drawn(50)
    fresh = [drawn(3000) for _ in range(3)]
    text = shard_of(
        tmp_path / "text",
        fresh[0],
        # a page from the middle of a document, behind other text
        drawn(777) + page + drawn(4000),
        short,
        # half of a document of the reference
        drawn(3) + long[:4700] + drawn(20),
        short + drawn(1),
        # a heading that several documents have
        drawn(300) + fresh[2][:900] + drawn(8000),
        long,
    )
    reference = shard_of(tmp_path / "reference", fresh[1], drawn(1234) + page + drawn(5000), long, short, fresh[2])
    assert pairs(text, reference) == [(1, 1), (2, 3), (3, 2), (6, 2)]
    assert find_overlap(text, reference, ByteTokenizer()).overlapping.tolist() == [1, 2, 3, 6]
    nothing = shard_of(tmp_path / "nothing", drawn(5000), drawn(10))
    none = find_overlap(shard_of(tmp_path / "none", *fresh[:2]), nothing, ByteTokenizer())
    assert (none.documents.tolist(), none.shared_fraction) == ([], 0.0)
    full = find_overlap(reference, reference, ByteTokenizer())
    assert full.overlapping.tolist() == list(range(5))
    assert full.shared_fraction == 1.0
    assert pairs(shard_of(tmp_path / "empty"), reference) == []


def test_passages_are_found_as_by_comparing_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of two different tokens share many passages; chunks that do not divide the reference."""
    monkeypatch.setattr(text_overlap, "PASSAGE_CHARACTERS", 6)
    monkeypatch.setattr(text_overlap, "OVERLAP_CHARACTERS", 10)
    monkeypatch.setattr(text_overlap, "_WINDOWS_PER_CHUNK", 97)
    sizes = DRAW.integers(0, 60, (2, 12))
    text, reference = (
        shard_of(tmp_path / str(number), *(DRAW.integers(5, 7, size).tolist() for size in row))
        for number, row in enumerate(sizes)
    )

    def content(shard: TokenShard, document: int) -> list[int]:
        return shard.tokens[shard.offsets[document] + 1 : shard.offsets[document + 1] - 1].tolist()

    expected = []
    for a, b in itertools.product(range(12), range(12)):
        tokens, reference_tokens = content(text, a), content(reference, b)
        windows = {tuple(reference_tokens[start : start + 6]) for start in range(len(reference_tokens) - 5)}
        covered = set[int]()
        if len(tokens) >= 6:
            for start in [*range(0, len(tokens) - 5, 6), len(tokens) - 6]:
                if tuple(tokens[start : start + 6]) in windows:
                    # what the last passage repeats of the one before it is counted with that one
                    covered |= set(range(start if start % 6 == 0 else len(tokens) // 6 * 6, start + 6))
        if (covered and len(covered) >= min(10, len(tokens) / 2, len(reference_tokens) / 2)) or (
            0 < len(tokens) < 6 and tokens == reference_tokens
        ):
            expected.append((a, b))
    assert len(expected) > 5
    assert pairs(text, reference) == expected
