"""Evaluators that give one number are tried with a model whose nats are known exactly in place of the model."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from manyformer.analysis.contracts.check_report import CheckLengths, CheckReport, ContractRow
from manyformer.base.errors import UserError, suggest_names

EXACT_MEAN = 5e-7
"""The distance, relative to a mean in float32, at which it is taken for the mean of certain targets."""

LENGTHS = (1000, 1025, 700)
"""Tokens of the streams: with tails behind whole windows and batches, and without for the usual sizes."""

ResultForm = Literal["logits, loss", "loss", "output"]

FORMS: tuple[ResultForm, ...] = ("logits, loss", "loss", "output")
"""What a model gives where it gets targets: tried in this order until the evaluator makes a number of it."""

IGNORED = (-1, -100)
"""Targets that evaluators leave out."""


class TableOutput(dict[str, Any]):
    """A result with `loss` and `logits`, by attribute and by key, as of Hugging Face models."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


class TableModel(nn.Module):
    """A model whose logits depend on the last token alone, in a table: the nats of every target are known exactly."""

    def __init__(self, vocab: int, *, seed: int = 0, form: ResultForm = "logits, loss", spread: float = 3.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.form = form
        # far from uniform, so that a target that is dropped or counted twice shows in a mean
        self.table = nn.Parameter(spread * torch.randn(vocab, vocab, generator=generator))

    def forward(
        self,
        tokens: Tensor | None = None,
        targets: Tensor | None = None,
        loss_reduction: str = "mean",
        **keywords: Any,
    ) -> Any:
        """Logits, or, where targets are given, what `form` says."""
        if tokens is None:
            tokens = next(keywords[name] for name in ("input_ids", "idx", "x", "ids") if name in keywords)
        named = [keywords[name] for name in ("target_ids", "y", "target") if name in keywords]
        reduction = keywords.get("reduction", loss_reduction)
        logits = self.table[tokens.long()]
        if targets is None and named:
            targets = named[0]
        if self.form == "output":
            labels = keywords.get("labels")
            loss = None
            if labels is not None:
                # these models shift labels by themselves
                loss = _cross_entropy(logits[..., :-1, :], labels[..., 1:], reduction)
            return TableOutput(loss=loss, logits=logits)
        if targets is None:
            return logits
        loss = _cross_entropy(logits, targets, reduction)
        return loss if self.form == "loss" else (logits, loss)

    def forward_logits(self, tokens: Tensor) -> Tensor:
        """Logits, by the name that models have for it whose call gives a loss."""
        return self.table[tokens.long()]

    def nats(self, tokens: Tensor) -> Tensor:
        """The true nats of the tokens after the first."""
        log_probabilities = self.table[tokens[:-1]].double().log_softmax(-1)
        return -log_probabilities.gather(-1, tokens[1:, None])[:, 0].detach()


def _cross_entropy(logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
    flat = targets.flatten().long()
    flat = torch.where(flat == IGNORED[0], IGNORED[1], flat)
    return nn.functional.cross_entropy(logits.flatten(0, -2), flat, ignore_index=IGNORED[1], reduction=reduction)


class Statistic(NamedTuple):
    """A number that evaluators give, and its true value."""

    name: str
    value: float


def check_evaluator(
    evaluate: Callable[[nn.Module, Tensor], float],
    vocab: int,
    *,
    length: int | None = None,
    tolerance: float = 1e-4,
    model: TableModel | None = None,
    bytes_of: Callable[[Tensor], Any] | None = None,
    seed: int = 0,
) -> ContractRow:
    """Whether an evaluator gives the true number of a model whose nats are known.

    `evaluate(model, tokens)` is the evaluator of one number, with a table model in place of the model: the mean nats or
    bits of a token, bits of a byte (with `bytes_of`), their total, or the perplexity. Without a length several are
    tried, most with a rest behind whole windows and batches, so that a tail that is dropped or counted again shows.
    Raises UserError if the evaluator makes no number of any result that a model may give.
    """
    chosen = model or _accepted_model(evaluate, vocab, seed)
    worst = 0.0
    sentence = ""
    for count in LENGTHS if length is None else (length,):
        tokens = _random_stream(vocab, count, seed)
        nats = chosen.nats(tokens)
        before = chosen.table.detach().clone()
        given = _number(evaluate(chosen, tokens))
        if not torch.equal(before, chosen.table.detach()):
            with torch.no_grad():
                chosen.table.copy_(before)
            sentence = "not run: the evaluator trains the model, so that its number is not that of the table"
            return ContractRow("counted", "not run", sentence)
        statistics = _statistics(nats, tokens, bytes_of)
        name, difference = min(
            ((each.name, abs(given - each.value) / abs(each.value)) for each in statistics), key=lambda pair: pair[1]
        )
        worst = max(worst, difference)
        if not difference <= tolerance:
            true = statistics[-1] if bytes_of is not None else statistics[0]
            reason = _explain(nats, tokens, given, bytes_of)
            sentence = f"the {true.name} is {given:.4f} for {true.value:.4f}: {reason}"
            if true.name == "mean in nats":
                sentence = f"the mean is {given:.4f} nats for {true.value:.4f}: {reason}"
            return ContractRow("counted", "failed", sentence, difference, tolerance)
        found = "mean" if name == "mean in nats" else name
        sentence = sentence or f"the {found} of {count - 1} targets is right"
    if length is None:
        sentence += f", also at {' and '.join(str(count) for count in LENGTHS[1:])} tokens"
    return ContractRow("counted", "passed", sentence, worst, tolerance)


def _random_stream(vocab: int, length: int, seed: int) -> Tensor:
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed + 1))


def _number(value: Any) -> float:
    """The number that an evaluator gives; of several the last, as in (loss, bits per byte)."""
    if isinstance(value, tuple | list):
        value = value[-1]
    elif isinstance(value, dict):
        value = list(value.values())[-1]
    return float(value.detach() if isinstance(value, Tensor) else value)


def _accepted_model(evaluate: Callable[..., Any], vocab: int, seed: int) -> TableModel:
    """The table model in the form of result of which the evaluator makes a number."""
    reasons = []
    tokens = _random_stream(vocab, LENGTHS[0], seed)
    for form in FORMS:
        model = TableModel(vocab, seed=seed, form=form)
        try:
            number = _number(evaluate(model, tokens))
        except Exception as error:
            lines = str(error).splitlines() or [type(error).__name__]
            reasons.append(f"{form}: {lines[0]}")
            continue
        if math.isfinite(number):
            return TableModel(vocab, seed=seed, form=form)
        reasons.append(f"{form}: {number}")
    raise UserError(
        "the evaluator, called as evaluate(model, tokens), gives no number whatever the model returns ("
        + "; ".join(reasons)
        + ")"
    )


def _statistics(nats: Tensor, tokens: Tensor, bytes_of: Callable[[Tensor], Any] | None) -> list[Statistic]:
    mean = float(nats.mean())
    total = float(nats.sum())
    statistics = [
        Statistic("mean in nats", mean),
        Statistic("mean in bits", mean / math.log(2)),
        Statistic("total in nats", total),
        Statistic("total in bits", total / math.log(2)),
        Statistic("log likelihood", -total),
        Statistic("perplexity", math.exp(min(mean, 700))),
    ]
    if bytes_of is not None:
        # the bytes of the targets: the first token has no score
        size = float(torch.as_tensor(bytes_of(tokens)).double()[1:].sum())
        statistics += [Statistic("bits per byte", total / math.log(2) / size)]
    return statistics


def _explain(nats: Tensor, tokens: Tensor, given: float, bytes_of: Callable[[Tensor], Any] | None) -> str:
    """What was counted, if a simple fault gives the number to the last digits."""
    if bytes_of is not None:
        sizes = torch.as_tensor(bytes_of(tokens)).double()
        bits = nats / math.log(2)
        reason = _explain_ratio(bits, sizes[1:], given)
        if reason is not None:
            return reason
        if _is_close(float(bits.sum() / sizes.sum()), given):
            return "the bytes of the first token are counted, whose score is not"
        if _is_close(float((bits / sizes[1:].clamp(min=1)).mean()), given):
            return "the mean of bits per byte of the tokens, not of the bytes"
    return _explain_mean(nats, given)


def _is_close(value: float, given: float) -> bool:
    return abs(value - given) <= EXACT_MEAN * abs(given)


def _explain_ratio(values: Tensor, weights: Tensor, given: float) -> str | None:
    """The part of the targets whose ratio of sums is the number."""
    count = values.numel()
    heads = values.cumsum(0)[:-1] / weights.cumsum(0)[:-1]
    tails = values.flip(0).cumsum(0)[:-1] / weights.flip(0).cumsum(0)[:-1]
    for ratios, words in (
        (heads, "first {0} of {1} targets: the tail is dropped"),
        (tails, "last {0} of {1} targets: the beginning is dropped"),
    ):
        distances = (ratios - given).abs()
        if float(distances.min()) <= EXACT_MEAN * abs(given):
            return f"that of the {words.format(int(distances.argmin()) + 1, count)}"
    return None


def _explain_mean(nats: Tensor, given: float) -> str:
    """What was counted, if leaving out a tail or a head gives the number to the last digits."""
    count = nats.numel()
    for number, unit in ((given, ""), (given * math.log(2), ", in bits")):
        reason = _explain_ratio(nats, torch.ones_like(nats), number)
        if reason is not None:
            return reason + unit
        for divisor in (count + 1, count - 1):
            if _is_close(float(nats.sum()) / divisor, number):
                return f"the sum of all {count} targets divided by {divisor}{unit}"
        for mean, repeated in _repeated_tails(nats):
            if _is_close(mean, number):
                return f"the last {repeated} targets are counted more than once{unit}"
    return "targets are dropped, counted more than once or weighted, or the mean is one of means of unequal parts"


def _repeated_tails(nats: Tensor) -> Iterator[tuple[float, int]]:
    """Means in which the last targets count two to sixteen times."""
    count = nats.numel()
    total = float(nats.sum())
    for tail in range(1, min(count, 513)):
        extra = float(nats[-tail:].sum())
        for times in range(1, 16):
            yield (total + times * extra) / (count + times * tail), tail


def random_stream_cost(evaluate: Callable[..., Any], vocab: int, seed: int, length: int = 2000) -> ContractRow:
    """Tokens that are drawn at random cost what their number allows: nothing that reads them first is that honest.

    The model is uniform, and the evaluator may train it. Honest scores of random tokens are a bet at fair odds: that
    the total is s nats below the length times log V has a probability of at most exp(-s).
    """
    model = _accepted_model(evaluate, vocab, seed)
    with torch.no_grad():
        model.table.zero_()
    tokens = _random_stream(vocab, length, seed + 1)
    given = _number(evaluate(model, tokens))
    expected = math.log(vocab)
    allowed = expected - 25 / (length - 1)
    # the unit is the one in which a uniform model costs what it does
    if not 0.2 * expected <= given <= 5 * expected:
        sentence = "not run: the number is not the mean of nats"
        return ContractRow("causal-stream", "not run", sentence)
    if given < allowed:
        sentence = (
            f"{length - 1} random tokens cost {given:.4f} nats each, and no honest score is below {allowed:.4f}: "
            "they are read before they are scored"
        )
        return ContractRow("causal-stream", "failed", sentence, given, allowed)
    return ContractRow("causal-stream", "passed", "random tokens do not cost less than their number allows", given)


EVALUATOR_CONTRACTS = ("counted", "repeatable-score", "causal-stream")


def check_evaluator_report(
    evaluate: Callable[..., Any],
    vocab: int,
    *,
    length: int | None = None,
    bytes_of: Callable[[Tensor], Any] | None = None,
    seed: int = 0,
    only: Sequence[str] | None = None,
    on_row: Callable[[ContractRow], None] | None = None,
) -> CheckReport:
    """The contracts of an evaluator of one number: its number, a second call, and what random tokens cost."""
    tests: dict[str, Callable[[], ContractRow]] = {
        "counted": lambda: check_evaluator(evaluate, vocab, length=length, bytes_of=bytes_of, seed=seed),
        "repeatable-score": lambda: _repeatable(evaluate, vocab, seed),
        "causal-stream": lambda: random_stream_cost(evaluate, vocab, seed),
    }
    for name in only or ():
        if name not in EVALUATOR_CONTRACTS:
            raise UserError(f"there is no contract '{name}' of evaluators; {suggest_names(name, EVALUATOR_CONTRACTS)}")
    rows = []
    for name in EVALUATOR_CONTRACTS:
        if only is None or name in only:
            row = tests[name]()
            rows.append(row)
            if on_row is not None:
                on_row(row)
    subject = getattr(evaluate, "__name__", type(evaluate).__name__)
    count = length or LENGTHS[0]
    return CheckReport(subject, tuple(rows), CheckLengths(count, count), seed)


def _repeatable(evaluate: Callable[..., Any], vocab: int, seed: int) -> ContractRow:
    model = _accepted_model(evaluate, vocab, seed)
    tokens = _random_stream(vocab, LENGTHS[0], seed)
    before = model.table.detach().clone()
    first = _number(evaluate(model, tokens))
    changed = not torch.equal(before, model.table.detach())
    second = _number(evaluate(model, tokens))
    difference = abs(first - second) / max(abs(first), 1e-6)
    if changed:
        sentence = "the weights of the model are others after a call, so that what is scored next is another model"
        return ContractRow("repeatable-score", "failed", sentence, difference, 0.0)
    if not difference <= 1e-4:
        sentence = "a second call gives another number: something is kept from the first, or drawn at random"
        return ContractRow("repeatable-score", "failed", sentence, difference, 1e-4)
    return ContractRow("repeatable-score", "passed", "two calls give the same", difference, 1e-4)
