"""The corpora that come without a download: the standard library's source, and generated pairs."""

import datetime
import re
import sysconfig
from collections import Counter
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from manyformer.base.errors import UserError
from manyformer.config import PairsData, TextData
from manyformer.data import open_data
from manyformer.data.generated import normalization
from manyformer.data.generated.normalization import (
    LANGUAGES,
    FormattedValue,
    LocaleConventions,
    format_date,
    number_values,
    spell_number,
)
from manyformer.data.text import pair_tables, text_sources


@pytest.fixture(scope="module")
def pairs() -> list[normalization.NormalizationPair]:
    return normalization.generate_pairs(6000, seed=0)


def test_pairs_are_distinct_plain_and_the_same_for_a_seed(pairs: list[normalization.NormalizationPair]) -> None:
    assert len(pairs) == len({pair.source.casefold() for pair in pairs}) == 6000
    assert normalization.generate_pairs(300, seed=0) == normalization.generate_pairs(300, seed=0)
    assert normalization.generate_pairs(300, seed=0) != normalization.generate_pairs(300, seed=1)
    plain = re.compile(r"\d{4}-\d\d-\d\d(T\d\d:\d\d)?|\d\d:\d\d:\d\d|-?\d+(\.\d+)?|\d+(\.\d+)?%|\d+(\.\d\d)? [A-Z]{3}")
    assert all(plain.fullmatch(pair.target) for pair in pairs)
    assert not any(pair.source == pair.target for pair in pairs)
    # Nothing that people could not type.
    assert not any(re.search(r"[\u00a0\u00ad\u200b-\u200f\u202f]|  |^ | $", pair.source) for pair in pairs)
    kinds = Counter(re.sub(r"\d+", "9", pair.target) for pair in pairs)
    assert min(kinds[kind] for kind in ("9-9-9", "9-9-9T9:9", "9", "9.9", "9.9 EUR", "9.9%", "9:9:9")) > 20


@pytest.mark.parametrize(
    ("language", "number", "words"),
    [
        ("en", 34567, "thirty-four thousand five hundred sixty-seven"),
        ("de", 34567, "vierunddreißigtausendfünfhundertsiebenundsechzig"),
        ("fr", 92, "quatre-vingt-douze"),
        ("es", 1998, "mil novecientos noventa y ocho"),
        ("da", 75, "femoghalvfjerds"),
        ("ru", 21, "двадцать один"),
        ("ja", 34567, "三万四千五百六十七"),
        ("tr", 1998, "bin dokuz yüz doksan sekiz"),
    ],
)
def test_numbers_in_words(language: str, number: int, words: str) -> None:
    assert spell_number(number, language) == words


def test_dates_as_languages_write_them() -> None:
    day = datetime.date(1998, 3, 7)
    assert format_date(day, "full", "de") == "Samstag, 7. März 1998"
    assert format_date(day, "long", "en") == "March 7, 1998"
    assert format_date(day, "long", "es") == "7 de marzo de 1998"
    assert format_date(day, "numeric", "hu") == "1998. 03. 07."
    assert format_date(day, "long", "ja") == "1998年3月7日"


def test_no_word_for_two_numbers(pairs: list[normalization.NormalizationPair]) -> None:
    meanings: dict[str, set[int]] = {}
    for language in LANGUAGES:
        for number in [*range(400), *range(400, 1100, 50), *range(2000, 10_000, 1000), 10**5]:
            meanings.setdefault(spell_number(number, language).casefold(), set()).add(number)
    torn = {words: actual for words, actual in meanings.items() if len(actual) > 1}
    # Spanish three is Danish sixty; no other words of these languages collide.
    assert torn == {"tres": {3, 60}}
    assert not LocaleConventions().is_unambiguous(FormattedValue("tres", "3", "tres", "3"))
    assert not {pair.source.casefold() for pair in pairs} & set(torn)


def test_what_can_be_read_in_two_ways_is_left_out(pairs: list[normalization.NormalizationPair]) -> None:
    atlas = LocaleConventions()

    def clear(source: str, answer: str) -> bool:
        return atlas.is_unambiguous(FormattedValue(source, answer, source, answer))

    assert not clear("03/07/1998", "1998-07-03")
    assert clear("23/07/1998", "1998-07-23")
    assert clear("07/07/1998", "1998-07-07")
    assert not clear("1.234", "1234")
    assert not clear("1,234", "1.234")
    assert clear("1.234,5", "1234.5")
    assert clear("1 234 567", "1234567")
    assert number_values("12.34") == {*number_values("12,34")}
    # A crown or a billion is not the same everywhere.
    sources = {pair.source for pair in pairs}
    assert not [source for source in sources if source.endswith((" kr", " billion")) or source.startswith("¥")]
    for source, target in pairs:
        if match := re.fullmatch(r"(\d\d?)[/.-](\d\d?)[/.-](\d{4})", source):
            one, two, year = map(int, match.groups())
            if "/" in source and one != two:
                assert max(one, two) > 12
            assert datetime.date.fromisoformat(target).year == year


def test_amounts_agree_with_their_digits(pairs: list[normalization.NormalizationPair]) -> None:
    """Read independently: all digits of a currency amount or percentage, in order, are those of its plain form."""
    checked = 0
    for source, target in pairs:
        if target.endswith("%") or re.fullmatch(r"[\d.]+ [A-Z]{3}", target):
            assert re.sub(r"\D", "", source) == re.sub(r"\D", "", target)
            checked += 1
    assert checked > 500


def test_the_default_pairs_open(
    pairs: list[normalization.NormalizationPair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair_tables, "generate_pairs", lambda: pairs)
    config = PairsData(tokenizer="char", valid=0.05)
    data = open_data(config, "pairs", batch_tokens=2000, cache=tmp_path, seed=0)
    assert data.test is not None
    splits: dict[str, set[str]] = {name: {one.source for one in data.examples(name)} for name in ("valid", "test")}
    splits["train"] = set()
    while data.train.epoch == 0:
        splits["train"] |= {data.source.decode(row.tolist()) for row in next(data.train).source}
    assert {name: len(actual) / 6000 for name, actual in splits.items()} == {
        "train": pytest.approx(0.93, abs=0.015),
        "valid": pytest.approx(0.05, abs=0.01),
        "test": pytest.approx(0.02, abs=0.008),
    }
    folded = [source.casefold() for actual in splits.values() for source in actual]
    assert len(folded) == len(set(folded)) == 6000


def test_the_standard_library(tmp_path: Path) -> None:
    files = text_sources.stdlib_files()
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [path.relative_to(root).as_posix() for path in files]
    assert len(files) > 300
    assert {"os.py", "json/decoder.py"} <= set(names)
    assert not [name for name in names if {"test", "tests", "site-packages", "idlelib"} & set(name.split("/")[:-1])]
    assert files == sorted(files, key=lambda path: path.relative_to(root).parts)
    data = open_data(TextData(), "next-token", batch_tokens=8192, cache=tmp_path, seed=0)
    assert data.valid.units is not None
    assert data.test is not None
    # Whole files, so the shares are met roughly.
    total = sum(path.stat().st_size for path in files)
    assert data.valid.units.bytes / total == pytest.approx(0.055, abs=0.01)
    manifest = (tmp_path / "prepared.json").read_text()
    assert '"python": "3.' in manifest
    assert "os.py" in manifest


def test_a_stripped_standard_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "os.py").write_text("x = 1\n")
    with pytest.raises(UserError, match=r"holds only 6 bytes of source text, .* data\.path=FILE_OR_FOLDER"):
        text_sources.stdlib_files(tmp_path)


def test_without_locale_data_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(pair_tables, "version", version)
    with pytest.raises(UserError, match=r"babel and unicode-rbnf: pip install 'manyformer\[translate\]'"):
        pair_tables.open_table("normalization", [None, None], ["source", "target"], tmp_path)
