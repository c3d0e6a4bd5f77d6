"""Contracts of scorers: functions that give each token of a stream the nats that it costs.

A number of bits per byte is worth as much as the code that computed it. A scorer may look at what it scores in more
ways than a model: it may train on a token before it scores it, keep tables that contain it, mix probabilities by a
weight that depends on it, drop or repeat targets, and count bytes that a text does not have. Each of these shows in
the numbers that a scorer gives for streams that differ in chosen tokens.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manyformer.analysis.contracts.call_forms import find_form
from manyformer.analysis.contracts.check_report import CheckLengths, CheckReport, ContractRow
from manyformer.analysis.contracts.scorer_bytes import byte_counts, why_no_bytes
from manyformer.analysis.contracts.scorer_trial import (
    LONGER,
    LONGER_CUTS,
    LONGER_POSITIONS,
    LOW_PRECISION,
    SUM_TOLERANCE,
    TOLERANCE,
    PositionSum,
    ScoreFault,
    ScoreLeak,
    Scorer,
    ScorerOptions,
    ScorerTrial,
    allowed_excess,
    score_changes,
)
from manyformer.base.errors import UserError, suggest_names


def _row(
    name: str, *, passed: bool, sentence: str, measured: float | None = None, tolerance: float | None = None
) -> ContractRow:
    return ContractRow(name, "passed" if passed else "failed", sentence, measured, tolerance)


def counted(trial: ScorerTrial) -> ContractRow:
    """There is one score for each token after the first, also of streams of other lengths."""
    length = trial.tokens.numel()
    block = trial.options.block or 64
    lengths = [2, 3, block, block + 1, 2 * block, 2 * block + 1, length - 1, length + 1]
    refused = []
    for count in sorted({count for count in lengths if 2 <= count <= length + 1}):
        tokens = trial.phrases(count)
        try:
            trial.score(tokens)
        except ScoreFault:
            raise
        except Exception as error:
            refused.append(f"{count} ({_first_line(error)})")
    sentence = "there is one score for each token after the first"
    if refused:
        sentence += f"; it raises at lengths {', '.join(refused)}"
    return _row("counted", passed=True, sentence=sentence)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def repeatable_score(trial: ScorerTrial) -> ContractRow:
    """A second call gives the same, and nothing that a call leaves behind changes a later score."""
    calls = [trial.expected, *trial.repeated]
    change = max(float(score_changes(call, trial.expected).max()) for call in calls) / trial.scale
    if change > TOLERANCE and not (change <= LOW_PRECISION and _is_noise(calls)):
        sentence = "a second call gives other scores: something is kept from the first, or drawn at random"
        return _row("repeatable-score", passed=False, sentence=sentence, measured=change, tolerance=TOLERANCE)
    if change > TOLERANCE:
        trial.noise = change
    kept_files = trial.files.kept_files(lambda: trial.score(trial.tokens))
    if kept_files:
        return _row("repeatable-score", passed=False, sentence=_describe_kept(kept_files))
    changed = trial.held.changed()
    weights = [value.name for value in changed if value.is_weight]
    if weights:
        sentence = f"a call changes {weights[0]}, so that the next stream is scored by another model"
        return _row("repeatable-score", passed=False, sentence=sentence, measured=float(len(weights)), tolerance=0.0)
    if changed:
        # caches that are filled anew in each call change as well, and no score depends on them
        after_others = trial.score(trial.others)
        for value in changed:
            value.put_back()
        alone = trial.score(trial.others)
        difference = float(score_changes(after_others, alone).max()) / trial.scale
        if difference > trial.tolerance:
            sentence = f"the scores of a stream depend on the streams before it, which {changed[0].name} keeps"
            return _row("repeatable-score", passed=False, sentence=sentence, measured=difference, tolerance=TOLERANCE)
    sentence = "equal calls give the same, and no weights change"
    if trial.noise:
        sentence = "equal calls differ without direction, as sums in 16 bits do whose order varies"
    return _row("repeatable-score", passed=True, sentence=sentence, measured=change, tolerance=trial.tolerance)


def _is_noise(calls: Sequence[Tensor]) -> bool:
    """Whether differences between calls have no direction: what learns from a stream makes it cheaper."""
    differences = (calls[-1] - calls[0])[calls[0].isfinite()]
    deviation = float(differences.std())
    return abs(float(differences.mean())) <= 3 * deviation / math.sqrt(max(differences.numel(), 1))


def causal_stream(trial: ScorerTrial) -> ContractRow:
    """Exchanged tokens change the nats of no earlier token."""
    length = trial.tokens.numel()
    tried = _exchange(trial, trial.tokens, trial.expected, trial.cuts()[: trial.exchanges], singles=24)
    count = tried
    # what hangs on rare tokens shows in other streams of the same length
    while trial.leak is None and tried < trial.exchanges:
        tokens = trial.random_tokens(length)
        cuts = trial.shuffled_cuts()[: trial.exchanges - tried]
        tried += _exchange(trial, tokens, trial.score(tokens), cuts)
    longer = trial.with_longer_stream() if trial.leak is None else None
    if longer is not None:
        _exchange(longer, longer.tokens, longer.expected, longer.shuffled_cuts()[:LONGER_CUTS])
        if longer.leak is not None:
            return _describe_leak(longer, longer.leak)
    if trial.leak is not None:
        return _describe_leak(trial, trial.leak)
    which = f"each of {length} tokens" if count >= length - 2 else f"{count} of {length} tokens"
    sentence = f"exchanged tokens change no earlier score, at {which}"
    if longer is not None:
        sentence += f" and {LONGER_CUTS} of {LONGER}"
    return _row("causal-stream", passed=True, sentence=sentence, measured=trial.worst_change, tolerance=trial.tolerance)


def _exchange(trial: ScorerTrial, base: Tensor, expected: Tensor, cuts: Sequence[int], singles: int = 0) -> int:
    """Exchange all tokens from each cut on, until a leak shows, and at the first cuts the token alone as well."""
    for index, cut in enumerate(cuts):
        stops = (cut + 1, base.numel()) if index < singles else (base.numel(),)
        for stop in stops:
            tokens = base.clone()
            tokens[cut:stop] = trial.other_tokens(tokens[cut:stop])
            trial.compare(cut, trial.score(tokens), expected)
            if trial.leak is not None:
                return index
    return len(cuts)


def _describe_leak(trial: ScorerTrial, leak: ScoreLeak) -> ContractRow:
    """The failed row, with the kind of leak by how far back from an exchanged token scores change."""
    widest = max([leak, *_leaks_of_tails(trial, leak.cut)], key=_reach)
    first = int(widest.changed.min())
    count = widest.changed.numel()
    if count == 1:
        sentence = f"the score of the earlier token {first} changes when token {widest.cut} does"
    else:
        span = f"({first} to {int(widest.changed.max())})"
        sentence = f"the scores of {count} earlier tokens {span} change when token {widest.cut} does"
    block = trial.options.block
    if _reach(widest) > 0.8 * (widest.cut - 1) and (block is None or _reach(widest) > block):
        reason = "the whole stream is read before it is scored (two passes, training or tables before scores)"
    elif block is not None and first // block == widest.cut // block:
        reason = f"tokens are seen within their own block of {block}"
    elif count == 1:
        reason = "it is scored after a later token was read"
    else:
        reason = "they are scored after it was read"
    return _row(
        "causal-stream",
        passed=False,
        sentence=f"{sentence}: {reason}",
        measured=max(leak.change, widest.change),
        tolerance=trial.tolerance,
    )


def _reach(leak: ScoreLeak) -> int:
    return leak.cut - int(leak.changed.min())


def _leaks_of_tails(trial: ScorerTrial, cut: int) -> list[ScoreLeak]:
    """Leaks of whole tails, at the cut that showed one and at another.

    Several tails are tried, among them copies of the beginning: what is counted there changes most.
    """
    length = trial.tokens.numel()
    leaks = []
    for start in (cut, 2 * length // 3):
        if not 2 <= start < length:
            continue
        changes = torch.zeros(length - 1, dtype=torch.float64)
        for index in range(4):
            tokens = trial.tokens.clone()
            if index < 2:
                tokens[start:] = trial.other_tokens(tokens[start:])
            else:
                tokens[start:] = tokens.roll(start - index + 2)[start:]
            changes = torch.maximum(changes, score_changes(trial.score(tokens), trial.expected))
        leak = trial.leak_of(start, changes)
        if leak is not None:
            leaks.append(leak)
    return leaks


def normalized(trial: ScorerTrial) -> ContractRow:
    """The probabilities that the tokens of the vocabulary would have at a position sum to at most 1."""
    vocab = trial.options.vocab
    sums = trial.sums
    longer = trial.with_longer_stream()
    if longer is not None:
        # in the second half, where a table has seen most
        positions = [cut for cut in longer.shuffled_cuts() if cut > LONGER // 2]
        sums = [*sums, *longer.sums_at(positions[:LONGER_POSITIONS])]
    worst = max(sums, key=_excess)
    allowed = 1 + SUM_TOLERANCE + worst.rounding
    if _excess(worst) > 0:
        measured = max(worst.total, worst.estimate)
        amount = f"sum to {measured:.4g}"
        if worst.tried < vocab:
            amount = f"sum to about {measured:.4g}, by {worst.tried} of {vocab} tokens"
        reason = "a token's score depends on the token itself beyond its own probability"
        if worst.is_constant:
            reason = "every token gets the same score there, which is not its own (is another token scored, or none?)"
        sentence = f"the probabilities of all tokens at position {worst.position} {amount}: {reason}"
        return _row("normalized", passed=False, sentence=sentence, measured=measured, tolerance=allowed)
    violation = trial.scan.violation()
    if violation is not None:
        where, mean, bound = violation
        sentence = (
            f"tokens drawn at random{where} are {mean:.3g} times as probable as their number allows: a token's score "
            "depends on the token itself beyond its own probability"
        )
        return _row("normalized", passed=False, sentence=sentence, measured=mean, tolerance=bound)
    constant = [each for each in sums if each.is_constant and each.tried == vocab and each.total < 1 - SUM_TOLERANCE]
    if constant:
        sentence = (
            f"every token gets the same score at position {constant[0].position}, and these probabilities sum to "
            f"{constant[0].total:.4g}: it is not its own score (are targets shifted?)"
        )
        return _row("normalized", passed=False, sentence=sentence, measured=constant[0].total, tolerance=allowed)
    return _row("normalized", passed=True, sentence=_describe_sums(trial), measured=worst.total, tolerance=allowed)


def _excess(each: PositionSum) -> float:
    """By how much a sum is too large: what was tried may not exceed 1, and a sample not by far."""
    excess = each.total - (1 + SUM_TOLERANCE + each.rounding)
    if each.estimate == each.total:
        return excess
    return max(excess, each.estimate - (1 + allowed_excess(each.tried)))


def _describe_sums(trial: ScorerTrial) -> str:
    vocab = trial.options.vocab
    sums = trial.sums
    targets = trial.tokens.numel() - 1
    where = f"{len(sums)} of {targets} positions" if len(sums) < targets else f"each of {targets} positions"
    if len(sums) == 1:
        where = f"one of {targets} positions"
    if sums[0].tried < vocab:
        return f"{sums[0].tried} of {vocab} tokens were tried at {where}, which show gross violations alone"
    least = min(each.total for each in sums)
    if least < 1 - SUM_TOLERANCE:
        return f"the probabilities of all tokens sum to {least:.4g} at least: the rest is given to no token, at {where}"
    return f"the probabilities of all tokens sum to 1, at {where}"


def partition(trial: ScorerTrial) -> ContractRow:
    """No keyword for how the work is cut, such as the size of a batch, changes a score."""
    worst = 0.0
    for keywords in trial.options.partitions:
        shown = ", ".join(f"{name}={value}" for name, value in keywords.items())
        changes = score_changes(trial.score(trial.tokens, **keywords), trial.expected)
        change = float(changes.max()) / trial.scale
        worst = max(worst, change)
        if change > trial.tolerance:
            sentence = f"with {shown} other scores come out: they depend on how the work is cut"
            return _row("partition", passed=False, sentence=sentence, measured=change, tolerance=trial.tolerance)
    sentence = "how the work is cut changes no score"
    return _row("partition", passed=True, sentence=sentence, measured=worst, tolerance=trial.tolerance)


def documents(trial: ScorerTrial) -> ContractRow:
    """Tokens before the beginning of a document change no score behind it."""
    bos = trial.options.bos
    assert bos is not None
    length = trial.tokens.numel()
    worst = 0.0
    for start in sorted({length // 2, length // 3, (trial.options.block or 64) % length, length - 3}):
        if start < 1:
            continue
        tokens = trial.tokens.clone()
        tokens[start] = bos
        expected = trial.score(tokens)
        for first in (0, start - 1):
            others = tokens.clone()
            others[first:start] = trial.other_tokens(tokens[first:start])
            # the score of the token that begins the document belongs to the one before
            change = float(score_changes(trial.score(others), expected)[start:].max()) / trial.scale
            worst = max(worst, change)
            if change > trial.tolerance:
                sentence = f"tokens before the document at {start} change scores in it"
                return _row("documents", passed=False, sentence=sentence, measured=change, tolerance=trial.tolerance)
    sentence = "tokens before a document change no score in it"
    return _row("documents", passed=True, sentence=sentence, measured=worst, tolerance=trial.tolerance)


SCORER_CONTRACTS: dict[str, Callable[[ScorerTrial], ContractRow]] = {
    "counted": counted,
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
    Raises UserError for a contract that does not exist, and for a scorer that raises.
    """
    known = ScorerOptions(vocab, **options)
    for name in only or ():
        if name not in SCORER_CONTRACTS:
            raise UserError(f"there is no contract '{name}' of scorers; {suggest_names(name, SCORER_CONTRACTS)}")
    if vocab < 2 or known.stream_length < 4:
        raise UserError(f"a vocabulary of {vocab} and {known.stream_length} tokens are too few: at least 2 and 4")
    name = getattr(score, "__name__", type(score).__name__)
    rows: dict[str, ContractRow] = {}

    def add(row: ContractRow) -> None:
        earlier = rows.get(row.contract)
        # what is wrong once stays wrong
        if earlier is not None and earlier.verdict == "failed":
            return
        rows[row.contract] = row
        if on_row is not None:
            on_row(row)

    try:
        trial = ScorerTrial(score, known)
    except ScoreFault as fault:
        # every target is to be scored, and once: fewer numbers than targets are a dropped tail
        add(fault.row)
    except Exception as error:
        shown = f"{known.stream_length} tokens of a vocabulary of {vocab}"
        raise UserError(f"the scorer {name} raises at {shown}: {_first_line(error)}") from error
    else:
        _run_contracts(trial, only, add)
    lengths = CheckLengths(known.stream_length, known.stream_length)
    return CheckReport(name, tuple(rows.values()), lengths, known.seed)


def _run_contracts(trial: ScorerTrial, only: Sequence[str] | None, add: Callable[[ContractRow], None]) -> None:
    options = trial.options
    missing = {
        "partition": None if options.partitions else "no `partitions` are given: keywords that must not change a score",
        "documents": None if options.bos is not None else "no `bos` is given: documents need not be independent",
        "bytes": why_no_bytes(options),
    }
    differs = False
    for name, test in SCORER_CONTRACTS.items():
        # one score for each target is what all others rest on
        if only is not None and name not in (*only, "counted"):
            continue
        if differs and name != "bytes":
            add(ContractRow(name, "not run", "not run: two equal calls differ, so scores cannot be compared"))
            continue
        if missing.get(name) is not None:
            add(ContractRow(name, "not run", f"not run: {missing[name]}"))
            continue
        row = _run(name, test, trial)
        if name == "causal-stream" and row.verdict == "passed" and (only is None or "normalized" in only):
            row = _with_sweeps(trial, row)
        differs = differs or (name == "repeatable-score" and row.verdict == "failed")
        add(row)
        if row.contract != name:
            add(ContractRow(name, "not run", f"not run to its end: {row.sentence}"))
    if not differs and (only is None or "repeatable-score" in only):
        late = _late_change(trial)
        if late is not None:
            add(late)


def _run(name: str, test: Callable[[ScorerTrial], ContractRow], trial: ScorerTrial) -> ContractRow:
    try:
        return test(trial)
    except ScoreFault as fault:
        return fault.row
    except Exception as error:
        return ContractRow(name, "not run", f"not run: the scorer raised {_first_line(error)}")


def _with_sweeps(trial: ScorerTrial, row: ContractRow) -> ContractRow:
    """The row of `causal-stream` after every token of the vocabulary was put at a few positions.

    Sums of probabilities need these calls anyway, and a leak of rare tokens shows in no others.
    """
    try:
        _ = trial.scan, trial.sums
    except Exception:
        # told by the contract whose calls they are
        return row
    if trial.leak is not None:
        return _describe_leak(trial, trial.leak)
    return row._replace(measured=trial.worst_change)


def _late_change(trial: ScorerTrial) -> ContractRow | None:
    """A failed row if the first stream gets other scores at the end of the check, or files were kept since."""
    change = float(score_changes(trial.score(trial.tokens), trial.expected).max()) / trial.scale
    if change > trial.tolerance:
        sentence = "the first stream gets other scores after the calls of this check: something is kept between calls"
        return _row("repeatable-score", passed=False, sentence=sentence, measured=change, tolerance=trial.tolerance)
    kept_files = trial.files.kept_files(lambda: trial.score(trial.tokens))
    if kept_files:
        return _row("repeatable-score", passed=False, sentence=_describe_kept(kept_files))
    return None


def _describe_kept(files: Sequence[str]) -> str:
    return f"calls write {files[0]} and read it again: what is kept there outlives a call"


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


def scorer_of_model(model: nn.Module, window: int, stride: int) -> tuple[Scorer, int]:
    """A model's scorer by windows, and its vocabulary; how the model is called is found by trial."""
    found = find_form(model)
    if found.max_length is not None and window > found.max_length:
        raise UserError(f"a window of {window} is longer than the model takes: {found.length_reason}")

    def logits(tokens: Tensor) -> Tensor:
        return found.logits(model, tokens)

    return windowed_scorer(logits, window, stride), found.vocabulary
