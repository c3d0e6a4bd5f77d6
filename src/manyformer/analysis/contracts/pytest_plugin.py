"""The pytest plugin: `pytest --contracts` checks the models that a project names, and fixtures check a model of a test.

Every pytest of an environment loads it, so that torch is not imported before a model is to be checked."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import chdir
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, final

import pytest

if TYPE_CHECKING:
    from manyformer.analysis.contracts.check_report import CheckReport, ContractRow
    from manyformer.analysis.contracts.command import CheckRequest, NamedModel
    from manyformer.analysis.contracts.subject import Subject

SETTING = "contracts"
"""The setting of pytest that names models: a line has what one writes behind `manyformer check`."""

COLLECTOR = "contracts-of-models"
"""The name under which the items are collected, once if both packages with this plugin are installed."""


class ContractBroken(AssertionError):
    """Raised for a model that broke a contract, with the sentence and the place."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--contracts` and the setting that names models."""
    group = parser.getgroup("contracts", "contracts of models")
    try:
        group.addoption(
            "--contracts",
            action="store_true",
            help=f"check the contracts of the models that the setting {SETTING} names",
        )
        parser.addini(SETTING, "models to check with --contracts: FILE.py:NAME or MODULE:NAME", "linelist", default=[])
    except ValueError:
        # manyformer and manyformer-check both have this plugin, and one of them is enough
        return


def pytest_configure(config: pytest.Config) -> None:
    """Collect the contracts where they are asked for."""
    if config.getoption("contracts") and not config.pluginmanager.has_plugin(COLLECTOR):
        config.addinivalue_line("markers", "contracts: the contract of a model, of `pytest --contracts`")
        config.pluginmanager.register(ContractCollector(), COLLECTOR)


@final
class ContractCollector:
    """Adds a test for each contract of each model of the setting."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Add the tests before others select among them."""
        lines = config.getini(SETTING)
        if not lines:
            sentence = f"--contracts needs the models to check: {SETTING} = model.py:NAME in the settings of pytest"
            raise pytest.UsageError(sentence)
        for line in lines:
            items.extend(ModelContracts.from_parent(session, name=line).collect())


@final
class ModelContracts(pytest.Collector):
    """The contracts of one line of the setting; the model is loaded by the first that runs."""

    def collect(self) -> Iterator[pytest.Item]:
        """A test for each contract, in the order of the report."""
        from manyformer.analysis.contracts import CONTRACTS
        from manyformer.analysis.contracts.command import split_names

        _, request = self.words
        skipped = split_names(request.skip)
        selected = split_names(request.only) or [name for name, item in CONTRACTS.items() if item.runs_by_default]
        for name in [*selected, *skipped]:
            if name not in CONTRACTS:
                raise pytest.UsageError(f"{SETTING}: there is no contract '{name}' ({self.name})")
        for name in CONTRACTS:
            if name in selected and name not in skipped:
                yield ContractItem.from_parent(self, name=name)

    @cached_property
    def words(self) -> tuple[NamedModel, CheckRequest]:
        """What the line says. Raises UsageError."""
        from manyformer.analysis.contracts.command import group_words, make_parser, read_request
        from manyformer.base.errors import UserError

        def refuse(message: str) -> NoReturn:
            raise pytest.UsageError(f"{SETTING}: {message} ({self.name})")

        parser = make_parser()
        parser.error = refuse  # type: ignore[method-assign]
        options = vars(parser.parse_intermixed_args(shlex.split(self.name)))
        try:
            named = group_words(options["names"])
        except UserError as error:
            refuse(str(error))
        if len(named) > 1:
            refuse("each model has a line of its own")
        return named[0], read_request(options)

    @cached_property
    def subject(self) -> Subject | Exception:
        """The model under test, or why there is none, which is not looked for again."""
        from manyformer.analysis.contracts import find_subject
        from manyformer.analysis.contracts.command import load_stranger

        model, request = self.words
        try:
            # files are named as in the other settings
            with chdir(self.config.rootpath):
                loaded = load_stranger(model.name, model.values, request)
            return find_subject(loaded.model, {**loaded.options, **request.check_options})
        except Exception as error:
            return error

    def row_of(self, contract: str) -> ContractRow:
        """The result of one contract."""
        from manyformer.analysis.contracts import check

        if isinstance(self.subject, Exception):
            raise self.subject
        _, request = self.words
        # others cannot be told apart from noise where two equal calls differ
        only = {"repeatable", contract}
        return check(self.subject, only=only, length=request.length, seed=request.seed)[contract]


@final
class ContractItem(pytest.Item):
    """One contract of a model as a test: skipped with the reason where the model does not promise it."""

    parent: ModelContracts

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.add_marker(pytest.mark.contracts)

    def runtest(self) -> None:
        """Raise ContractBroken if the model breaks the contract."""
        row = self.parent.row_of(self.name)
        if row.verdict == "failed":
            raise ContractBroken(describe(row))
        if row.verdict != "passed":
            pytest.skip(row.sentence)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The sentence alone for a broken contract and a model that cannot be loaded."""
        from manyformer.base.errors import UserError

        if isinstance(excinfo.value, ContractBroken | UserError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """The heading of a failure."""
        return self.path, None, f"{self.parent.name} {self.name}"


def describe(row: ContractRow) -> str:
    """The contract, the sentence of its result, and the place where it is broken."""
    lines = [f"{row.contract}: {row.sentence}"]
    if row.place is not None:
        lines += row.place.lines()
    return "\n  ".join(lines)


class Assertion(NamedTuple):
    """What a fixture gives: a function of a model that raises ContractBroken unless the model keeps the contracts.

    Of the first contract it must be shown that the model keeps it; the others must not fail. Keywords are those of
    `check`."""

    contracts: tuple[str, ...]

    def __call__(self, model: Any, **options: Any) -> CheckReport:
        """Check the model, which may be all that `check` accepts; gives the report."""
        from manyformer.analysis.contracts import check

        __tracebackhide__ = True
        report = check(model, only={"repeatable", *self.contracts}, **options)
        broken = [describe(row) for row in report.failed]
        first = report[self.contracts[0]]
        if not broken and first.verdict != "passed":
            broken = [describe(first)]
        if broken:
            raise ContractBroken("\n".join([f"{report.heading}:", *broken]))
        return report


@pytest.fixture(scope="session")
def assert_causal() -> Assertion:
    """`assert_causal(model)`: no output depends on a later token, in evaluation and in training mode."""
    return Assertion(("causal", "causal-training", "causal-gradient"))


@pytest.fixture(scope="session")
def assert_cached() -> Assertion:
    """`assert_cached(model)`: decoding from a cache, token by token and in chunks, gives the same as one pass."""
    return Assertion(("cached", "prefill"))


@pytest.fixture(scope="session")
def assert_padding_invariant() -> Assertion:
    """`assert_padding_invariant(model)`: padding after or before the tokens changes nothing."""
    return Assertion(("padding-right", "padding-left"))


@pytest.fixture(scope="session")
def assert_packing_invariant() -> Assertion:
    """`assert_packing_invariant(model)`: documents packed in a row give the same as each alone."""
    return Assertion(("packing",))


@pytest.fixture(scope="session")
def assert_batch_invariant() -> Assertion:
    """`assert_batch_invariant(model)`: a row gives the same alone, in a batch, and beside other rows in training."""
    return Assertion(("batch", "batch-training"))


@pytest.fixture(scope="session")
def assert_same_length_prefix() -> Assertion:
    """`assert_same_length_prefix(model)`: the outputs of a prefix are the same, however many tokens follow it."""
    return Assertion(("length",))


@pytest.fixture(scope="session")
def assert_repeatable() -> Assertion:
    """`assert_repeatable(model)`: the same input gives the same output, with another seed too, and leaves no trace."""
    return Assertion(("repeatable", "seed", "traceless"))
