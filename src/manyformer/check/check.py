"""`check`: hold a model to its promises."""

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manyformer.api import load
from manyformer.check.adapter import Adapter, AdapterSubject
from manyformer.check.check_report import CheckReport, ContractRow
from manyformer.check.contract import Contract
from manyformer.check.contracts import CONTRACTS
from manyformer.check.hugging_face import HuggingFace, is_hugging_face
from manyformer.check.isolation import in_dtype, unchanged, untouched, working_dtype
from manyformer.check.own_subject import own
from manyformer.check.subject import Subject, seed_everything
from manyformer.check.tiny_models import build_small
from manyformer.check.trial import EXACT, SINGLE, Backend, ContractTrial, Untestable
from manyformer.errors import UserError, nearest
from manyformer.models import Model
from manyformer.recipes import RECIPES

LENGTH = 48
"""How long sequences are where many single steps are taken."""

REACH = 512
"""How long they are where the future might leak: patterns and chunks show only beyond their size."""

LEAST = 12
"""Below that, documents packed in a row would have no tokens."""


def check(
    model: nn.Module | Adapter | str | Path,
    *,
    length: int | None = None,
    seed: int = 0,
    only: Collection[str] | None = None,
    skip: Collection[str] = (),
    compiler: Backend = "aot_eager",
    keywords: Mapping[str, Any] | None = None,
    device: str | torch.device | None = None,
    each: Callable[[ContractRow], None] | None = None,
) -> CheckReport:
    """Hold a model to its promises: causality, streaming, padding, packing, gradients, precision, saving and more.

    `model` is a recipe's name (built small and shaken, with `keywords` on top), a run's or a saved model's folder, a
    model, a Hugging Face model, or an `Adapter` around any module. `length` is that of all sequences; unless given, 48
    tokens where many steps are taken and up to 512 where the future might leak. `only` and `skip` name contracts;
    "compile" takes seconds, and "learns" runs only when named. `device` is for a name or a folder. `each` is told every
    row as it is found. The model is left as it was. Raises UserError for what cannot be checked.
    """
    subject = find_subject(model, keywords or {}, seed, device)
    chosen = _chosen(only, skip)
    steps, reach = _lengths(subject, length)
    rows: list[ContractRow] = []
    with untouched(subject.module), subject.session(), torch.no_grad():
        subject.seed = seed
        for contract in CONTRACTS.values():
            if contract.name in chosen:
                excuse = _excuse(contract, subject, rows)
                told = (
                    excuse is not None and excuse.verdict == "not promised" and contract.name in subject.measured_anyway
                )
                row = excuse if excuse and not told else _run(contract, subject, steps, reach, seed, compiler)
                if excuse and told:
                    row = row._replace(verdict=excuse.verdict, sentence=f"{excuse.sentence}; measured: {row.sentence}")
                rows.append(row)
                if each is not None:
                    each(row)
    return CheckReport(subject.name, tuple(rows), reach, seed)


def find_subject(
    model: nn.Module | Adapter | str | Path,
    keywords: Mapping[str, Any],
    seed: int = 0,
    device: str | torch.device | None = None,
) -> Subject:
    """The subject for whatever `check` takes. Raises UserError with what would be right."""
    if isinstance(model, str) and model in RECIPES:
        return own(build_small(model, keywords, seed).to(device))
    if keywords:
        raise UserError(f"keywords ({', '.join(keywords)}) are for a recipe's name; this model is built already")
    if isinstance(model, str | Path):
        if not Path(model).is_dir():
            raise UserError(f"'{model}' is neither a recipe nor a folder with a model; {nearest(str(model), RECIPES)}")
        return own(load(model).to(device), name=str(model))
    if device is not None:
        raise UserError(f"device ({device}) is for a name or a folder; this model is where it is")
    if isinstance(model, Adapter):
        return AdapterSubject(model)
    if isinstance(model, Model):
        return own(model)
    if is_hugging_face(model):
        return HuggingFace(model)
    raise UserError(
        f"{type(model).__name__} is a module that check cannot call by itself: "
        "mf.check(Adapter(logits=lambda tokens: net(tokens), vocab=256))"
    )


def _chosen(only: Collection[str] | None, skip: Collection[str]) -> set[str]:
    for name in (*(only or ()), *skip):
        if name not in CONTRACTS:
            raise UserError(f"there is no contract '{name}'; {nearest(name, CONTRACTS)}")
    usual = {name for name, contract in CONTRACTS.items() if contract.usual}
    return (usual if only is None else set(only)) - set(skip)


def _lengths(subject: Subject, length: int | None) -> tuple[int, int]:
    """How long sequences are in contracts of many steps and in those of few calls. Raises UserError."""
    if subject.max_length is not None and subject.max_length < LEAST:
        raise UserError(
            f"{subject.name} allows at most {subject.max_length} tokens, too few to check: {LEAST} are needed"
        )
    if length is not None and not LEAST <= length <= (subject.max_length or length):
        allowed = f"at least {LEAST}" if subject.max_length is None else f"from {LEAST} to {subject.max_length}"
        raise UserError(f"length ({length}) must be {allowed} tokens")
    most = subject.max_length or REACH
    steps, reach = (min(LENGTH, most), min(REACH, most)) if length is None else (length, length)
    multiple = subject.length_multiple
    # upwards, and down again where that would be more than the model allows
    up, up_reach = (-(-n // multiple) * multiple for n in (steps, reach))
    top = most // multiple * multiple if subject.max_length else max(up, up_reach)
    return min(up, top), min(up_reach, top)


def _excuse(contract: Contract, subject: Subject, rows: list[ContractRow]) -> ContractRow | None:
    """The row of a contract that the model does not promise, or that would mean nothing."""
    for need in (contract.name, *contract.needs):
        if need in subject.not_promised:
            return ContractRow(contract.name, "not promised", f"not promised: {subject.not_promised[need]}")
    if any(row.contract == "repeatable" and row.verdict == "failed" for row in rows):
        return ContractRow(contract.name, "not run", "not run: the model is not repeatable, so nothing can be compared")
    return None


def _run(contract: Contract, subject: Subject, length: int, reach: int, seed: int, compiler: Backend) -> ContractRow:
    exact = contract.exact and subject.exact
    generator = torch.Generator().manual_seed(seed)
    trial = ContractTrial(subject, generator, length, reach, EXACT if exact else SINGLE, compiler)
    seed_everything(seed)
    try:
        with unchanged(subject.module), in_dtype(subject.module, working_dtype(subject.module, exact=exact)):
            good, sentence, measured, tolerance = contract.run(trial)
    except Untestable as error:
        return ContractRow(contract.name, "not run", f"not run: {error}")
    except Exception as error:
        told = re.sub(r"\s+", " ", str(error)).strip()
        return ContractRow(contract.name, "failed", f"raised {type(error).__name__}: {told[:300]}")
    return ContractRow(contract.name, "passed" if good else "failed", sentence, measured, tolerance)
