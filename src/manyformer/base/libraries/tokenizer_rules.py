"""Reading a tokenizer whose rules are bounded: how much longer they can make a text, and other costs of its file."""

import base64
import binascii
import struct
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import tokenizers

from manyformer.base.files.json_text import json_text
from manyformer.base.libraries import without_panics
from manyformer.base.libraries.pattern_costs import CostlyPattern, pattern_width

MAX_GROWTH = 64.0
"""How many times as long as a text the outcome of all rules for it may be, beyond what Unicode itself does."""

MAX_RULES = 256
"""The largest number of rules of one kind; known tokenizers have fewer than 20."""

MAX_TEMPLATE_TOKENS = 1000
"""The largest number of tokens that templates put around a text."""

MAX_WORD = 1000
"""The longest word that may be divided into pieces, in a time that grows with the square of its length."""

UNICODE_GROWTH = 18
"""The longest normal form of a character."""

PARTS: Mapping[str, str] = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}
"""The fields of a tokenizer.json with rules, and the field in which a sequence of them lists the rules."""

AFFIX_FIELDS = ("continuing_subword_prefix", "end_of_word_suffix")
MAX_WORD_CHARACTERS = "max_input_chars_per_word"


class Rule(NamedTuple):
    """A rule and its place in the file."""

    place: str
    settings: Mapping[str, Any]

    @property
    def kind(self) -> Any:
        """The name of its class."""
        return self.settings.get("type")


def check_rules(content: Mapping[str, Any]) -> None:
    """Raise ValueError, which names the rule, if the rules of a tokenizer.json can make texts much longer, or if the
    time of one of its patterns can double with each character of a text.

    Fields of another type than they must have are left to the library, which refuses them."""
    rules = {part: list(_rules_of(content.get(part), part, listing)) for part, listing in PARTS.items()}
    for part, listed in rules.items():
        if len(listed) > MAX_RULES:
            raise ValueError(f"{part} has {len(listed):,} rules, and at most {MAX_RULES} are used")
    _check_growth([*rules["normalizer"], *rules["pre_tokenizer"]])
    _check_growth(rules["decoder"])
    _check_templates(rules["post_processor"])
    _check_model(content.get("model"))


def _rules_of(settings: Any, place: str, listing: str) -> Iterator[Rule]:
    """The rules of a part in their order, those of sequences in their places; without recursion, whatever the depth."""
    todo = [(place, settings)]
    while todo:
        place, settings = todo.pop()
        if not isinstance(settings, dict):
            continue
        inner = settings.get(listing)
        if settings.get("type") == "Sequence" and isinstance(inner, list):
            # a stack, from which the first rule is taken first
            todo += reversed([(f"{place}.{listing}[{number}]", rule) for number, rule in enumerate(inner)])
        else:
            yield Rule(place, settings)


class _Growth:
    """The product of the growth of some rules in their order, and the texts that they have put in so far."""

    def __init__(self) -> None:
        self.factor = 1.0
        self.contents: list[str] = []
        self.inserted = 0
        self.tables: set[str] = set()

    def add(self, rule: Rule) -> None:
        """Count a rule. Raises ValueError if its factor, or that of all rules up to it, is too large."""
        self.factor *= self._factor_of(rule)
        if self.factor > MAX_GROWTH:
            raise ValueError(
                f"with the rule {rule.place} ({rule.kind}) a text can become more than {MAX_GROWTH:.0f} times as long"
            )

    def _factor_of(self, rule: Rule) -> float:
        settings = rule.settings
        match rule.kind:
            case "Replace":
                return self._replaced(rule)
            case "Prepend":
                return self._prepended(rule)
            case "NFC" | "NFD" | "NFKC" | "NFKD":
                return self._longest(lambda text: unicodedata.normalize(rule.kind, text))
            case "Lowercase":
                return self._longest(str.lower)
            case "ByteLevel":
                # each of its characters has two bytes at most
                repeated = 2.0 if "ByteLevel" in self.tables else 1.0
                self.tables.add("ByteLevel")
                return repeated * self._longest(lambda text: "x" * len(text.encode("utf-8", "replace")))
            case "Precompiled":
                return self._looked_up(rule)
            case "BertNormalizer":
                # it puts spaces around each Chinese character
                if self.contents or "BertNormalizer" in self.tables:
                    return 3.0
                return self._first("BertNormalizer")
            case "BPEDecoder":
                # it puts a space in the place of each suffix, an empty one of which is between all characters
                if settings.get("suffix") == "":
                    return 2.0
                return 1.0
            case "CTC":
                # as with the suffix of BPE
                if settings.get("word_delimiter_token") == "":
                    return 2.0
                return 1.0
            case "FixedLength" if settings.get("length") == 0:
                raise ValueError(f"the rule {rule.place} (FixedLength) divides texts into parts of length 0")
            case "Split":
                _width(rule)
        return 1.0

    def _first(self, table: str) -> float:
        self.tables.add(table)
        return 1.0

    def _replaced(self, rule: Rule) -> float:
        content = rule.settings.get("content")
        if not isinstance(content, str):
            return 1.0
        self.contents.append(content)
        width = _width(rule)
        # nothing is replaced before, between and after all characters
        if width:
            return max(1.0, len(content) / width)
        return len(content) + 1.0

    def _prepended(self, rule: Rule) -> float:
        text = rule.settings.get("prepend")
        if isinstance(text, str):
            self.contents.append(text)
            self.inserted += len(text)
        # once for each part of a text between special tokens, which may be a character
        if self.inserted > MAX_GROWTH:
            raise ValueError(
                f"with the rule {rule.place} (Prepend) more than {MAX_GROWTH:.0f} characters are prepended"
            )
        return 1.0

    def _longest(self, rewrite: Callable[[str], str]) -> float:
        """The growth of the characters that rules before have put in, by a table of Unicode."""
        characters = set[str]().union(*self.contents)
        grown = {character: rewrite(character) for character in characters}
        self.contents += [text for character, text in grown.items() if text != character]
        return max((float(len(text)) for text in grown.values()), default=1.0) or 1.0

    def _looked_up(self, rule: Rule) -> float:
        longest = _longest_entry(rule)
        is_first = not self.contents and "Precompiled" not in self.tables
        self.tables.add("Precompiled")
        if is_first:
            # the tables of SentencePiece do what the normal forms of Unicode do
            return max(1.0, longest / UNICODE_GROWTH)
        return float(max(1, longest))


def _check_growth(rules: Iterable[Rule]) -> None:
    growth = _Growth()
    for rule in rules:
        growth.add(rule)


def _width(rule: Rule) -> int:
    """The fewest characters that a rule's pattern matches. Raises ValueError for a costly one."""
    pattern = rule.settings.get("pattern")
    pattern = pattern if isinstance(pattern, dict) else {}
    text = pattern.get("String")
    expression = pattern.get("Regex")
    if isinstance(expression, str):
        try:
            return pattern_width(expression)
        except CostlyPattern as error:
            raise ValueError(f"the pattern {expression!r:.60} of the rule {rule.place} {error}") from None
    if isinstance(text, str):
        return len(text)
    return 1


def _longest_entry(rule: Rule) -> int:
    """The number of characters in the longest text of a compiled table, whose trie of characters comes first."""
    packed = rule.settings.get("precompiled_charsmap")
    try:
        # what is no table is refused by the library
        table = b""
        if isinstance(packed, str):
            table = base64.b64decode(packed)
        (size,) = struct.unpack_from("<I", table)
    except (binascii.Error, ValueError, struct.error):
        return 1
    return max(len(entry.decode("utf-8", "replace")) for entry in table[4 + size :].split(b"\0"))


def _check_templates(rules: Iterable[Rule]) -> None:
    """Templates that put a text in several times, or many tokens around it."""
    copies = 1
    added = 0
    for rule in rules:
        if rule.kind != "TemplateProcessing":
            continue
        special = rule.settings.get("special_tokens")
        special = special if isinstance(special, dict) else {}
        for template in ("single", "pair"):
            pieces = rule.settings.get(template)
            if isinstance(pieces, list):
                pieces = [piece for piece in pieces if isinstance(piece, dict)]
            else:
                pieces = []
            texts = [piece["Sequence"].get("id") for piece in pieces if isinstance(piece.get("Sequence"), dict)]
            names = [piece["SpecialToken"].get("id") for piece in pieces if isinstance(piece.get("SpecialToken"), dict)]
            # a template that names a text twice puts it in twice
            copies *= max((texts.count(text) for text in ("A", "B")), default=1) or 1
            added += sum(_token_count(special.get(name)) for name in names if isinstance(name, str))
        if copies > MAX_GROWTH or added * copies > MAX_TEMPLATE_TOKENS:
            raise ValueError(
                f"with the rule {rule.place} (TemplateProcessing) a text gets more than {MAX_TEMPLATE_TOKENS} tokens, "
                f"or stands more than {MAX_GROWTH:.0f} times in the result"
            )


def _token_count(special: Any) -> int:
    ids = None
    if isinstance(special, dict):
        ids = special.get("ids")
    if isinstance(ids, list):
        return len(ids)
    return 1


def _check_model(model: Any) -> None:
    """Settings of a model that multiply its costs for each character of a text."""
    model = model if isinstance(model, dict) else {}
    for field in AFFIX_FIELDS:
        affix = model.get(field)
        if isinstance(affix, str) and len(affix) > MAX_GROWTH:
            raise ValueError(f"model.{field} has {len(affix):,} characters, and at most {MAX_GROWTH:.0f} are used")
    longest = model.get(MAX_WORD_CHARACTERS)
    if isinstance(longest, int) and longest > MAX_WORD:
        raise ValueError(f"model.{MAX_WORD_CHARACTERS} is {longest:,}, and at most {MAX_WORD:,} is used")


def read_tokenizer(content: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer with the content of a tokenizer.json.

    Raises ValueError for content that is none, and for rules that can make texts much longer or slow to read."""
    check_rules(content)
    with without_panics():
        try:
            return tokenizers.Tokenizer.from_str(json_text(content, ensure_ascii=True))
        # the library raises no more specific class than Exception
        except Exception as error:
            raise ValueError(str(error)) from error
