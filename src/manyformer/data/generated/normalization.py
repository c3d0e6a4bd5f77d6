"""Generated pairs of text normalization: dates, amounts and numbers in the formats of 25 languages, to plain form.

Values are formatted by CLDR's patterns (babel) and spelling rules (unicode-rbnf). They are sampled with a seed, and a
pair is used only if no convention of any language gives its source a different reading."""

import datetime
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import cache
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np

DEFAULT_PAIRS = 100_000
# Languages of several scripts and orders, each with spelling rules in CLDR.
_LANGUAGES = "en en_GB de fr es it pt nl sv da nb pl cs fi hu ro tr el ru uk ja zh ko vi id"
LANGUAGES = tuple(_LANGUAGES.split())
_CURRENCIES = "EUR USD GBP JPY CHF SEK NOK DKK PLN CZK HUF TRY RUB CNY INR BRL"
CURRENCIES = tuple(_CURRENCIES.split())
_RULES = {"en_GB": "en", "nb": "no"}
_FIRST_DAY = datetime.date(1850, 1, 1)
_DAYS = 250 * 365
NUMBER = re.compile(r"-?\d(?:[\d., ]*\d)?")
# Pairs of thousands and decimal separators that the languages use.
SEPARATORS = ((",", "."), (".", ","), (" ", ","))
_NUMBER_PATTERNS = {
    (g, p): re.compile(rf"-?(\d+|\d{{1,3}}({re.escape(g)}\d{{3}})+)({re.escape(p)}\d+)?") for g, p in SEPARATORS
}
_TIME = re.compile(r"(\d{1,2})[.:](\d\d)[.:](\d\d)")
_DAY = 23
_YEAR = 1999


class NormalizationPair(NamedTuple):
    """A text in some language and its plain form, for instance "7. März 1998" and "1998-03-07"."""

    source: str
    target: str


class FormattedValue(NamedTuple):
    """A text with its plain form; `ambiguous_text` is its part that can be ambiguous, `reading` the meaning of that."""

    source: str
    target: str
    ambiguous_text: str = ""
    reading: str = ""


ValueFormat = Callable[[str, np.random.Generator], FormattedValue | None]
"""A random value in a language; None if the language does not have the format."""


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


def normalize_spaces(text: str) -> str:
    """The text with ordinary single spaces and without invisible marks."""
    text = re.sub(r"[\u00ad\u200b\u200e\u200f\u061c]", "", text)
    return re.sub(r"\s+", " ", text).strip()


def random_date(language: str, random: np.random.Generator) -> FormattedValue:
    """A random date between 1850 and 2100."""
    day = _FIRST_DAY + datetime.timedelta(days=int(random.integers(_DAYS)))
    style = ("full", "long", "medium", "numeric")[int(random.integers(4))]
    source = format_date(day, style, language)
    return FormattedValue(source, day.isoformat(), source, day.isoformat())


def random_date_time(language: str, random: np.random.Generator) -> FormattedValue:
    """A random date and time, to the minute."""
    from babel import dates

    day = random_date(language, random)
    clock = datetime.time(int(random.integers(24)), int(random.integers(60)))
    pattern = str(locale_of(language).datetime_formats["medium"]).replace("'", "")
    clock_text = dates.format_time(clock, "short", locale=locale_of(language))
    text = pattern.replace("{1}", day.source).replace("{0}", clock_text)
    return FormattedValue(normalize_spaces(text), f"{day.target}T{clock:%H:%M}", day.source, day.target)


def random_time(language: str, random: np.random.Generator) -> FormattedValue:
    """A random time of day, to the second."""
    from babel import dates

    clock = datetime.time(int(random.integers(24)), int(random.integers(60)), int(random.integers(60)))
    source = normalize_spaces(dates.format_time(clock, "medium", locale=locale_of(language)))
    return FormattedValue(source, clock.isoformat(), source, clock.isoformat())


def random_decimal(language: str, random: np.random.Generator) -> FormattedValue:
    """A random number in digits with the language's separators."""
    value = _random_number(random)
    source = _format_decimal(value, language)
    return FormattedValue(source, f"{value:f}", source, f"{value:f}")


def random_percentage(language: str, random: np.random.Generator) -> FormattedValue:
    """A random percentage with up to two decimals."""
    from babel import numbers

    value = Decimal(int(random.integers(1, 20_000))).scaleb(-int(random.integers(3)))
    text = normalize_spaces(numbers.format_percent(value / 100, locale=locale_of(language), decimal_quantization=False))
    return FormattedValue(text, f"{value:f}%", _first_number(text), f"{value:f}")


def random_amount(language: str, random: np.random.Generator) -> FormattedValue:
    """A random amount with the currency's sign or its name, to the smallest unit in which CLDR writes the currency."""
    from babel import numbers

    currency = CURRENCIES[int(random.integers(len(CURRENCIES)))]
    smallest_units = Decimal(int(10 ** random.uniform(0, 7)))
    value = smallest_units.scaleb(-numbers.get_currency_precision(currency))
    source = format_money(value, currency, language, named=bool(random.integers(2)))
    return FormattedValue(source, f"{value} {currency}", source, amount_reading(value, currency))


def random_compact_number(language: str, random: np.random.Generator) -> FormattedValue | None:
    """A random round number with a word for its power of ten ("1,23 Millionen")."""
    value = Decimal(int(random.integers(100, 1000))).scaleb(int(random.integers(1, 11)))
    source = format_compact(value, language)
    if source is None:
        return None
    power = compact_scale(source, value, language)
    return FormattedValue(source, f"{value:f}", source, amount_reading(value / power, power))


def random_spelled_number(language: str, random: np.random.Generator) -> FormattedValue:
    """A random integer spelled out in words."""
    value = int(10 ** random.uniform(0, 7)) - 1
    source = spell_number(value, language)
    return FormattedValue(source, str(value), source, str(value))


# Sampling weights of the formats.
FORMAT_WEIGHTS: dict[ValueFormat, int] = {
    random_spelled_number: 8,
    random_date: 8,
    random_date_time: 3,
    random_amount: 4,
    random_compact_number: 3,
    random_decimal: 2,
    random_percentage: 1,
    random_time: 1,
}


def format_date(day: datetime.date, style: str, language: str) -> str:
    """Format a date in one of CLDR's styles, always with the full year."""
    from babel import dates

    if style == "numeric":
        style = locale_of(language).datetime_skeletons["yMd"].pattern
    return normalize_spaces(dates.format_date(day, style, locale=locale_of(language)))


def format_money(value: Decimal, currency: str, language: str, *, named: bool) -> str:
    """Format an amount with the currency's name or its sign."""
    from babel import numbers

    style: Literal["name", "standard"] = "name" if named else "standard"
    return normalize_spaces(numbers.format_currency(value, currency, locale=locale_of(language), format_type=style))


def format_compact(value: Decimal, language: str) -> str | None:
    """Format a number with a word for its power of ten; None if the language uses digits alone."""
    from babel import numbers

    if "long" in locale_of(language).compact_decimal_formats:
        style: Literal["long", "short"] = "long"
    else:
        style = "short"
    text = numbers.format_compact_decimal(value, format_type=style, locale=locale_of(language), fraction_digits=2)
    if NUMBER.fullmatch(normalize_spaces(text)):
        return None
    return normalize_spaces(text)


def compact_scale(source: str, value: Decimal, language: str) -> Decimal:
    """The factor by which the words of a compact number multiply its digits (1 is implied by "mille")."""
    match = NUMBER.search(source)
    if match is None:
        return value
    symbols = locale_of(language).number_symbols["latn"]
    digits = match[0].replace(normalize_spaces(symbols["group"]) or " ", "").replace(symbols["decimal"], ".")
    return value / Decimal(digits)


def spell_number(value: int, language: str) -> str:
    """Spell an integer out in words."""
    engine = _spelling_engine(_RULES.get(language, language))
    return normalize_spaces(engine.format_number(value, ruleset_names=["spellout-numbering"]).text)


def amount_reading(value: Decimal, unit: str | Decimal) -> str:
    """The canonical reading of a number with its unit (a currency or a power of ten)."""
    return f"{value.normalize():f} x {unit}"


def _first_number(text: str) -> str:
    match = NUMBER.search(text)
    if match:
        return match[0]
    return ""


def _random_number(random: np.random.Generator) -> Decimal:
    digits = int(10 ** random.uniform(0, 9)) * (1 if random.random() < 0.8 else -1)
    decimals = int(random.integers(5))
    return Decimal(digits).scaleb(-decimals)


def _format_decimal(value: Decimal, language: str) -> str:
    from babel import numbers

    return normalize_spaces(numbers.format_decimal(value, locale=locale_of(language), decimal_quantization=False))


@cache
def locale_of(language: str) -> Any:
    from babel import Locale

    return Locale.parse(language)


@cache
def _spelling_engine(language: str) -> Any:
    from unicode_rbnf import RbnfEngine

    return RbnfEngine.for_language(language)
