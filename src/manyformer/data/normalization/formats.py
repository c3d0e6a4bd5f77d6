"""Random values in the formats of a language: CLDR's patterns (babel) and spelling rules (unicode-rbnf)."""

import datetime
import re
from collections.abc import Callable
from decimal import Decimal
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np

# Languages of several scripts and orders, each with spelling rules in CLDR.
_LANGUAGES = "en en_GB de fr es it pt nl sv da nb pl cs fi hu ro tr el ru uk ja zh ko vi id"
LANGUAGES = tuple(_LANGUAGES.split())
_CURRENCIES = "EUR USD GBP JPY CHF SEK NOK DKK PLN CZK HUF TRY RUB CNY INR BRL"
CURRENCIES = tuple(_CURRENCIES.split())
_RULES = {"en_GB": "en", "nb": "no"}
_FIRST_DAY = datetime.date(1850, 1, 1)
_DAYS = 250 * 365
NUMBER = re.compile(r"-?\d(?:[\d., ]*\d)?")


class FormattedValue(NamedTuple):
    """A text with its plain form; `ambiguous_text` is its part that can be ambiguous, `reading` the meaning of that."""

    source: str
    target: str
    ambiguous_text: str = ""
    reading: str = ""


ValueFormat = Callable[[str, np.random.Generator], FormattedValue | None]
"""A random value in a language; None if the language does not have the format."""


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
