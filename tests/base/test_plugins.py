"""Recipes from outside the package: named by --import, in a run file, in Python, or offered by an installed package."""

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest

import manyformer as mf
from manyformer.base import plugins
from manyformer.base.errors import UserError
from manyformer.cli import run
from manyformer.config import SyntheticData, dump_run
from manyformer.data.generated.synthetic import RULES
from manyformer.nn import SoftmaxKernel
from manyformer.nn.masks import Window
from manyformer.recipes import RECIPES, Recipe, compose, get_recipe
from manyformer.training.run_folder import as_run, as_training_run

RECIPE = '''
from manyformer.recipes import recipe
from manyformer.recipes.transformer_lm import transformer_lm
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING


@recipe("Outside", paper="none", summary="A test.", task=LANGUAGE_MODELLING, cost="O(l^2)")
def NAME(vocab: int = 256, dim: int = 16, max_length: int = 32):
    """A small model."""
    return transformer_lm.__wrapped__(vocab, dim, 1, 2, max_length=max_length)
'''

SMALL = ("data.kind=synthetic", "data.length=16", "data.valid=16", "batch.tokens=64", "limits.steps=2", "device=cpu")


@pytest.fixture(autouse=True)
def restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of its own, and afterwards none of the modules and recipes that a test imports."""
    recipes = dict(RECIPES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(plugins, "_imported", {})
    monkeypatch.setattr(plugins, "_command_line_imports", [])
    plugins.entry_points.cache_clear()
    yield
    forget(recipes)
    plugins.entry_points.cache_clear()


def forget(recipes: dict[str, Recipe]) -> None:
    """Remove all other recipes, and the modules that these tests write, as a new process would not have them."""
    RECIPES.clear()
    RECIPES.update(recipes)
    for name in [name for name in sys.modules if name.startswith(("outside", "broken"))]:
        del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture
def new_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function that forgets all plug-ins imported since the test began."""
    recipes, path = dict(RECIPES), list(sys.path)

    def start() -> None:
        forget(recipes)
        monkeypatch.setattr(sys, "path", list(path))
        monkeypatch.setattr(plugins, "_imported", {})
        monkeypatch.setattr(plugins, "_command_line_imports", [])

    return start


def write_recipe(file: Path, name: str) -> Path:
    """A module with one recipe."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(RECIPE.replace("NAME", name))
    return file


def install(folder: Path, package: str, name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is installed in `folder` and offers a recipe `name` in the module `value`."""
    info = folder / f"{package.replace('-', '_')}-1.5.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.5\n")
    (info / "top_level.txt").write_text(value.partition(".")[0])
    (info / "entry_points.txt").write_text(f"[manyformer.recipes]\n{name} = {value}\n")
    monkeypatch.syspath_prepend(str(folder))


def test_a_module_on_the_command_line_is_recorded_and_needed_again(
    new_process: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    write_recipe(Path("outside_one.py"), "outside_one")
    assert run(["--import", "outside_one", "train", "outside-one", *SMALL, "--quiet"]) == 0
    folder = Path("runs/outside-one")
    assert "\nimport: [outside_one]\n" in (folder / "run.yaml").read_text()
    (record,) = json.loads((folder / "env.json").read_text())["plugins"]
    assert record == {"name": "outside_one", "version": "", "file": str(Path("outside_one.py").resolve())}
    assert json.loads((folder / "model/config.json").read_text())["recipe_module"] == "outside_one"

    new_process()
    with pytest.raises(UserError, match=r"the module outside_one, .* with --import outside_one, or mf.load"):
        mf.load(folder)
    assert "outside_one" not in sys.modules, "a saved model is data: it names no module to import"
    capsys.readouterr()
    assert run(["evaluate", str(folder)]) == 2
    assert "--import outside_one" in capsys.readouterr().err
    assert "outside_one" not in sys.modules, "what a run's folder names is not imported to score it"
    assert run(["evaluate", str(folder), "--import", "outside_one.py"]) == 0
    new_process()
    assert mf.load(folder, imports=["outside_one"]).spec.module == "outside_one"
    new_process()
    assert run(["train", str(folder), "limits.steps=3", "--quiet"]) == 0, "a run given to train may import"


def test_a_run_file_imports_from_its_own_folder(new_process: Callable[[], None]) -> None:
    write_recipe(Path("papers/outside_two.py"), "outside_two")
    settings = (
        "recipe: outside-two\nimport: outside_two\ndata: {kind: synthetic, length: 16, valid: 16}\nlimits: {steps: 2}\n"
    )
    Path("papers/two.yaml").write_text(f"{settings}batch: {{tokens: 64}}\ndevice: cpu\n")
    assert run(["train", "papers/two.yaml", "--quiet"]) == 0
    assert "papers/outside_two.py" in Path("runs/two/run.yaml").read_text()
    new_process()
    assert run(["train", "runs/two/run.yaml", "limits.steps=3", "out=runs/two", "--quiet"]) == 0


def test_a_module_that_the_caller_has_imported_is_recorded(new_process: Callable[[], None], tmp_path: Path) -> None:
    write_recipe(Path("outside_five.py"), "outside_five")
    plugins.import_modules(["outside_five"])
    run = as_training_run("outside-five", SMALL)
    assert run.imports == ("outside_five",)
    scratch = tmp_path / "scratch/run.yaml"
    scratch.parent.mkdir()
    scratch.write_text(dump_run(run))
    new_process()
    with pytest.raises(UserError, match=r"there is no recipe 'outside-five'.*name them with --import"):
        as_run(scratch)
    assert as_training_run(scratch) == run, "a process of the run imports what its run file names"


def test_a_rule_from_outside_is_trained_on_swept_and_refused_like_ours(capsys: pytest.CaptureFixture[str]) -> None:
    """The rule of the documentation."""
    page = (Path(__file__).parents[2] / "docs/extending.md").read_text()
    (rule,) = [block for block in page.split("```") if "class CoinsRule" in block]
    Path("outside_coins.py").write_text(rule.removeprefix("python\n"))
    try:
        small = ["--import", "outside_coins.py", *SMALL, "data.rule=coins", "dim=16", "depth=1", "heads=2"]
        assert run(["train", "transformer-lm", *small, "data.last=2", "--quiet"]) == 0
        assert run(["train", "transformer-lm", *small, "data.lats=2"]) == 2
        assert "did you mean data.last?" in capsys.readouterr().err
        comparison = (
            "title: Coins\nrun: {recipe: transformer-lm, import: outside_coins, model: {dim: 16, depth: 1, heads: 2}, "
            "data: {kind: synthetic, rule: coins, length: 16, valid: 16}, batch: {tokens: 64}, limits: {steps: 1}}\n"
            "cases: {lm: {}}\nsweep: {SETTING: [16, 20]}\n"
        )
        Path("coins.yaml").write_text(comparison.replace("SETTING", "data.length"))
        assert run(["compare", "coins.yaml", "--dry-run"]) == 0
        Path("coins.yaml").write_text(comparison.replace("SETTING", "data.last"))
        assert run(["compare", "coins.yaml", "--dry-run"]) == 2
        assert "'data.last' cannot be changed after training" in capsys.readouterr().err
    finally:
        SyntheticData.variants.pop("coins", None)
        RULES.pop("coins", None)


def test_an_override_imports_a_file(new_process: Callable[[], None]) -> None:
    file = write_recipe(Path("elsewhere/outside_three.py"), "outside_three").resolve()
    result = mf.train("outside-three", [f"import={file}", *SMALL], on_event=lambda event: None)
    assert result.load().spec.recipe == "outside-three"


def test_an_installed_package_needs_no_import(
    new_process: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_recipe(tmp_path / "site/outside_four/model.py", "outside_four")
    install(tmp_path / "site", "outside-pkg", "outside-four", "outside_four.model", monkeypatch)
    assert run(["list", "--json", "outside*"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert listed["module"] == "outside_four.model"
    assert run(["list", "outside"]) == 0
    assert "outside_four.model" in capsys.readouterr().out
    new_process()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    get_recipe("transformer-lm")
    assert "outside_four.model" not in sys.modules, "only the recipe that is asked for is imported"
    mf.build("outside-four").save("saved")
    assert plugins.plugin_records()[0].version == "1.5"
    new_process()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert mf.load("saved").spec.module == "outside_four.model"


def test_a_name_that_exists_twice_names_both_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_recipe(Path("outside_bert.py"), "bert")
    with pytest.raises(UserError, match=r"two recipes 'bert', in manyformer.recipes.bert and in outside_bert"):
        plugins.import_modules(["outside_bert"])
    for number in (1, 2):
        install(tmp_path / f"site{number}", f"outside{number}", "twice", f"outside{number}.model", monkeypatch)
    plugins.entry_points.cache_clear()
    with pytest.raises(UserError, match=r"'twice' is offered by two modules, outside\d.model and outside\d.model"):
        get_recipe("twice")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_package_anywhere\n", "needs the module no_such_package_anywhere, which is not installed"),
        ("1 / 0\n", r"fails on import: ZeroDivisionError: division by zero \(.*broken_plugin.py, line 1\)"),
        ("def f(:\n", r"fails on import: SyntaxError: .*broken_plugin.py, line 1"),
    ],
)
def test_what_fails_on_import_is_one_sentence(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("broken_plugin.py").write_text(text)
    with pytest.raises(UserError, match=message):
        plugins.import_modules(["broken_plugin"])
    assert run(["list", "--import=broken_plugin"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_what_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the module nowhere does not exist: neither in .* nor in the installed"):
        plugins.import_modules(["nowhere"])
    with pytest.raises(UserError, match=r"there is no file papers/nowhere.py to import"):
        plugins.import_modules(["papers/nowhere.py"])
    Path("json.py").touch()
    with pytest.raises(UserError, match=r"json.py cannot be imported: its name is that of .*json"):
        plugins.import_modules(["json.py"])
    run_file = Path("mine.yaml")
    run_file.write_text("recipe: bert\nimport: [nowhere]\n")
    with pytest.raises(UserError, match=r"mine.yaml:2:\d+: import: the module nowhere does not exist"):
        mf.train(run_file)


def test_compose_takes_the_parts_that_a_plug_in_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"kernel: 'shifted' is not one of softmax, linear, .*"):
        mf.build("compose", dim=16, heads=2, depth=1, kernel="shifted")
    monkeypatch.setitem(compose.KERNELS, "shifted", lambda sizes: SoftmaxKernel(Window(3)))
    model = mf.build("compose", dim=16, heads=2, depth=1, kernel="shifted")
    assert model.spec.keywords["kernel"] == "shifted"
    names, _ = get_args(get_recipe("compose").signature.parameters["kernel"].annotation)
    assert "shifted" in get_args(names)
