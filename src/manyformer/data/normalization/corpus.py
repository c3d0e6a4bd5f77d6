"""The corpus of normalization pairs: sampled with a seed, with distinct sources and unambiguous targets."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from manyformer.data.normalization.ambiguity import LocaleConventions
from manyformer.data.normalization.formats import (
    FORMAT_WEIGHTS,
    LANGUAGES,
    FormattedValue,
    ValueFormat,
)

DEFAULT_PAIRS = 100_000


class NormalizationPair(NamedTuple):
    """A text in some language and its plain form, for instance "7. März 1998" and "1998-03-07"."""

    source: str
    target: str


def generate_pairs(count: int = DEFAULT_PAIRS, seed: int = 0) -> list[NormalizationPair]:
    """Generate `count` pairs with sources that differ beyond case; equal seeds give equal pairs."""
    conventions = LocaleConventions()
    targets: dict[str, str] = {}
    sources: dict[str, str] = {}
    conflicting: set[str] = set()
    for source, target in _sample_pairs(seed, conventions):
        key = source.casefold()
        if targets.setdefault(key, target) != target:
            # The same text has different meanings in two languages: neither pair is used.
            conflicting.add(key)
            sources.pop(key, None)
        elif key not in conflicting:
            sources[key] = source
            if len(sources) == count:
                break
    return [NormalizationPair(source, targets[key]) for key, source in sources.items()]


def _sample_pairs(seed: int, conventions: LocaleConventions) -> Iterator[NormalizationPair]:
    random = np.random.default_rng(seed)
    formats: list[ValueFormat] = list(FORMAT_WEIGHTS)
    weights = np.array(list(FORMAT_WEIGHTS.values()))
    while True:
        # Drawn in blocks, since one NumPy call per pair would dominate the run time.
        for format_index, language in zip(
            random.choice(len(formats), 1000, p=weights / weights.sum()), random.integers(len(LANGUAGES), size=1000)
        ):
            value: FormattedValue | None = formats[format_index](LANGUAGES[language], random)
            if value and value.source != value.target and conventions.is_unambiguous(value):
                yield NormalizationPair(value.source, value.target)
