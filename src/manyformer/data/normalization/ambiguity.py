"""How else a text could be read: a pair is kept only if no convention of any of the languages gives another answer."""

import datetime
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from itertools import product

from manyformer.data.normalization.formats import (
    CURRENCIES,
    LANGUAGES,
    NUMBER,
    FormattedValue,
    amount,
    locale_of,
    scale,
    spell,
    write_compact,
    write_date,
    write_money,
)

# Thousands and decimal signs, as the languages pair them.
SEPARATORS = ((",", "."), (".", ","), (" ", ","))
_NUMBERS = {
    (g, p): re.compile(rf"-?(\d+|\d{{1,3}}({re.escape(g)}\d{{3}})+)({re.escape(p)}\d+)?") for g, p in SEPARATORS
}
_CLOCK = re.compile(r"(\d{1,2})[.:](\d\d)[.:](\d\d)")
_DAY, _YEAR = 23, 1999


class LocaleConventions:
    """All conventions of all languages: what words mean beside digits, and in which orders dates are written."""

    def __init__(self) -> None:
        # The text around a number, and the currencies or powers of ten that it can mean.
        self._units: dict[str, set[str]] = {}
        for text, unit in _amounts():
            self._units.setdefault(NUMBER.sub("#", text), set()).add(unit)
        # The text around the day and the year, and the months that it can mean; None where the month is in digits.
        self._months: dict[str, set[int | None]] = {}
        for text, month in _dates():
            self._months.setdefault(_around(text), set()).add(month if _around(text).count("#") == 2 else None)
        # Numbers of one word or two, the only ones that languages can share ("tres" is 3 in Spanish, 60 in Danish).
        self._words: dict[str, set[str]] = {}
        for language, number in product(LANGUAGES, [*range(130), *range(200, 1000, 100), 1000, 10_000, 10**6]):
            self._words.setdefault(spell(number, language).casefold(), set()).add(str(number))
        patterns = {locale_of(language).datetime_skeletons["yMd"].pattern for language in LANGUAGES}
        self._orders = [_order(pattern) for pattern in sorted(patterns)]

    def clear(self, written: FormattedValue) -> bool:
        """Whether the text can be read in no other way than the one that is meant."""
        readings = self.readings(written.part)
        return not readings if not written.answer else readings <= {written.answer}

    def readings(self, text: str) -> set[str]:
        """What a text may mean under every convention; empty where none finds more than one answer to weigh."""
        found = {f"{value:f}" for value in numbers(text)} | self._words.get(text.casefold(), set())
        if clock := _CLOCK.fullmatch(text):
            found |= _instant(datetime.time, *map(int, clock.groups()))
        for order in self._orders:
            if day := order.fullmatch(text):
                found |= _instant(datetime.date, *(int(day[name]) for name in "yMd"))
        for unit in self._units.get(NUMBER.sub("#", text), ()):
            for digits in NUMBER.findall(text):
                found |= {amount(value, unit) for value in numbers(digits)}
        months = self._months.get(_around(text), set())
        return found | {f"month {month}" for month in months} if len(months) > 1 else found


def numbers(text: str) -> set[Decimal]:
    """The values of digits and separators, under every convention."""
    found = (
        text.replace(group, "").replace(point, ".") for (group, point), sign in _NUMBERS.items() if sign.fullmatch(text)
    )
    return {Decimal(plain) for plain in found}


def _amounts() -> Iterator[tuple[str, str]]:
    # Values that take each of the plural forms which CLDR tells apart.
    values = [Decimal(value) for value in ("1", "2", "5", "21", "1.5")]
    for language in LANGUAGES:
        for currency, value, named in product(CURRENCIES, values, (True, False)):
            yield write_money(value, currency, language, named=named), currency
        for value, power in product(values, range(3, 13)):
            text = write_compact(value.scaleb(power), language)
            if text is not None:
                yield text, str(scale(text, value.scaleb(power), language))


def _dates() -> Iterator[tuple[str, int]]:
    for language in LANGUAGES:
        for style, month in product(("long", "medium"), range(1, 13)):
            yield write_date(datetime.date(_YEAR, month, _DAY), style, language), month
        # A week of each month holds each day's name.
        for month, day in product(range(1, 13), range(_DAY - 1, _DAY + 6)):
            yield write_date(datetime.date(_YEAR, month, day), "full", language), month


def _around(text: str) -> str:
    return re.sub(r"\d+", "#", text)


def _order(pattern: str) -> re.Pattern[str]:
    signs = {"d": r"(?P<d>\d{1,2})", "M": r"(?P<M>\d{1,2})", "y": r"(?P<y>\d{4})"}
    fields = re.findall(r"d+|M+|y+|[^dMy]+", pattern.replace("'", ""))
    return re.compile("".join(signs.get(field[0], re.escape(field)) for field in fields))


def _instant(make: Callable[[int, int, int], datetime.date | datetime.time], *parts: int) -> set[str]:
    try:
        return {make(*parts).isoformat()}
    except ValueError:
        return set()
