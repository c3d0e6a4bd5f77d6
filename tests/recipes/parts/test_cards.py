"""Cards that are read from the text of recipes' files: they are those that importing the files makes."""

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

import manyformer as mf
from manyformer.recipes.parts.cards import Unreadable, _declared_card, listed_recipes, recipe_modules


def test_every_card_is_read_as_its_module_makes_it() -> None:
    own_recipes = {name: recipe for name, recipe in mf.recipes().items() if recipe.module.startswith("manyformer.")}
    assert recipe_modules() == {name: recipe.module for name, recipe in own_recipes.items()}
    for name, recipe in own_recipes.items():
        # every file is read, none had to be imported
        read = _declared_card(recipe.module, name)
        expected = {**vars(recipe.card), "task": recipe.card.task.name}
        assert {**asdict(read), "task": read.task.name} == expected, name


def test_the_list_needs_no_torch_and_a_plug_in_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING\n"
        "from manyformer.recipes import get_recipe, recipe\n"
        "@recipe('Mine', paper='none', summary='s', task=LANGUAGE_MODELLING, cost='c')\n"
        "def mine_lm(vocab: int = 8):\n"
        "    return get_recipe('transformer-lm').build(vocab=vocab)\n"
    )
    code = "import sys; from manyformer.cli import run; run({words!r}); print('torch' in sys.modules)"

    def listed(*words: str) -> str:
        command = [sys.executable, "-c", code.format(words=["list", *words])]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    assert listed().splitlines()[-1] == "False"
    assert "Mine (in mine)" in listed("mine-lm", "--import", "mine.py")


def test_what_cannot_be_read_from_the_text_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    from manyformer.recipes.parts import cards

    def unreadable(module: str, name: str) -> None:
        raise Unreadable(name)

    expected = listed_recipes()
    monkeypatch.setattr(cards, "_declared_card", unreadable)
    imported = listed_recipes()
    assert list(imported) == list(expected)
    assert imported["bert"].card.reasons == expected["bert"].card.reasons
