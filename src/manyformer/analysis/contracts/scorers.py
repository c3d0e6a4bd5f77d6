"""Contracts of scorers: functions that give each token of a stream the nats that it costs.

A number of bits per byte is worth as much as the code that computed it. A scorer may look at what it scores in more
ways than a model: it may train on a token before it scores it, keep tables that contain it, mix probabilities by a
weight that depends on it, drop or repeat targets, and count bytes that a text does not have. Each of these shows in
the numbers that a scorer gives for streams that differ in chosen tokens; the length of the stream stays the same,
because windows that are aligned to its end give earlier tokens another context in a longer one.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from manyformer.analysis.contracts.check_report import CheckLengths, CheckReport, ContractRow
from manyformer.base.errors import UserError, suggest_names

Scorer = Callable[[Tensor], Tensor]
"""Gives the nats (n - 1) of the tokens 1 to n - 1 of a stream (n), each time from a fresh state."""

TOLERANCE = 1e-4
"""The largest change of a token's nats, relative to the largest, that counts as rounding in float32."""

SUM_TOLERANCE = 2e-3
"""How far the probabilities of a position may sum above 1: rounding of as many float32 numbers as there are tokens."""

MAX_CALLS = 4096
"""The largest number of calls that the contract of sums takes; above it the vocabulary is sampled."""

SUMMED_POSITIONS = 6


@final
@dataclass(frozen=True)
class ScorerOptions:
    """What is known about a scorer beside its function.

    `block` is the size at which it cuts a stream (window, stride or chunk): leaks are looked for around its borders.
    `bytes_of(ids)` gives the number of bytes of tokens, `decode(ids)` their text or bytes, `encode(text)` tokens. `bos`
    is the token that begins a document, if the scorer promises that documents are independent. `partitions` are
    keywords that must not change a score, such as sizes of batches.
    """

    vocab: int
    length: int | None = None
    block: int | None = None
    bytes_of: Callable[[Tensor], Any] | None = None
    decode: Callable[[Sequence[int]], str | bytes] | None = None
    encode: Callable[[str], Sequence[int]] | None = None
    bos: int | None = None
    partitions: Sequence[Mapping[str, Any]] = ()
    seed: int = 0

    @property
    def stream_length(self) -> int:
        """Tokens of the streams that are tried: a few blocks and a rest, so that the last one is not full."""
        if self.length is not None:
            return self.length
        if self.block is not None:
            return 3 * self.block + self.block // 3 + 2
        return 200


class ScorerContext:
    """A scorer, its options, and streams drawn from one generator."""

    def __init__(self, score: Callable[..., Any], options: ScorerOptions) -> None:
        self.function = score
        self.options = options
        self.generator = torch.Generator().manual_seed(options.seed)
        self.tokens = self.random_tokens(options.stream_length)
        self.expected = self.score(self.tokens)
        self.scale = float(self.expected.abs().max().clamp(min=1e-6))

    def score(self, tokens: Tensor, **keywords: Any) -> Tensor:
        """The nats as float64 (n - 1). Raises ValueError where the scorer gives another number of them."""
        result = torch.as_tensor(self.function(tokens.clone(), **keywords)).detach().double().flatten().cpu()
        if result.numel() != tokens.numel() - 1:
            targets = tokens.numel() - 1
            raise ValueError(f"{result.numel()} scores for {tokens.numel()} tokens, of which {targets} are targets")
        return result

    def random_tokens(self, count: int) -> Tensor:
        """Random tokens, without the one that begins documents."""
        tokens = torch.randint(self.options.vocab, (count,), generator=self.generator)
        bos = self.options.bos
        if bos is not None:
            tokens[tokens == bos] = (bos + 1) % self.options.vocab
        return tokens

    def other_tokens(self, tokens: Tensor) -> Tensor:
        """Random tokens that differ from these everywhere."""
        shift = torch.randint(1, self.options.vocab, tokens.shape, generator=self.generator)
        return (tokens + shift) % self.options.vocab

    def cuts(self) -> list[int]:
        """Tokens to exchange: near the borders of blocks, near both ends, and some between."""
        length = self.tokens.numel()
        block = self.options.block or 64
        near = {border + offset for border in range(0, length, block) for offset in (-1, 0, 1, block // 2)}
        near |= {2, length - 2, length - 1, length // 3, length // 2}
        # from the end: how far back a late token reaches tells what kind of leak it is
        return sorted((cut for cut in near if 2 <= cut < length), reverse=True)


def _row(
    name: str, *, passed: bool, sentence: str, measured: float | None = None, tolerance: float | None = None
) -> ContractRow:
    return ContractRow(name, "passed" if passed else "failed", sentence, measured, tolerance)


def causal_stream(context: ScorerContext) -> ContractRow:
    """Exchanged tokens change the nats of no earlier token."""
    worst = 0.0
    for cut in context.cuts():
        for stop in (cut + 1, context.tokens.numel()):
            tokens = context.tokens.clone()
            tokens[cut:stop] = context.other_tokens(tokens[cut:stop])
            # nats[i] is the score of token i + 1
            changes = (context.score(tokens) - context.expected)[: cut - 1].abs()
            if not changes.numel():
                continue
            worst = max(worst, float(changes.max()) / context.scale)
            if not worst <= TOLERANCE:
                changed = (~(changes <= TOLERANCE * context.scale)).nonzero().flatten() + 1
                return _row(
                    "causal-stream",
                    passed=False,
                    sentence=_describe_leak(context, cut, changed),
                    measured=worst,
                    tolerance=TOLERANCE,
                )
    return _row(
        "causal-stream",
        passed=True,
        sentence=f"exchanged tokens change no earlier score, at {context.tokens.numel()} tokens",
        measured=worst,
        tolerance=TOLERANCE,
    )


def _describe_leak(context: ScorerContext, cut: int, changed: Tensor) -> str:
    first = int(changed.min())
    last = int(changed.max())
    count = changed.numel()
    reach = cut - first
    sentence = f"the scores of {count} earlier tokens ({first} to {last}) change when token {cut} does"
    block = context.options.block
    if reach > 0.9 * (cut - 1) and (block is None or reach > block):
        reason = "the whole stream is read before it is scored (two passes, training or tables before scores)"
        return f"{sentence}: {reason}"
    if block is not None and first // block == cut // block:
        return f"{sentence}: tokens are seen within their own block of {block}"
    return f"{sentence}: they are scored after it was read"


def normalized(context: ScorerContext) -> ContractRow:
    """The probabilities that the tokens of the vocabulary would have at a position sum to at most 1."""
    vocab = context.options.vocab
    length = context.tokens.numel()
    block = context.options.block or 64
    sampled = min(vocab, max(MAX_CALLS // SUMMED_POSITIONS, 16))
    near_border = {min(block, length - 1), min(block + 1, length - 1)}
    positions = sorted({1, length // 3, length // 2 + 1, length - 1} | near_border)
    worst = 0.0
    where = 0
    least = math.inf
    for position in positions[:SUMMED_POSITIONS]:
        candidates = torch.arange(vocab)
        if sampled < vocab:
            candidates = torch.randperm(vocab, generator=context.generator)[:sampled]
        total = 0.0
        for token in candidates.tolist():
            tokens = context.tokens.clone()
            tokens[position] = token
            total += math.exp(-float(context.score(tokens)[position - 1]))
        total *= vocab / candidates.numel()
        least = min(least, total)
        if total > worst:
            worst = total
            where = position
    # a sample of an honest distribution is far from 1 by chance: only gross violations show
    allowed = 1 + SUM_TOLERANCE if sampled == vocab else 4.0
    if not worst <= allowed:
        reason = "a token's score depends on the token itself beyond its own probability"
        sentence = f"the probabilities of all tokens at position {where} sum to {worst:.4g}: {reason}"
        return _row("normalized", passed=False, sentence=sentence, measured=worst, tolerance=allowed)
    sentence = "the probabilities of all tokens sum to 1"
    if sampled < vocab:
        sentence = f"{sampled} of {vocab} tokens were tried, which show gross violations alone"
    elif least < 1 - SUM_TOLERANCE:
        sentence = f"the probabilities of all tokens sum to {least:.4g} at least: the rest is given to no token"
    return _row("normalized", passed=True, sentence=sentence, measured=worst, tolerance=allowed)


def repeatable_score(context: ScorerContext) -> ContractRow:
    """A second call gives the same, and calls change no weights."""
    before = {name: value.clone() for name, value in _tensors_within(context.function)}
    second = context.score(context.tokens)
    change = float((second - context.expected).abs().max()) / context.scale
    if not change <= TOLERANCE:
        sentence = "a second call gives other scores: something is kept from the first, or drawn at random"
        return _row("repeatable-score", passed=False, sentence=sentence, measured=change, tolerance=TOLERANCE)
    after = dict(_tensors_within(context.function))
    changed = [name for name, value in before.items() if name in after and not _same(value, after[name])]
    if changed:
        sentence = f"a call changes {changed[0]}, so that the next stream is scored by another model"
        return _row("repeatable-score", passed=False, sentence=sentence, measured=float(len(changed)), tolerance=0.0)
    sentence = "two calls give the same, and no weights change"
    return _row("repeatable-score", passed=True, sentence=sentence, measured=change, tolerance=TOLERANCE)


def _same(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.equal(left, right)


def _tensors_within(function: Callable[..., Any]) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of the modules that a function holds: itself, its attributes, closure and globals."""
    held: dict[str, Any] = {"the scorer": function, **getattr(function, "__dict__", {})}
    # the code of a function, or of the call of an object
    call = function if hasattr(function, "__code__") else vars(type(function)).get("__call__")
    code = getattr(call, "__code__", None)
    if code is not None:
        cells = getattr(call, "__closure__", None) or ()
        for name, cell in zip(code.co_freevars, cells):
            try:
                held[name] = cell.cell_contents
            except ValueError:
                # a name that is not bound yet
                continue
        names = getattr(call, "__globals__", {})
        held |= {name: names[name] for name in code.co_names if isinstance(names.get(name), nn.Module)}
    for holder, value in held.items():
        if isinstance(value, nn.Module):
            for name, tensor in value.state_dict().items():
                yield f"{holder}.{name}", tensor


def partition(context: ScorerContext) -> ContractRow:
    """No keyword for how the work is cut, such as the size of a batch, changes a score."""
    worst = 0.0
    for keywords in context.options.partitions:
        shown = ", ".join(f"{name}={value}" for name, value in keywords.items())
        change = float((context.score(context.tokens, **keywords) - context.expected).abs().max()) / context.scale
        worst = max(worst, change)
        if not change <= TOLERANCE:
            sentence = f"with {shown} other scores come out: they depend on how the work is cut"
            return _row("partition", passed=False, sentence=sentence, measured=change, tolerance=TOLERANCE)
    sentence = "how the work is cut changes no score"
    return _row("partition", passed=True, sentence=sentence, measured=worst, tolerance=TOLERANCE)


def documents(context: ScorerContext) -> ContractRow:
    """Tokens before the beginning of a document change no score behind it."""
    bos = context.options.bos
    assert bos is not None
    tokens = context.tokens.clone()
    start = tokens.numel() // 2
    tokens[start] = bos
    others = tokens.clone()
    others[:start] = context.other_tokens(tokens[:start])
    others[others == bos] = (bos + 1) % context.options.vocab
    others[start] = bos
    change = float((context.score(tokens) - context.score(others))[start:].abs().max()) / context.scale
    if not change <= TOLERANCE:
        sentence = f"tokens before the document at {start} change scores in it"
        return _row("documents", passed=False, sentence=sentence, measured=change, tolerance=TOLERANCE)
    sentence = "tokens before a document change no score in it"
    return _row("documents", passed=True, sentence=sentence, measured=change, tolerance=TOLERANCE)


TEXTS = (
    "plain text, 123",
    "Grüße aus Köln",
    "数学と論理",
    "naïve café — “quoted”",
    "🙂🙃 emoji 👩‍👩‍👧",
    "a\u2581b\ufffdc",
)
"""Texts whose characters take one to four bytes, with the signs that tokenizers use for spaces and for damage."""


def byte_counts(context: ScorerContext) -> ContractRow:
    """The bytes of tokens sum to the bytes of their text: of each token, of random ones and of known texts."""
    options = context.options
    assert options.bytes_of is not None
    worst = 0.0
    for name, ids, true in _byte_cases(options, context):
        counted = float(torch.as_tensor(options.bytes_of(torch.tensor(ids))).double().sum())
        worst = max(worst, abs(counted - true))
        if counted != true:
            sentence = f"{name} counts {counted:g} bytes and has {true}"
            return _row("bytes", passed=False, sentence=sentence, measured=abs(counted - true), tolerance=0.0)
    return _row("bytes", passed=True, sentence="tokens have as many bytes as their text", measured=worst, tolerance=0.0)


class ByteCase(NamedTuple):
    """Tokens whose number of bytes is known."""

    name: str
    ids: list[int]
    true: int


def _byte_cases(options: ScorerOptions, context: ScorerContext) -> Iterator[ByteCase]:
    if options.encode is not None:
        for text in TEXTS:
            yield ByteCase(f"{text!r}", list(options.encode(text)), len(text.encode()))
    if options.decode is None:
        return
    singles = [[token] for token in range(min(options.vocab, MAX_CALLS))]
    for ids in [*singles, context.random_tokens(64).tolist()]:
        name = f"token {ids[0]}" if len(ids) == 1 else "a random sequence"
        decoded = options.decode(ids)
        if isinstance(decoded, bytes):
            yield ByteCase(name, ids, len(decoded))
        # a text with the sign of damage says nothing about the bytes that it stands for
        elif "\ufffd" not in decoded:
            yield ByteCase(f"{name} ({decoded!r})", ids, len(decoded.encode()))


SCORER_CONTRACTS: dict[str, Callable[[ScorerContext], ContractRow]] = {
    "repeatable-score": repeatable_score,
    "causal-stream": causal_stream,
    "normalized": normalized,
    "partition": partition,
    "bytes": byte_counts,
    "documents": documents,
}


def check_scorer(
    score: Callable[..., Any],
    vocab: int,
    *,
    only: Sequence[str] | None = None,
    on_row: Callable[[ContractRow], None] | None = None,
    **options: Any,
) -> CheckReport:
    """Run the contracts of a scorer: `score(tokens) -> nats of tokens 1 to n - 1`, from a fresh state in each call.

    `options` are those of `ScorerOptions`. A contract for which an option is missing is not run, and says which.
    Raises UserError for a contract that does not exist.
    """
    known = ScorerOptions(vocab, **options)
    for name in only or ():
        if name not in SCORER_CONTRACTS and name != "counted":
            raise UserError(f"there is no contract '{name}' of scorers; {suggest_names(name, SCORER_CONTRACTS)}")
    name = getattr(score, "__name__", type(score).__name__)
    lengths = CheckLengths(known.stream_length, known.stream_length)
    missing = {
        "partition": None if known.partitions else "no `partitions` are given: keywords that must not change a score",
        "documents": None if known.bos is not None else "no `bos` is given: documents need not be independent",
        "bytes": _why_no_bytes(known),
    }
    rows: list[ContractRow] = []

    def add(row: ContractRow) -> None:
        rows.append(row)
        if on_row is not None:
            on_row(row)

    try:
        context = ScorerContext(score, known)
    except ValueError as error:
        # every target is to be scored, and once: fewer numbers than targets are a dropped tail
        add(ContractRow("counted", "failed", str(error)))
        return CheckReport(name, tuple(rows), lengths, known.seed)
    add(ContractRow("counted", "passed", "there is one score for each token after the first"))
    for contract_name, test in SCORER_CONTRACTS.items():
        if only is not None and contract_name not in only:
            continue
        if any(row.contract == "repeatable-score" and row.verdict == "failed" for row in rows):
            sentence = "not run: two equal calls differ, so scores cannot be compared"
            add(ContractRow(contract_name, "not run", sentence))
        elif missing.get(contract_name) is not None:
            add(ContractRow(contract_name, "not run", f"not run: {missing[contract_name]}"))
        else:
            add(test(context))
    return CheckReport(name, tuple(rows), lengths, known.seed)


def _why_no_bytes(options: ScorerOptions) -> str | None:
    if options.bytes_of is None:
        return "no `bytes_of` is given"
    if options.decode is None and options.encode is None:
        return "neither `decode` nor `encode` is given, so that the true bytes are not known"
    return None


EXACT_MEAN = 5e-7
"""The distance, relative to a mean in float32, at which it is taken for the mean of certain targets."""


class TableModel(nn.Module):
    """A model whose logits depend on the last token alone, in a table: the nats of every target are known exactly."""

    def __init__(self, vocab: int, *, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        # far from uniform, so that a target that is dropped or counted twice shows in a mean
        self.table = nn.Parameter(3 * torch.randn(vocab, vocab, generator=generator))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        """Logits, or those and the mean loss where targets are given."""
        logits = self.table[tokens]
        if targets is None:
            return logits
        return logits, nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())

    def nats(self, tokens: Tensor) -> Tensor:
        """The true nats of the tokens after the first."""
        log_probabilities = self.table[tokens[:-1]].double().log_softmax(-1)
        return -log_probabilities.gather(-1, tokens[1:, None])[:, 0].detach()


def check_evaluator(
    evaluate: Callable[[nn.Module, Tensor], float],
    vocab: int,
    *,
    length: int = 1000,
    tolerance: float = 1e-4,
    model: TableModel | None = None,
) -> ContractRow:
    """Whether an evaluator gives the true mean nats of a model whose nats are known.

    `evaluate(model, tokens)` is the evaluator of one number, with a table model in place of the model. The length is
    no multiple of what windows usually have, so that a tail that is dropped or counted repeatedly shows.
    """
    model = model or TableModel(vocab)
    tokens = torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(1))
    nats = model.nats(tokens)
    true = float(nats.mean())
    given = float(evaluate(model, tokens))
    difference = abs(given - true) / true
    if difference <= tolerance:
        return ContractRow("counted", "passed", f"the mean of {length - 1} targets is right", difference, tolerance)
    reason = _explain_mean(nats, given)
    sentence = f"the mean is {given:.4f} nats for {true:.4f}: {reason}"
    return ContractRow("counted", "failed", sentence, difference, tolerance)


def _explain_mean(nats: Tensor, given: float) -> str:
    """What was counted, if leaving out a tail or a head gives the number to the last digits."""
    count = nats.numel()
    kept = torch.arange(1, count)
    sums = nats.cumsum(0)
    candidates = {
        "first {0} of {1} targets: the tail is dropped": (sums[:-1] / kept - given).abs(),
        "last {0} of {1} targets: the beginning is dropped": (nats.flip(0).cumsum(0)[:-1] / kept - given).abs(),
    }
    for words, distances in candidates.items():
        if float(distances.min()) <= EXACT_MEAN * abs(given):
            return f"that of the {words.format(int(distances.argmin()) + 1, count)}"
    for divisor in (count + 1, count - 1):
        if abs(float(sums[-1]) / divisor - given) <= EXACT_MEAN * abs(given):
            return f"the sum of all {count} targets divided by {divisor}"
    return "targets are dropped, counted more than once or weighted, or the mean is one of means of unequal parts"


def windowed_scorer(logits: Callable[[Tensor], Tensor], window: int, stride: int) -> Scorer:
    """A scorer of windows of at most `window` tokens, `stride` new ones in each, that scores each target once."""
    if not 1 <= stride <= window:
        raise UserError(f"stride ({stride}) must be from 1 to the window ({window})")

    @torch.no_grad()
    def score(tokens: Tensor) -> Tensor:
        nats: list[Tensor] = []
        scored = 1
        while scored < tokens.numel():
            stop = min(scored + (window if scored == 1 else stride), tokens.numel())
            # the window is what the model reads: the last target is not among it
            start = max(stop - 1 - window, 0)
            inputs = tokens[start : stop - 1]
            log_probabilities = logits(inputs[None])[0].double().log_softmax(-1)
            first = scored - 1 - start
            targets = tokens[scored:stop]
            nats.append(-log_probabilities[first:].gather(-1, targets[:, None])[:, 0])
            scored = stop
        return torch.cat(nats)

    return score
