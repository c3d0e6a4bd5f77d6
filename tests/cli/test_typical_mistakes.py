"""What new users get wrong: each mistake is answered by a sentence that names the value and what would be right."""

from pathlib import Path

import pytest
from commands import Cli

# a command, and what its answer says: the value or the file, and the remedy
MISTAKES = [
    ("train transfomer-lm", ["'transfomer-lm'", "did you mean transformer-lm"]),
    ("trian lm/stdlib", ["'trian'", "mean 'train'"]),
    ("train transformer-lm --drop-run", ["--drop-run", "the option --dry-run?"]),
    ("train transformer-lm data.path=text.txt dept=3", ["dept", "did you mean model.depth?"]),
    (
        "train transformer-lm data.path=test.txt --dry-run",
        ["test.txt: there is no such file", "did you mean text.txt"],
    ),
    ("train transformer-lm data.path=empty.txt --dry-run", ["empty.txt", "empty"]),
    ("train transformer-lm data.path=folder --dry-run", ["folder", "holds no text files (looked for .txt"]),
    ("train transformer-lm data.path=binary.txt --dry-run", ["binary.txt", "binary data, not text"]),
    ("train classify/intents data.path=table.csv data.text=sentence --dry-run", ["'sentence'", "known: a, b"]),
    ("train transformer-lm data.path=text.txt data.tokenizer=bpe data.vocab=10", ["vocab is 10", "at least 261"]),
    ("generate unfinished hello", ["unfinished", "train one with `manyformer train`"]),
    ("generate nowhere hello", ["there is no folder nowhere", "train one with `manyformer train`"]),
    ("generate cut hello", ["cut/model/model.safetensors", "is damaged: it has 500 bytes instead of"]),
    ("train transformer-lm depth=three", ["depth", "must be a whole number >= 1, got 'three'"]),
    ("train transformer-lm data.path=text.txt dim=16 heads=3", ["dim (16) must be a multiple of heads (3)"]),
    ("train transformer-lm limits.steps=-5", ["limits.steps", "must be greater than 0, got -5"]),
    ("train transformer-lm data.path=text.txt device=mps --dry-run", ["device is mps", "set device=cpu or auto"]),
    ("train transformer-lm data.path=text.txt dim=16 depth=1 out=text.txt", ["text.txt", "is a file, not a folder"]),
    ("train transformer-lm data.path=text.txt out=folder", ["folder is not a run folder", "choose another `out`"]),
    (
        "train transformer-lm data.path=text.txt out=run",
        ["run/run.yaml", "choose another out, or start over with fresh"],
    ),
    (
        "train transformer-lm data.path=text.txt max_length=64 data.length=128",
        ["128 tokens", "allows 64; set data"],
    ),
    ("train transformer-lm data.path=text.txt dim=200000 heads=8 depth=40", ["TiB are needed", "make dim"]),
    ("train transformer-lm data.path=text.txt batch.tokens=100", ["batch.tokens is 100", "set it to 256 or more"]),
    ("train transformer-lm evaluate.metric=bleu", ["evaluate.metric", "ranked by loss or accuracy, not by 'bleu'"]),
    ("train transformer-lm precision=fp16", ["precision", "'fp16' is not one of auto, float32, bfloat16, float16"]),
    ("train transformer-lm data.kind=texts", ["'texts' is not one of", "did you mean text"]),
    ("train broken.yaml", ["broken.yaml:1:9", "this list is not closed with ]"]),
    ("train dotted.yaml", ["dotted.yaml:2:1: data.path", "write data: {path: VALUE}"]),
    ("train brokne.yaml", ["brokne.yaml", "did you mean broken.yaml"]),
    ("translate run hello", ["is a language model", "`manyformer generate` continues texts"]),
    ("predict run hello", ["predicts no labels", "use `manyformer generate run`"]),
    ("generate run a --max-new 100000", ["max_new is 100000", "ask for at most 63"]),
    ("generate run a --temperature -1", ["--temperature", "greater than or equal to 0"]),
    ("evaluate run --split tset", ["'tset'", "did you mean test?"]),
    ("evaluate run --data nowhere.txt", ["nowhere.txt", "there is no such file"]),
    ("import gpt2 --out models/gpt2", ["there is no folder gpt2", "`hf download gpt2 --local-dir downloads/gpt2`"]),
    ("prune run --keep 1 --out less --penalty 3", ["--penalty (3.0)", "is for --how gates"]),
    ("convert run kernel=favour --out new", ["'favour'", "did you mean favor"]),
    ("compare positions/extrapolation --max-hours 2", ["--max-hours is for suites", "positions/extrapolation is none"]),
    ("--import own.py show transformer-lm", ["the module own.py fails on import", "own.py, line 1"]),
    ("--import own_recipe.py show mine", ["own_recipe.py:8: TypeError", "mend that file"]),
]


OWN_RECIPE = """from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.recipes import recipe


@recipe("Mine", paper="none", summary="Mine.", task=LANGUAGE_MODELLING, cost="O(l)")
def mine(vocab: int = 16, dim: int = 8) -> object:
    'Mine.'
    return len(vocab)
"""


@pytest.fixture(scope="module")
def prepared(text_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the commands name."""
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "text.txt").write_text("the cat sat on the mat; " * 900)
    (folder / "empty.txt").write_text("")
    (folder / "binary.txt").write_bytes(bytes(range(256)) * 4)
    (folder / "table.csv").write_text("a,b\n1,2\n3,4\n")
    (folder / "broken.yaml").write_text("recipe: [transformer-lm\n  x")
    (folder / "dotted.yaml").write_text("recipe: transformer-lm\ndata.path: text.txt\n")
    (folder / "own.py").write_text("len(3)\n")
    (folder / "own_recipe.py").write_text(OWN_RECIPE)
    (folder / "folder").mkdir()
    (folder / "folder" / "picture.png").write_bytes(b"")
    (folder / "run").symlink_to(text_run)
    (folder / "unfinished").mkdir()
    (folder / "unfinished" / "run.yaml").write_text((text_run / "run.yaml").read_text())
    (folder / "cut" / "model").mkdir(parents=True)
    (folder / "cut" / "run.yaml").write_text((text_run / "run.yaml").read_text())
    for file in (text_run / "model").iterdir():
        (folder / "cut" / "model" / file.name).write_bytes(file.read_bytes()[: 500 if "safe" in file.name else None])
    return folder


@pytest.mark.parametrize(("command", "parts"), MISTAKES, ids=[command for command, _ in MISTAKES])
def test_a_mistake_is_answered_by_its_remedy(
    command: str, parts: list[str], prepared: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(prepared)
    ended = cli(*command.split())
    assert ended.code == 2
    errors = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert errors, ended.err
    assert "Traceback" not in ended.err
    for part in parts:
        assert part in ended.err
