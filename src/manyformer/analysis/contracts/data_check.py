"""Check training and test data: texts that stand in both, duplicates, empty and damaged rows, labels within inputs.

Texts are compared by hashes of 64 bits of their words, so that case, spaces and punctuation make no difference. Tables
have a largest size: of more rows or n-grams those are kept whose hash is divisible by a power of two, and the report
tells how many that are.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from manyformer.analysis.contracts.check_report import CheckLengths, CheckReport, ContractRow
from manyformer.analysis.contracts.data_records import (
    Corpus,
    HashedRows,
    Hashes,
    LabeledRow,
    RowKind,
    RowNumbers,
    row_hashes,
    window_hashes,
)
from manyformer.base.errors import UserError, suggest_names

NGRAM_WORDS = 13
NGRAM_TOKENS = 50

TABLE_SIZE = 2**24
"""The most rows, and the most n-grams, that a table keeps: 12 bytes each."""

FILTER_BITS = 26

LEAST_WORDS = 8
"""A line of text with fewer words is no text that could be known from training."""

BOILERPLATE = 10
"""What stands in the training data more often than this is boilerplate, such as the header of a license."""

ALLOWED_DUPLICATES = 0.001
"""The share of rows that may stand twice: large collections have a few."""

DATA_CONTRACTS = ("readable", "not-empty", "duplicates", "overlap", "overlap-ngrams", "labels")


class DataLengths(CheckLengths):
    """The length of the n-grams that were compared."""

    def __str__(self) -> str:
        return f"by n-grams of {self.long} {'tokens' if self.long == NGRAM_TOKENS else 'words'}"


class HashTable:
    """Hashes with the numbers of their rows, of bounded size: when it is full, every second one goes, by its bits."""

    def __init__(self, size: int = TABLE_SIZE) -> None:
        self.size = size
        self.step = 1
        self.hashes: Hashes = np.zeros(0, dtype=np.uint64)
        self.rows: NDArray[np.uint32] = np.zeros(0, dtype=np.uint32)
        self._pending: list[tuple[Hashes, NDArray[np.uint32]]] = []
        self._count = 0

    def add(self, hashes: Hashes, rows: RowNumbers) -> None:
        """Add hashes; those that are not among the share that is kept are left out."""
        kept = self.keeps(hashes)
        self._pending.append((hashes[kept], rows[kept].astype(np.uint32)))
        self._count += int(kept.sum())
        while self._count > self.size:
            self._join()
            self.step *= 2
            kept = self.keeps(self.hashes)
            self.hashes = self.hashes[kept]
            self.rows = self.rows[kept]
            self._count = self.hashes.size

    def keeps(self, hashes: Hashes) -> NDArray[np.bool_]:
        """Which hashes are among the share that is kept."""
        kept: NDArray[np.bool_] = (hashes & np.uint64(self.step - 1)) == 0
        return kept

    def sort(self) -> None:
        """Sort by hash, and by row where these are equal."""
        self._join()
        order = np.argsort(self.hashes, kind="stable")
        self.hashes = self.hashes[order]
        self.rows = self.rows[order]

    def _join(self) -> None:
        parts = [(self.hashes, self.rows), *self._pending]
        self._pending = []
        self.hashes = np.concatenate([hashes for hashes, _ in parts])
        self.rows = np.concatenate([rows for _, rows in parts])


class KnownHashes:
    """The distinct hashes of a sorted table, and how often and where first each is seen elsewhere."""

    def __init__(self, table: HashTable) -> None:
        self.table = table
        self.values, self.firsts = np.unique(table.hashes, return_index=True)
        self.seen = np.zeros(self.values.size, dtype=np.int64)
        self.places = np.full(self.values.size, -1, dtype=np.int64)
        # most hashes are none of these: a table of bits says so without a search
        self._filter = np.zeros(2**FILTER_BITS if self.values.size else 1, dtype=bool)
        if self.values.size:
            self._filter[self._slots(self.values)] = True

    def _slots(self, hashes: Hashes) -> Hashes:
        return hashes >> np.uint64(64 - FILTER_BITS)

    def look_up(self, hashes: Hashes, rows: RowNumbers) -> None:
        """Count the hashes that are known."""
        if not self.values.size or not hashes.size:
            return
        candidates = np.flatnonzero(self._filter[self._slots(hashes)])
        hashes = hashes[candidates]
        index = np.minimum(np.searchsorted(self.values, hashes), self.values.size - 1)
        hits = self.values[index] == hashes
        index = index[hits]
        rows = rows[candidates][hits]
        np.add.at(self.seen, index, 1)
        # the first place stays: assignments in reverse order, so that the first is the last
        new = self.places[index] < 0
        self.places[index[new][::-1]] = rows[new][::-1]

    def per_entry(self) -> NDArray[np.int64]:
        """How often each entry of the table was seen elsewhere."""
        return self.seen[np.searchsorted(self.values, self.table.hashes)]

    def place_of(self, value: np.uint64) -> int:
        return int(self.places[np.searchsorted(self.values, value)])


class HashedCorpus:
    """What one reading of a corpus gives: tables of its rows and n-grams, and counts."""

    def __init__(self, corpus: Corpus, *, ngrams: bool, table_size: int = TABLE_SIZE) -> None:
        self.corpus = corpus
        self.table = HashTable(table_size)
        self.ngram_table = HashTable(table_size)
        self.size = NGRAM_TOKENS if corpus.is_tokens else NGRAM_WORDS
        self._ngrams = ngrams
        self.compared = 0
        self.with_words = 0
        self.short_lines = 0
        self.empty = 0
        self.first_empty: list[int] = []
        self.labels = LabelCounts()

    def read(self, look_up: "Callable[[RowKind, HashedRows, Hashes, RowNumbers], None] | None" = None) -> None:
        """Read all files; `look_up` gets each block and its n-grams, with the rows in which they begin."""
        self.corpus.on_labeled = self.labels.add
        carried: HashedRows | None = None
        file_index = -1
        for kind, block in self.corpus:
            if len(self.corpus.starts) - 1 != file_index:
                file_index = len(self.corpus.starts) - 1
                carried = None
            self._add_rows(kind, block)
            if self._ngrams or look_up is not None:
                grams, rows, carried = self._windows(kind, block, carried)
                if self._ngrams:
                    self.ngram_table.add(grams, rows)
                if look_up is not None:
                    look_up(kind, block, grams, rows)
        self.table.sort()
        self.ngram_table.sort()

    def _add_rows(self, kind: RowKind, block: HashedRows) -> None:
        if kind == "token stream":
            self.with_words += block.words.size
            return
        hashes, rows, counts = row_hashes(block)
        self.with_words += rows.size
        if kind != "line":
            # the header of a CSV file and records that cannot be read have no words either: they are taken off later
            empty = np.setdiff1d(np.arange(block.first, block.stop), rows)
            self.empty += empty.size
            self.first_empty += empty[: max(0, 8 - len(self.first_empty))].tolist()
        else:
            self.short_lines += int((counts < LEAST_WORDS).sum())
            hashes = hashes[counts >= LEAST_WORDS]
            rows = rows[counts >= LEAST_WORDS]
        self.compared += rows.size
        self.table.add(hashes, rows)

    def _windows(
        self, kind: RowKind, block: HashedRows, carried: HashedRows | None
    ) -> tuple[Hashes, RowNumbers, HashedRows | None]:
        """The n-grams of a block. Those of lines and streams go on in the next block, those of records end."""
        words = block.words
        rows = block.rows
        crosses = kind in ("line", "token stream")
        if crosses and carried is not None:
            words = np.concatenate([carried.words, words])
            rows = np.concatenate([carried.rows, rows])
        last = HashedRows(words[-(self.size - 1) :], rows[-(self.size - 1) :], 0, 0) if crosses else None
        if words.size < self.size:
            return np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.int64), last
        grams = window_hashes(words, self.size)
        begins = rows[: grams.size]
        if not crosses:
            same = begins == rows[self.size - 1 :]
            grams = grams[same]
            begins = begins[same]
        return grams, begins, last


class LabelCounts:
    """How often inputs contain their own label, and how often that of another row, which is chance."""

    def __init__(self) -> None:
        self.rows = 0
        self.own = 0
        self.other = 0
        self.marked = 0
        self.marked_other = 0
        self.labels: dict[str, int] = {}
        self.examples: list[LabeledRow] = []
        self._previous: dict[str, None] = {}

    def add(self, row: LabeledRow) -> None:
        label = row.label.strip().lower()
        if not label:
            return
        text = row.text.lower()
        self.rows += 1
        if len(self.labels) < 10_000 or label in self.labels:
            self.labels[label] = self.labels.get(label, 0) + 1
        marked = _is_marked(label, text)
        if _contains(label, text):
            self.own += 1
            if len(self.examples) < 3 or (marked and len(self.examples) < 6):
                self.examples.append(row)
        self.marked += marked
        other = next((each for each in self._previous if each != label), None)
        if other is not None:
            self.other += _contains(other, text)
            self.marked_other += _is_marked(other, text)
        # the last few labels, the latest last
        self._previous.pop(label, None)
        self._previous[label] = None
        if len(self._previous) > 4:
            del self._previous[next(iter(self._previous))]

    @property
    def is_classification(self) -> bool:
        """Whether rows share a few labels; an answer of its own in each row is often a part of the input."""
        return self.rows >= 4 and len(self.labels) <= max(2, min(1000, self.rows // 4))

    def finding(self) -> tuple[int, str] | None:
        """How many rows contain their label beyond chance, and how; None where chance explains it."""
        if not self.is_classification:
            return None
        floor = 5 * (self.marked_other + 1) ** 0.5
        if self.marked - self.marked_other > max(floor if self.rows > 100 else 2, 0.005 * self.rows):
            return self.marked, "behind a word such as 'label:'"
        if self.own - self.other > max(0.2 * self.rows, 2):
            return self.own, "as a word"
        return None


def _contains(label: str, text: str) -> bool:
    start = text.find(label)
    while start >= 0:
        stop = start + len(label)
        before = text[start - 1 : start]
        after = text[stop : stop + 1]
        if not before.isalnum() and not after.isalnum():
            return True
        start = text.find(label, start + 1)
    return False


def _is_marked(label: str, text: str) -> bool:
    if label not in text:
        return False
    return (
        re.search(rf"\b(label|answer|class|target|gold|category)\w*\W{{1,4}}{re.escape(label)}(?!\w)", text) is not None
    )


def check_data(
    train: str | Path | Sequence[str | Path],
    test: str | Path | Sequence[str | Path] | None = None,
    *,
    only: Sequence[str] | None = None,
    table_size: int = TABLE_SIZE,
    allowed_duplicates: float = ALLOWED_DUPLICATES,
    on_row: Callable[[ContractRow], None] | None = None,
) -> CheckReport:
    """Check files or folders of training data, and those of test data against them.

    Text (a row is a line), JSON lines and CSV (a record), and arrays of tokens (`.npy`, `.bin`). The memory is bounded
    by `table_size` rows and n-grams. Raises UserError for files that cannot be read, and for contracts that do not
    exist.
    """
    for name in only or ():
        if name not in DATA_CONTRACTS:
            raise UserError(f"there is no contract '{name}' of data; {suggest_names(name, DATA_CONTRACTS)}")
    train_corpus = Corpus(train)
    hashed_test = None
    known_rows = None
    known_grams = None
    if test is not None:
        test_corpus = Corpus(test)
        if test_corpus.is_tokens != train_corpus.is_tokens:
            raise UserError("one of training and test data is text and the other tokens: give both in the same form")
        hashed_test = HashedCorpus(test_corpus, ngrams=True, table_size=table_size)
        hashed_test.read()
        known_rows = KnownHashes(hashed_test.table)
        known_grams = KnownHashes(hashed_test.ngram_table)

    def look_up(kind: RowKind, block: HashedRows, grams: Hashes, rows: RowNumbers) -> None:
        assert known_rows is not None
        assert known_grams is not None
        known_grams.look_up(grams, rows)
        if kind != "token stream":
            hashes, numbers, _ = row_hashes(block)
            known_rows.look_up(hashes, numbers)

    hashed_train = HashedCorpus(train_corpus, ngrams=False, table_size=table_size)
    hashed_train.read(look_up if known_rows is not None else None)
    sets = {"training": hashed_train}
    if hashed_test is not None:
        sets["test"] = hashed_test
    tests: dict[str, Callable[[], ContractRow]] = {
        "readable": lambda: _readable(sets),
        "not-empty": lambda: _not_empty(sets),
        "duplicates": lambda: _duplicates(sets, allowed_duplicates),
        "overlap": lambda: _overlap(hashed_train, hashed_test, known_rows),
        "overlap-ngrams": lambda: _overlap_of_ngrams(hashed_train, hashed_test, known_grams),
        "labels": lambda: _labels(sets),
    }
    rows = []
    for name, run in tests.items():
        if only is None or name in only:
            row = run()
            rows.append(row)
            if on_row is not None:
                on_row(row)
    size = hashed_train.size
    return CheckReport(_subject(hashed_train, hashed_test), tuple(rows), DataLengths(size, size), 0)


def _subject(train: HashedCorpus, test: HashedCorpus | None) -> str:
    def named(hashed: HashedCorpus) -> str:
        skipped = len(hashed.corpus.skipped)
        note = f", {skipped} files of other kinds not read" if skipped else ""
        return f"{hashed.corpus.name} ({hashed.corpus.rows:,} {_unit(hashed, hashed.corpus.rows)}{note})"

    if test is None:
        return named(train)
    return f"{named(train)} against {named(test)}"


def _unit(hashed: HashedCorpus, count: int) -> str:
    kind = hashed.corpus.kind_of(hashed.corpus.files[0])
    word = {"line": "line", "record": "record", "token row": "row", "token stream": "token"}[kind]
    return word if count == 1 else f"{word}s"


def _share(count: int, total: int) -> str:
    percent = 100 * count / max(total, 1)
    return f"{percent:.0f}%" if percent >= 10 else f"{percent:.2g}%"


def _readable(sets: dict[str, HashedCorpus]) -> ContractRow:
    parts = []
    total = 0
    rows = 0
    for name, hashed in sets.items():
        damaged = hashed.corpus.damaged
        total += damaged.count
        rows += hashed.corpus.rows
        if damaged.count:
            row, reason = damaged.examples[0]
            count = (
                f"{damaged.count:,} of {hashed.corpus.rows:,} {name} rows ({_share(damaged.count, hashed.corpus.rows)})"
            )
            parts.append(f"{count} are damaged, first {hashed.corpus.place(row)}: {reason}")
    if parts:
        return ContractRow("readable", "failed", "; ".join(parts), total / max(rows, 1), 0.0)
    return ContractRow("readable", "passed", f"all {rows:,} rows can be read", 0.0, 0.0)


def _not_empty(sets: dict[str, HashedCorpus]) -> ContractRow:
    parts = []
    total = 0
    rows = 0
    for name, hashed in sets.items():
        corpus = hashed.corpus
        headers = sum(file.suffix in (".csv", ".tsv") for file in corpus.files)
        starts = {start for start, file in zip(corpus.starts, corpus.files) if file.suffix in (".csv", ".tsv")}
        damaged = {row for row, _ in corpus.damaged.examples}
        empty = max(0, hashed.empty - headers - corpus.damaged.count)
        total += empty
        rows += corpus.rows
        if empty:
            first = next((row for row in hashed.first_empty if row not in starts | damaged), hashed.first_empty[0])
            share = _share(empty, corpus.rows)
            parts.append(
                f"{empty:,} of {corpus.rows:,} {name} rows ({share}) have no word, first {corpus.place(first)}"
            )
        elif not hashed.with_words:
            parts.append(f"the {name} data has no words")
            total += 1
    if parts:
        return ContractRow("not-empty", "failed", "; ".join(parts), total / max(rows, 1), 0.0)
    sentence = "every record has words"
    if all(hashed.corpus.kind_of(hashed.corpus.files[0]) == "line" for hashed in sets.values()):
        sentence = "there are words; empty lines separate paragraphs"
    return ContractRow("not-empty", "passed", sentence, 0.0, 0.0)


def _duplicates(sets: dict[str, HashedCorpus], allowed: float) -> ContractRow:
    parts = []
    worst = 0.0
    notes = []
    for name, hashed in sets.items():
        table = hashed.table
        if not table.hashes.size:
            continue
        firsts, counts = _runs_of_equal(table.hashes)
        is_repeated = np.ones(counts.size, dtype=bool)
        if not _has_records(hashed):
            is_repeated = counts <= BOILERPLATE
        number = int((~is_repeated).sum())
        if number:
            notes.append(f"{number:,} {name} lines that stand more than {BOILERPLATE} times are taken for boilerplate")
        firsts = firsts[is_repeated]
        counts = counts[is_repeated]
        extra = int((counts - 1).sum())
        if not extra:
            continue
        share = extra / table.hashes.size
        worst = max(worst, share)
        most = int(np.argmax(counts))
        rows = np.sort(table.rows[firsts[most] : firsts[most] + counts[most]])
        places = ", ".join(hashed.corpus.place(int(row)) for row in rows[:3])
        ends = f" and {counts[most] - 3:,} more" if counts[most] > 3 else ""
        sampled = "" if table.step == 1 else f", counted on 1 of {table.step}"
        amount = f"{extra:,} of {table.hashes.size:,} {name} {_unit(hashed, 2)}"
        shown = _share(extra, table.hashes.size)
        parts.append(f"{amount} ({shown}{sampled}) repeat another, most often {places}{ends}")
    if not any(hashed.table.hashes.size for hashed in sets.values()):
        return ContractRow("duplicates", "not run", "not run: a stream of tokens has no rows, and no line is a text")
    sentence = "; ".join(parts) or "no row stands twice"
    if notes:
        sentence += f" ({'; '.join(notes)})"
    return ContractRow("duplicates", "failed" if worst > allowed else "passed", sentence, worst, allowed)


def _runs_of_equal(hashes: Hashes) -> tuple[RowNumbers, RowNumbers]:
    """Where each sorted hash that stands more than once begins, and how often it stands there."""
    equal = hashes[1:] == hashes[:-1]
    edges = np.diff(np.concatenate([[False], equal, [False]]).astype(np.int8))
    starts = np.flatnonzero(edges == 1)
    return starts, np.flatnonzero(edges == -1) - starts + 1


def _has_records(hashed: HashedCorpus) -> bool:
    return all(hashed.corpus.kind_of(file) in ("record", "token row") for file in hashed.corpus.files)


def _overlap(train: HashedCorpus, test: HashedCorpus | None, known: KnownHashes | None) -> ContractRow:
    if test is None or known is None:
        return ContractRow("overlap", "not run", "not run: there is no test data")
    if not test.table.hashes.size:
        kind = "a stream of tokens has no rows" if test.corpus.is_tokens else f"no line has {LEAST_WORDS} words"
        return ContractRow("overlap", "not run", f"not run: {kind}; see overlap-ngrams")
    seen = known.per_entry()
    hits = seen > 0
    note = ""
    if not _has_records(test):
        common = seen > BOILERPLATE
        if common.any():
            note = f" ({int(common.sum()):,} that stand there more than {BOILERPLATE} times are taken for boilerplate)"
        hits &= ~common
    count = int(hits.sum())
    total = test.table.hashes.size
    sampled = "" if test.table.step == 1 else f", counted on 1 of {test.table.step}"
    unit = _unit(test, 2)
    if not count:
        return ContractRow("overlap", "passed", f"no test {unit[:-1]} stands in the training data{note}", 0.0, 0.0)
    rows = test.table.rows[hits]
    order = np.argsort(rows)[:3]
    pairs = [
        f"{test.corpus.place(int(rows[index]))} is {train.corpus.place(known.place_of(test.table.hashes[hits][index]))}"
        for index in order
    ]
    sentence = (
        f"{count:,} of {total:,} test {unit} ({_share(count, total)}{sampled}) stand in the training data, first "
        f"{', '.join(pairs)}{note}"
    )
    return ContractRow("overlap", "failed", sentence, count / total, 0.0)


def _overlap_of_ngrams(train: HashedCorpus, test: HashedCorpus | None, known: KnownHashes | None) -> ContractRow:
    name = "overlap-ngrams"
    if test is None or known is None:
        return ContractRow(name, "not run", "not run: there is no test data")
    unit = "tokens" if test.corpus.is_tokens else "words"
    if not test.ngram_table.hashes.size:
        return ContractRow(name, "not run", f"not run: no test text has {test.size} {unit}")
    table = test.ngram_table
    seen = known.per_entry()
    rows, members = np.unique(table.rows, return_inverse=True)
    totals = np.bincount(members)
    hits = np.bincount(members, weights=seen > 0)
    rare = np.bincount(members, weights=(seen > 0) & (seen <= BOILERPLATE))
    overlaps = rare > 0
    if _has_records(test):
        # a text of which half is known is known, however often training repeats it
        overlaps |= hits >= 0.5 * totals
    common = int(((hits > 0) & ~overlaps).sum())
    count = int(overlaps.sum())
    sampled = "" if table.step == 1 else f"; 1 of {table.step} n-grams was looked up"
    note = ""
    if common:
        note = (
            f" ({common:,} more have only what stands there more than {BOILERPLATE} times: boilerplate, or texts that "
            "the training data repeats)"
        )
    if not count:
        sentence = f"no {test.size} {unit} in succession stand in both{note}{sampled}"
        return ContractRow(name, "passed", sentence, 0.0, 0.0)
    entries = np.flatnonzero(overlaps[members] & (seen > 0))
    first_entries = entries[np.argsort(table.rows[entries], kind="stable")]
    pairs = []
    is_stream = test.corpus.kind_of(test.corpus.files[0]) == "token stream"
    # in a stream the windows behind the first are the same find
    distance = test.size if is_stream else 1
    last_row = -distance
    for entry in first_entries:
        row = int(table.rows[entry])
        if row - last_row >= distance:
            pairs.append(f"{test.corpus.place(row)} in {train.corpus.place(known.place_of(table.hashes[entry]))}")
            last_row = row
        if len(pairs) == 3:
            break
    of = "windows of" if is_stream else f"{_unit(test, 2)} with"
    amount = f"{count:,} of {rows.size:,} test {of} {test.size} {unit} ({_share(count, rows.size)})"
    first = ", ".join(pairs)
    known_as = "stand in the training data" if is_stream else "have as many in succession from the training data"
    sentence = f"{amount} {known_as}, first {first}{note}{sampled}"
    return ContractRow(name, "failed", sentence, count / rows.size, 0.0)


def _labels(sets: dict[str, HashedCorpus]) -> ContractRow:
    parts = []
    notes = []
    worst = 0.0
    rows = sum(hashed.labels.rows for hashed in sets.values())
    if not rows:
        return ContractRow(
            "labels", "not run", "not run: no record has a field for a label, such as 'label' or 'answer'"
        )
    for name, hashed in sets.items():
        labels = hashed.labels
        if not labels.rows:
            continue
        finding = labels.finding()
        if finding is None:
            if labels.own:
                share = _share(labels.own, labels.rows)
                chance = _share(labels.other, labels.rows)
                notes.append(f"{share} of {name} inputs contain their label, {chance} that of another row")
            continue
        count, how = finding
        worst = max(worst, count / labels.rows)
        place = hashed.corpus.place(labels.examples[-1 if "behind" in how else 0].row)
        amount = f"{count:,} of {labels.rows:,} {name} inputs ({_share(count, labels.rows)})"
        chance = _share(labels.other, labels.rows)
        parts.append(f"{amount} contain their label {how}, such as {place}; {chance} contain that of another row")
    if parts:
        return ContractRow("labels", "failed", "; ".join(parts), worst, 0.0)
    sentence = "inputs do not contain their labels beyond chance"
    if notes:
        sentence = "; ".join(notes)
    return ContractRow("labels", "passed", sentence, 0.0, 0.0)
