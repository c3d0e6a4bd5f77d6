"""The contract of bytes: a number of bits per byte counts as many bytes as the text has."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from manyformer.analysis.contracts.check_report import ContractRow
from manyformer.analysis.contracts.scorer_trial import ScorerOptions, ScorerTrial

TEXTS = (
    "plain text, 123",
    "Grüße aus Köln",
    "数学と論理",
    "naïve café — “quoted”",
    "🙂🙃 emoji 👩‍👩‍👧",
    "a\u2581b\ufffdc",
)
"""Texts whose characters take one to four bytes, with the signs that tokenizers use for spaces and for damage."""

DAMAGE = "\ufffd"
"""What decoders write for bytes that are no UTF-8: its own three bytes say nothing about those."""

MAX_TOKENS = 65_536
"""So many tokens are counted one by one."""

MAX_JOINED = 4096
"""So many short sequences of tokens that are no text alone are tried, in search of those that are one together."""


def byte_counts(trial: ScorerTrial) -> ContractRow:
    """The bytes of tokens sum to the bytes of their text: of each token, of random ones and of known texts."""
    options = trial.options
    assert options.bytes_of is not None
    cases = 0
    without_bytes: list[str] = []
    for case in _byte_cases(options, trial):
        counted = float(torch.as_tensor(options.bytes_of(torch.tensor(case.ids))).double().sum())
        cases += 1
        if counted in case.true:
            continue
        if counted == 0 and case.is_special:
            # signs such as <eos> are no text, though decoders print them
            without_bytes.append(case.name)
            continue
        true = min(case.true)
        sentence = f"{case.name} counts {counted:g} bytes and has {true}"
        return ContractRow("bytes", "failed", sentence, abs(counted - true), 0.0)
    sentence = f"tokens have as many bytes as their text, in {cases} cases"
    if without_bytes:
        sentence += f"; {len(without_bytes)} special ones count none, such as {without_bytes[0]}"
    if not cases:
        return ContractRow("bytes", "not run", "not run: no sequence of tokens decodes to text")
    return ContractRow("bytes", "passed", sentence, 0.0, 0.0)


def why_no_bytes(options: ScorerOptions) -> str | None:
    """The option that is missing to count bytes."""
    if options.bytes_of is None:
        return "no `bytes_of` is given"
    if options.decode is None and options.encode is None:
        return "neither `decode` nor `encode` is given, so that the true bytes are not known"
    return None


class ByteCase(NamedTuple):
    """Tokens whose number of bytes is known: more than one if it depends on what stands before."""

    name: str
    ids: list[int]
    true: set[int]
    is_special: bool = False


def _byte_cases(options: ScorerOptions, trial: ScorerTrial) -> Iterator[ByteCase]:
    if options.encode is not None:
        for text in TEXTS:
            ids = list(options.encode(text))
            true = {len(text.encode())}
            if options.decode is not None and ids:
                # a tokenizer may normalize a text: what it kept is what is counted
                true = _sizes(options, ids) or true
            yield ByteCase(f"{text!r}", ids, true)
    if options.decode is None:
        return
    damaged = []
    special = []
    for token in range(min(options.vocab, MAX_TOKENS)):
        true = _sizes(options, [token])
        if not true:
            damaged.append(token)
            continue
        decoded = options.decode([token])
        shown = repr(decoded)
        is_special = token == options.bos or (isinstance(decoded, str) and decoded.strip()[:1] in ("<", "["))
        if is_special:
            special.append(token)
        yield ByteCase(f"token {token} ({shown})", [token], true, is_special)
    for count in (2, 16, 64):
        ids = [token for token in trial.random_tokens(count).tolist() if token not in special]
        true = _sizes(options, ids)
        if ids and true:
            yield ByteCase("a random sequence", ids, true)
    yield from _joined_cases(options, trial, damaged)


def _joined_cases(options: ScorerOptions, trial: ScorerTrial, damaged: list[int]) -> Iterator[ByteCase]:
    """Short sequences of tokens each of which is a part of a character: together some are text."""
    if not damaged:
        return
    assert options.decode is not None
    choices = torch.tensor(damaged)
    for index in range(MAX_JOINED):
        count = 2 + index % 2
        drawn = torch.randint(choices.numel(), (count,), generator=trial.generator)
        ids = choices[drawn].tolist()
        true = _sizes(options, ids)
        if true:
            yield ByteCase(f"tokens {ids} ({options.decode(ids)!r})", ids, true)


def _sizes(options: ScorerOptions, ids: list[int]) -> set[int]:
    """The numbers of bytes that tokens may have: at the beginning of a text, where decoders drop a space, and within.

    Empty if they are no text: the sign of damage says nothing about the bytes that it stands for.
    """
    alone = _size(options, ids)
    if alone is None:
        return set()
    sizes = {alone}
    twice = _size(options, [*ids, *ids])
    if twice is not None and twice != 2 * alone:
        sizes.add(twice - alone)
    return sizes


def _size(options: ScorerOptions, ids: list[int]) -> int | None:
    assert options.decode is not None
    decoded = options.decode(ids)
    if isinstance(decoded, bytes):
        return len(decoded)
    if DAMAGE in decoded:
        return None
    return len(decoded.encode())
