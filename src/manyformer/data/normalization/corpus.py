"""The pairs themselves: drawn by a seed, distinct, and none with a second possible answer."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from manyformer.data.normalization.ambiguity import LocaleConventions
from manyformer.data.normalization.formats import KINDS, LANGUAGES, FormattedValue, ValueFormat, write

COUNT = 100_000


class NormalizationPair(NamedTuple):
    """A text in some language and its plain form, for instance "7. März 1998" and "1998-03-07"."""

    source: str
    target: str


def pairs(count: int = COUNT, seed: int = 0) -> list[NormalizationPair]:
    """So many pairs with different sources (case set aside), the same for equal seeds."""
    atlas = LocaleConventions()
    targets: dict[str, str] = {}
    sources: dict[str, str] = {}
    torn: set[str] = set()
    for source, target in _drawn(seed, atlas):
        key = source.casefold()
        if targets.setdefault(key, target) != target:
            # Two languages mean different things by the same words: neither is taken.
            torn.add(key)
            sources.pop(key, None)
        elif key not in torn:
            sources[key] = source
            if len(sources) == count:
                break
    return [NormalizationPair(source, targets[key]) for key, source in sources.items()]


def _drawn(seed: int, atlas: LocaleConventions) -> Iterator[NormalizationPair]:
    random = np.random.default_rng(seed)
    kinds: list[ValueFormat] = list(KINDS)
    weights = np.array([KINDS[kind] for kind in kinds])
    while True:
        # Drawn in blocks: one call of numpy's for each number would take longer than the rest.
        for kind, language in zip(
            random.choice(len(kinds), 1000, p=weights / weights.sum()), random.integers(len(LANGUAGES), size=1000)
        ):
            written: FormattedValue | None = write(kinds[kind], LANGUAGES[language], random)
            if written and written.source != written.target and atlas.clear(written):
                yield NormalizationPair(written.source, written.target)
