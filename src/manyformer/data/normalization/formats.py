"""Values as languages write them: CLDR's patterns through babel, CLDR's spelling rules through unicode-rbnf."""

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
    """A text and its plain form. `part` is what could be read in other ways, `answer` how it is meant."""

    source: str
    target: str
    part: str = ""
    answer: str = ""


ValueFormat = Callable[[str, np.random.Generator], FormattedValue | None]


def write(kind: ValueFormat, language: str, random: np.random.Generator) -> FormattedValue | None:
    """A random value of this kind in this language; None where the language has no way to write it."""
    return kind(language, random)


def plain_spaces(text: str) -> str:
    """The text as people type it: ordinary spaces, no invisible marks."""
    text = re.sub(r"[\u00ad\u200b\u200e\u200f\u061c]", "", text)
    return re.sub(r"\s+", " ", text).strip()


def date(language: str, random: np.random.Generator) -> FormattedValue:
    """A day between 1850 and 2100."""
    day = _FIRST_DAY + datetime.timedelta(days=int(random.integers(_DAYS)))
    style = ("full", "long", "medium", "numeric")[int(random.integers(4))]
    source = write_date(day, style, language)
    return FormattedValue(source, day.isoformat(), source, day.isoformat())


def date_time(language: str, random: np.random.Generator) -> FormattedValue:
    """A day and a minute."""
    from babel import dates

    day = date(language, random)
    clock = datetime.time(int(random.integers(24)), int(random.integers(60)))
    pattern = str(locale_of(language).datetime_formats["medium"]).replace("'", "")
    clock_text = dates.format_time(clock, "short", locale=locale_of(language))
    text = pattern.replace("{1}", day.source).replace("{0}", clock_text)
    return FormattedValue(plain_spaces(text), f"{day.target}T{clock:%H:%M}", day.source, day.target)


def time(language: str, random: np.random.Generator) -> FormattedValue:
    """A second of the day."""
    from babel import dates

    clock = datetime.time(int(random.integers(24)), int(random.integers(60)), int(random.integers(60)))
    source = plain_spaces(dates.format_time(clock, "medium", locale=locale_of(language)))
    return FormattedValue(source, clock.isoformat(), source, clock.isoformat())


def decimal(language: str, random: np.random.Generator) -> FormattedValue:
    """A number in digits with the language's separators."""
    value = _value(random)
    source = _digits(value, language)
    return FormattedValue(source, f"{value:f}", source, f"{value:f}")


def percent(language: str, random: np.random.Generator) -> FormattedValue:
    """A percentage with up to two decimals."""
    from babel import numbers

    value = Decimal(int(random.integers(1, 20_000))).scaleb(-int(random.integers(3)))
    text = plain_spaces(numbers.format_percent(value / 100, locale=locale_of(language), decimal_quantization=False))
    return FormattedValue(text, f"{value:f}%", _number_in(text), f"{value:f}")


def money(language: str, random: np.random.Generator) -> FormattedValue:
    """An amount with the currency's sign or its name."""
    currency = CURRENCIES[int(random.integers(len(CURRENCIES)))]
    cents = Decimal(int(10 ** random.uniform(0, 7)))
    value = cents if currency == "JPY" else cents.scaleb(-2)
    source = write_money(value, currency, language, named=bool(random.integers(2)))
    return FormattedValue(source, f"{value} {currency}", source, amount(value, currency))


def compact(language: str, random: np.random.Generator) -> FormattedValue | None:
    """A round number with a word for its power of ten ("1,23 Millionen")."""
    value = Decimal(int(random.integers(100, 1000))).scaleb(int(random.integers(1, 11)))
    source = write_compact(value, language)
    if source is None:
        return None
    power = scale(source, value, language)
    return FormattedValue(source, f"{value:f}", source, amount(value / power, power))


def spelled(language: str, random: np.random.Generator) -> FormattedValue:
    """A whole number in words."""
    value = int(10 ** random.uniform(0, 7)) - 1
    source = spell(value, language)
    return FormattedValue(source, str(value), source, str(value))


# How often each kind is drawn.
KINDS: dict[ValueFormat, int] = {
    spelled: 8,
    date: 8,
    date_time: 3,
    money: 4,
    compact: 3,
    decimal: 2,
    percent: 1,
    time: 1,
}


def write_date(day: datetime.date, style: str, language: str) -> str:
    """A date in one of CLDR's styles, the year always whole."""
    from babel import dates

    style = locale_of(language).datetime_skeletons["yMd"].pattern if style == "numeric" else style
    return plain_spaces(dates.format_date(day, style, locale=locale_of(language)))


def write_money(value: Decimal, currency: str, language: str, *, named: bool) -> str:
    """An amount with the currency's name or its sign."""
    from babel import numbers

    style: Literal["name", "standard"] = "name" if named else "standard"
    return plain_spaces(numbers.format_currency(value, currency, locale=locale_of(language), format_type=style))


def write_compact(value: Decimal, language: str) -> str | None:
    """A number with a word for its power of ten; None where the language writes it in digits alone."""
    from babel import numbers

    style: Literal["long", "short"] = "long" if "long" in locale_of(language).compact_decimal_formats else "short"
    text = numbers.format_compact_decimal(value, format_type=style, locale=locale_of(language), fraction_digits=2)
    return None if NUMBER.fullmatch(plain_spaces(text)) else plain_spaces(text)


def scale(source: str, value: Decimal, language: str) -> Decimal:
    """What the words of a compact number multiply its digits by ("mille" has none, which counts as 1)."""
    found = NUMBER.search(source)
    if found is None:
        return value
    symbols = locale_of(language).number_symbols["latn"]
    digits = found[0].replace(plain_spaces(symbols["group"]) or " ", "").replace(symbols["decimal"], ".")
    return value / Decimal(digits)


def spell(value: int, language: str) -> str:
    """A whole number in words."""
    engine = _speller(_RULES.get(language, language))
    return plain_spaces(engine.format_number(value, ruleset_names=["spellout-numbering"]).text)


def amount(value: Decimal, unit: str | Decimal) -> str:
    """The reading of a number and of the word or sign beside it."""
    return f"{value.normalize():f} x {unit}"


def _number_in(text: str) -> str:
    found = NUMBER.search(text)
    return found[0] if found else ""


def _value(random: np.random.Generator) -> Decimal:
    whole = int(10 ** random.uniform(0, 9)) * (1 if random.random() < 0.8 else -1)
    places = int(random.integers(5))
    return Decimal(whole).scaleb(-places)


def _digits(value: Decimal, language: str) -> str:
    from babel import numbers

    return plain_spaces(numbers.format_decimal(value, locale=locale_of(language), decimal_quantization=False))


@cache
def locale_of(language: str) -> Any:
    from babel import Locale

    return Locale.parse(language)


@cache
def _speller(language: str) -> Any:
    from unicode_rbnf import RbnfEngine

    return RbnfEngine.for_language(language)
