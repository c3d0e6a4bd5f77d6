"""What the command lines do for scorers, evaluators and windows: load them by name and run their contracts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from manyformer.analysis.contracts.check_report import CheckReport, ContractRow
from manyformer.analysis.contracts.evaluators import check_evaluator_report
from manyformer.analysis.contracts.loading import load_function
from manyformer.analysis.contracts.scorers import check_scorer, scorer_of_model
from manyformer.base.errors import UserError


def check_scorer_by_name(
    *,
    scorer: str | None = None,
    evaluator: str | None = None,
    vocab: int | None = None,
    length: int | None = None,
    block: int | None = None,
    bytes_of: str | None = None,
    decode: str | None = None,
    encode: str | None = None,
    bos: int | None = None,
    partition: str | None = None,
    seconds: float = 120.0,
    seed: int = 0,
    only: Sequence[str] | None = None,
    on_row: Callable[[ContractRow], None] | None = None,
) -> CheckReport:
    """Check the scorer or the evaluator of a file, each named FILE.py:NAME as are `bytes_of`, `decode` and `encode`.

    `partition` has keywords of the scorer that must not change a score, each tried alone, such as rows=1,rows=4. Raises
    UserError for what is missing.
    """
    if vocab is None:
        raise UserError("a scorer does not say how many tokens there are: give --vocab N")
    if (scorer is None) == (evaluator is None):
        raise UserError("give either --scorer FILE.py:NAME or --evaluator FILE.py:NAME")
    sizes = None if bytes_of is None else load_function(bytes_of)
    if evaluator is not None:
        evaluate = load_function(evaluator)
        report = check_evaluator_report(
            evaluate, vocab, length=length, bytes_of=sizes, seed=seed, only=only, on_row=on_row
        )
        return replace(report, subject=evaluator)
    assert scorer is not None
    report = check_scorer(
        load_function(scorer),
        vocab,
        length=length,
        block=block,
        bytes_of=sizes,
        decode=None if decode is None else load_function(decode),
        encode=None if encode is None else load_function(encode),
        bos=bos,
        partitions=_read_partitions(partition or ""),
        seconds=seconds,
        seed=seed,
        only=only,
        on_row=on_row,
    )
    return replace(report, subject=scorer)


def check_windows(
    model: nn.Module,
    window: int,
    stride: int | None = None,
    *,
    vocab: int | None = None,
    length: int | None = None,
    seconds: float = 120.0,
    seed: int = 0,
    only: Sequence[str] | None = None,
    on_row: Callable[[ContractRow], None] | None = None,
) -> CheckReport:
    """Check the scores that a model gives by windows of `window` tokens, of which `stride` are new."""
    score, found_vocab = scorer_of_model(model.eval(), window, stride or window)
    return check_scorer(
        score,
        vocab or found_vocab,
        block=stride or window,
        length=length or 2 * window + window // 3 + 2,
        seconds=seconds,
        seed=seed,
        only=only,
        on_row=on_row,
    )


def _read_partitions(text: str) -> list[dict[str, Any]]:
    """Keywords such as rows=1,rows=4, each in a dictionary of its own. Raises UserError."""
    partitions: list[dict[str, Any]] = []
    for part in filter(None, text.split(",")):
        name, equals, shown = part.partition("=")
        if not equals:
            raise UserError(f"'{part}' is no KEY=VALUE, such as rows=4")
        value: Any = {"true": True, "false": False}.get(shown.strip().lower(), shown)
        if shown.strip().lstrip("-").isdecimal():
            value = int(shown)
        partitions.append({name.strip(): value})
    return partitions
