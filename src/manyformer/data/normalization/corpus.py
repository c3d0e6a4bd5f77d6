"""The corpus of normalization pairs: sampled with a seed, with distinct sources and unambiguous targets.

A pair is used only if no convention of any language gives its source a different reading."""

import datetime
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from itertools import product
from typing import NamedTuple

import numpy as np

from manyformer.data.normalization.formats import (
    CURRENCIES,
    FORMAT_WEIGHTS,
    LANGUAGES,
    NUMBER,
    FormattedValue,
    ValueFormat,
    amount_reading,
    compact_scale,
    format_compact,
    format_date,
    format_money,
    locale_of,
    spell_number,
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


# Pairs of thousands and decimal separators that the languages use.
SEPARATORS = ((",", "."), (".", ","), (" ", ","))
_NUMBER_PATTERNS = {
    (g, p): re.compile(rf"-?(\d+|\d{{1,3}}({re.escape(g)}\d{{3}})+)({re.escape(p)}\d+)?") for g, p in SEPARATORS
}
_TIME = re.compile(r"(\d{1,2})[.:](\d\d)[.:](\d\d)")
_DAY = 23
_YEAR = 1999


class LocaleConventions:
    """The conventions of all languages: units and month names next to digits, number names, and orders of dates."""

    def __init__(self) -> None:
        # Text around a number -> the currencies or powers of ten that it can mean.
        self._units: dict[str, set[str]] = {}
        for text, unit in _amount_texts():
            self._units.setdefault(NUMBER.sub("#", text), set()).add(unit)
        # Text around the day and the year -> the months that it can mean; None if the month is in digits.
        self._months: dict[str, set[int | None]] = {}
        for text, month in _date_texts():
            self._months.setdefault(_mask_digits(text), set()).add(
                month if _mask_digits(text).count("#") == 2 else None
            )
        # Numbers of one or two words, the only ones that languages can share ("tres" is 3 in Spanish, 60 in Danish).
        self._number_names: dict[str, set[str]] = {}
        for language, number in product(LANGUAGES, [*range(130), *range(200, 1000, 100), 1000, 10_000, 10**6]):
            self._number_names.setdefault(spell_number(number, language).casefold(), set()).add(str(number))
        patterns = {locale_of(language).datetime_skeletons["yMd"].pattern for language in LANGUAGES}
        self._date_patterns = [_date_pattern(pattern) for pattern in sorted(patterns)]

    def is_unambiguous(self, value: FormattedValue) -> bool:
        """Whether the text of `value` has no reading other than the intended one."""
        readings = self.readings(value.ambiguous_text)
        if not value.reading:
            return not readings
        return readings <= {value.reading}

    def readings(self, text: str) -> set[str]:
        """All readings of a text under any convention; month names count only if they are ambiguous."""
        readings = {f"{value:f}" for value in number_values(text)} | self._number_names.get(text.casefold(), set())
        if time_match := _TIME.fullmatch(text):
            readings |= _iso_format(datetime.time, *map(int, time_match.groups()))
        for date_pattern in self._date_patterns:
            if date_match := date_pattern.fullmatch(text):
                readings |= _iso_format(datetime.date, *(int(date_match[name]) for name in "yMd"))
        for unit in self._units.get(NUMBER.sub("#", text), ()):
            for digits in NUMBER.findall(text):
                readings |= {amount_reading(value, unit) for value in number_values(digits)}
        months = self._months.get(_mask_digits(text), set())
        if len(months) > 1:
            return readings | {f"month {month}" for month in months}
        return readings


def number_values(text: str) -> set[Decimal]:
    """The values of digits with separators under each convention."""
    digit_strings = (
        text.replace(group, "").replace(point, ".")
        for (group, point), pattern in _NUMBER_PATTERNS.items()
        if pattern.fullmatch(text)
    )
    return {Decimal(digits) for digits in digit_strings}


def _amount_texts() -> Iterator[tuple[str, str]]:
    # Values that cover the plural forms which CLDR distinguishes.
    values = [Decimal(value) for value in ("1", "2", "5", "21", "1.5")]
    for language in LANGUAGES:
        for currency, value, named in product(CURRENCIES, values, (True, False)):
            yield format_money(value, currency, language, named=named), currency
        for value, power in product(values, range(3, 13)):
            text = format_compact(value.scaleb(power), language)
            if text is not None:
                yield text, str(compact_scale(text, value.scaleb(power), language))


def _date_texts() -> Iterator[tuple[str, int]]:
    for language in LANGUAGES:
        for style, month in product(("long", "medium"), range(1, 13)):
            yield format_date(datetime.date(_YEAR, month, _DAY), style, language), month
        # One week of each month covers the names of all weekdays.
        for month, day in product(range(1, 13), range(_DAY - 1, _DAY + 6)):
            yield format_date(datetime.date(_YEAR, month, day), "full", language), month


def _mask_digits(text: str) -> str:
    return re.sub(r"\d+", "#", text)


def _date_pattern(pattern: str) -> re.Pattern[str]:
    groups = {"d": r"(?P<d>\d{1,2})", "M": r"(?P<M>\d{1,2})", "y": r"(?P<y>\d{4})"}
    fields = re.findall(r"d+|M+|y+|[^dMy]+", pattern.replace("'", ""))
    return re.compile("".join(groups.get(field[0], re.escape(field)) for field in fields))


def _iso_format(constructor: Callable[[int, int, int], datetime.date | datetime.time], *parts: int) -> set[str]:
    try:
        return {constructor(*parts).isoformat()}
    except ValueError:
        return set()


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
