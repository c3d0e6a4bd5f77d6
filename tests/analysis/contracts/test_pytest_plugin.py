"""`pytest --contracts` and the fixtures that check models, by pytest's own means of testing plugins."""

from pathlib import Path

import pytest
import torch

from manyformer.analysis.contracts import check, pytest_plugin

pytest_plugins = ["pytester"]

MODELS = """
import torch

class Mixer(torch.nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.causal = causal
        self.embed, self.head = torch.nn.Embedding(17, 8), torch.nn.Linear(8, 17)

    def forward(self, tokens):
        x = self.embed(tokens)
        count = torch.arange(1, x.shape[1] + 1)[:, None]
        return self.head(x.cumsum(1) / count if self.causal else x + x.mean(1, keepdim=True))

def honest():
    torch.manual_seed(0)
    return Mixer(True)

def leaking():
    torch.manual_seed(0)
    return Mixer(False)

def broken():
    raise RuntimeError("no weights here")
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project with models, whose pytest has this plugin and no others."""
    # a run in this process takes away what it imported, and torch can be imported once
    assert torch
    assert check
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.syspath_prepend(str(pytester.path))
    pytester.makepyfile(project_models=MODELS)
    return pytester


def name_models(project: pytest.Pytester, *lines: str) -> None:
    settings = ["[pytest]", "pythonpath = .", f"addopts = -p {pytest_plugin.__name__}", "contracts ="]
    project.makeini("\n".join([*settings, *(f"    {line}" for line in lines)]))


def test_each_contract_of_each_named_model_is_a_test(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    name_models(
        project,
        "project_models:honest --length 16 --only causal,padding-right",
        "project_models.py:leaking --length 16 --only causal,batch",
    )
    # names of files are those of the folder of the settings
    monkeypatch.chdir(project.mkdir("elsewhere"))
    result = project.runpytest("--contracts", "-rs", "--rootdir", str(project.path), "-c", "../tox.ini")
    result.assert_outcomes(passed=2, skipped=1, failed=1)
    result.stdout.fnmatch_lines(["*project_models.py:leaking*causal*", "causal: the future leaks: *"])
    result.stdout.fnmatch_lines(["SKIPPED*padding*"])
    # the sentence alone, and not the frames of the check
    assert "Traceback" not in result.stdout.str()
    assert "pytest_plugin.py" not in result.stdout.str().partition("short test summary")[0]


def test_contracts_run_beside_tests_and_are_selected_like_tests(project: pytest.Pytester) -> None:
    name_models(project, "project_models:honest --length 16 --skip compile")
    project.makepyfile(test_own_of_project="def test_own(): pass")
    project.runpytest().assert_outcomes(passed=1)
    project.runpytest("--contracts", "-k", "causal-gradient or test_own").assert_outcomes(passed=2)
    result = project.runpytest("--contracts", "--strict-markers", "-m", "contracts", "-k", "repeatable or seed")
    assert result.parseoutcomes()["passed"] == 2


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (None, "*--contracts needs the models to check: contracts = model.py:NAME*"),
        ("project_models:honest --lenght 16", "*--lenght*(project_models:honest --lenght 16)*"),
        ("project_models:honest --length long", "*--length: invalid int value*"),
        ("project_models:honest --only casual", "*there is no contract 'casual'*"),
        ("project_models:honest project_models:leaking", "*each model has a line of its own*"),
        ("vocab=3", "*'vocab=3' comes before the name of a model*"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_sentence(project: pytest.Pytester, line: str | None, sentence: str) -> None:
    name_models(project, *([] if line is None else [line]))
    result = project.runpytest("--contracts")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([sentence])


def test_a_model_that_cannot_be_built_fails_with_what_it_raised(project: pytest.Pytester) -> None:
    name_models(project, "project_models:broken --only causal,batch")
    result = project.runpytest("--contracts")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*no weights here*"])


def test_fixtures_pass_honest_models_and_name_what_others_break(project: pytest.Pytester) -> None:
    name_models(project)
    project.makepyfile(
        test_checked_with_fixtures="""
        import pytest
        from project_models import honest, leaking

        def test_honest(assert_causal, assert_batch_invariant, assert_repeatable, assert_same_length_prefix):
            for assertion in (assert_causal, assert_batch_invariant, assert_repeatable, assert_same_length_prefix):
                assert assertion(honest(), length=16).ok

        def test_leak(assert_causal):
            assert_causal(leaking(), length=16)

        def test_length(assert_same_length_prefix):
            assert_same_length_prefix(leaking(), length=16)

        @pytest.mark.parametrize("name", ["cached", "padding_invariant", "packing_invariant"])
        def test_what_cannot_be_tried_is_not_passed(name, request):
            with pytest.raises(AssertionError, match="not promised"):
                request.getfixturevalue(f"assert_{name}")(honest(), length=16)
        """
    )
    result = project.runpytest()
    result.assert_outcomes(passed=4, failed=2)
    result.stdout.fnmatch_lines(["E*ContractBroken: Mixer at 16 tokens:", "E*causal: the future leaks: *"])
    result.stdout.fnmatch_lines(["FAILED test_checked_with_fixtures.py::test_length*"])


def test_both_packages_with_this_plugin_collect_once(project: pytest.Pytester, tmp_path: Path) -> None:
    # the source once more, as in the other package
    copy = project.makepyfile(other_plugin=Path(pytest_plugin.__file__).read_text(encoding="utf-8"))
    name_models(project, "project_models:honest --length 16 --only causal")
    result = project.runpytest("-p", copy.stem, "--contracts")
    result.assert_outcomes(passed=1)
