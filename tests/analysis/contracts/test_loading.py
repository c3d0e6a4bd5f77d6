"""What a command line names is loaded as Python would import it, or refused in one sentence that names the line."""

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from manyformer.analysis.contracts import Adapter, importing
from manyformer.analysis.contracts.loading import load_named
from manyformer.base.errors import UserError

MODEL = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, vocab_size=31):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 16)
        self.head = nn.Linear(16, vocab_size)

    def forward(self, x):
        return self.head(self.embed(x))
"""


@pytest.fixture(autouse=True)
def _clean_imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Modules and paths of one test are unknown to the next; the files lie in the current folder."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", tmp_path)):
            del sys.modules[name]


def write(files: dict[str, str]) -> None:
    for name, text in files.items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


VALUES = """
instance = Model(20)
adapter = __import__("manyformer").analysis.contracts.Adapter(logits=instance, vocab=20)
def factory():
    return Model(21)
def with_options():
    return Model(22), {"vocab": 20, "causal": False}
class Holder:
    @staticmethod
    def build():
        return Model(23)
"""


@pytest.mark.parametrize(
    ("name", "rows"), [("instance", 20), ("factory", 21), ("with_options", 22), ("Holder.build", 23), ("Model", 31)]
)
def test_a_name_is_an_instance_a_function_or_a_class(name: str, rows: int) -> None:
    write({"model.py": MODEL + VALUES})
    loaded = load_named(f"model.py:{name}").model
    assert isinstance(loaded, nn.Module)
    assert loaded.embed.num_embeddings == rows  # type: ignore[union-attr]


def test_an_adapter_and_options_are_passed_on() -> None:
    write({"model.py": MODEL + VALUES})
    assert isinstance(load_named("model.py:adapter").model, Adapter)
    assert load_named("model.py:with_options").options == {"vocabulary": 20, "causal": False}


def test_an_adapter_of_the_other_package_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = [(item.name, item.type, dataclasses.field(default=None)) for item in dataclasses.fields(Adapter)]
    monkeypatch.setattr("manyformer.analysis.twin", dataclasses.make_dataclass("Adapter", fields), raising=False)
    write(
        {"model.py": MODEL + "import manyformer.analysis\nnet = manyformer.analysis.twin(logits=Model(), vocab=31)\n"}
    )
    loaded = load_named("model.py:net").model
    assert isinstance(loaded, Adapter)
    assert loaded.vocab == 31


def test_the_only_model_of_a_file_needs_no_name() -> None:
    write({"model.py": MODEL, "made.py": MODEL.replace("class Model", "class _Model") + "net = _Model(9)\n"})
    assert isinstance(load_named("model.py").model, nn.Module)
    assert load_named("made.py").model.embed.num_embeddings == 9  # type: ignore[union-attr]


def test_of_several_models_that_which_is_no_part_of_another_is_proposed() -> None:
    write({"model.py": MODEL + "class Whole(nn.Module):\n    def forward(self, x):\n        return Model()(x)\n"})
    with pytest.raises(UserError, match=r"model\.py has 2 models; name one, as in model\.py:Whole: Whole, Model"):
        load_named("model.py")


PACKAGE = {"pack/__init__.py": "", "pack/layers.py": "SIZE = 17\n"}

IMPORTS = {
    "relative imports in a package": ("pack/model.py", {**PACKAGE, "pack/model.py": "from .layers import SIZE\n"}),
    "absolute imports of the own package": (
        "pack/model.py",
        {**PACKAGE, "pack/model.py": "from pack.layers import SIZE\n"},
    ),
    "a module beside the file, in a package": (
        "pack/model.py",
        {**PACKAGE, "pack/model.py": "from layers import SIZE\n"},
    ),
    "a module beside the file, in no package": (
        "model.py",
        {"layers.py": "SIZE = 17\n", "model.py": "from layers import SIZE\n"},
    ),
    "the root of the repository": (
        "src/net/model.py",
        {"src/net/sizes.py": "SIZE = 17\n", "src/net/model.py": "from src.net.sizes import SIZE\n"},
    ),
    "a file that hides a standard module": ("types.py", {"types.py": "import types as own\nSIZE = 17\n"}),
    "a neighbor that hides a standard module": (
        "pack/model.py",
        {
            **PACKAGE,
            "pack/queue.py": "1 / 0\n",
            "pack/model.py": "import queue\nqueue.Queue\nfrom .layers import SIZE\n",
        },
    ),
    "a package that hides a standard module": (
        "queue/model.py",
        {"queue/__init__.py": "", "queue/sizes.py": "SIZE = 17\n", "queue/model.py": "from .sizes import SIZE\n"},
    ),
    "a dataclass with postponed annotations": (
        "model.py",
        {
            "model.py": "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass C:\n"
            "    size: int = 17\nSIZE = C().size\n"
        },
    ),
    "its own source": (
        "model.py",
        {"model.py": "import pathlib\nSIZE = 17 if 'SIZE' in pathlib.Path(__file__).read_text() else 0\n"},
    ),
    "no main": ("model.py", {"model.py": "SIZE = 17\nif __name__ == '__main__':\n    1 / 0\n"}),
    "options of its own": (
        "model.py",
        {"model.py": "import argparse\nargparse.ArgumentParser().parse_args()\nSIZE = 17\n"},
    ),
}


@pytest.mark.parametrize(("name", "files"), IMPORTS.values(), ids=IMPORTS)
def test_a_file_is_imported_as_python_would(name: str, files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["program", "--unknown"])
    # of a file that begins with a future import, the rest comes behind
    write({**files, name: files[name] + MODEL.replace("=31", "=SIZE")})
    assert load_named(f"{name}:Model").model.embed.num_embeddings == 17  # type: ignore[union-attr]


def test_a_package_whose_init_needs_what_is_missing_is_imported_without_it() -> None:
    write({"broken/__init__.py": "import not_there\n", "broken/model.py": MODEL})
    loaded = load_named("broken/model.py:Model")
    assert loaded.notes == (
        "imported without the __init__.py of broken, which needs 'not_there', which is not installed",
    )


def test_a_module_is_found_in_the_current_folder() -> None:
    write({"pack/__init__.py": "", "pack/model.py": MODEL})
    assert isinstance(load_named("pack.model:Model").model, nn.Module)


GUARD = "if __name__ == '__main__':"

REFUSED: dict[str, tuple[str, dict[str, str], str]] = {
    "a typo in the file": ("modle.py:Model", {"model.py": MODEL}, "there is no file modle.py; did you mean model.py?"),
    "a typo in the name": ("model.py:Modl", {"model.py": MODEL}, "there is no 'Modl' in model.py; did you mean Model?"),
    "no name": ("model.py:", {"model.py": MODEL}, "'' is no name in a file; name it as in model.py:GPT"),
    "an empty file": ("model.py:Model", {"model.py": "\n"}, "model.py is empty: there is no model in it"),
    "a syntax error": ("model.py:Model", {"model.py": "x = = 3\n"}, "model.py:1: invalid syntax (`x = = 3`)"),
    "no model": ("model.py", {"model.py": "x = 3\n"}, "model.py has no nn.Module, no class of one and no function"),
    "a model of main": (
        "model.py:net",
        {"model.py": f"{MODEL}{GUARD}\n    net = Model()\n"},
        f"'net' is made under `{GUARD}` in model.py, which does not run when it is imported",
    ),
    "two missing modules": (
        "model.py:Model",
        {"model.py": "import torch\nimport not_there.ops as ops\nfrom flash_attn_9 import attend\n" + MODEL},
        "model.py:2: 'not_there' (line 2: `import not_there.ops as ops`), 'flash_attn_9' (line 3: `from flash_attn_9 "
        "import attend`) not installed; pip install not_there, flash_attn_9",
    ),
    "a missing name": (
        "model.py:Model",
        {"model.py": "from torch import not_there\n"},
        "model.py:1: importing model.py raised ImportError: cannot import name 'not_there' from 'torch'",
    ),
    "a script that ends": (
        "model.py:Model",
        {"model.py": MODEL + "raise SystemExit(0)\n"},
        "model.py:14: the program ends itself while importing model.py (`raise SystemExit(0)`); put what trains",
    ),
    "arguments that are not there": (
        "model.py:Model",
        {"model.py": "import sys\ndata = sys.argv[1]\n" + MODEL},
        "model.py:2: importing model.py raised IndexError: list index out of range (`data = sys.argv[1]`); put what",
    ),
    "an error while importing": (
        "model.py:Model",
        {"model.py": MODEL + "open('weights.bin')\n"},
        "model.py:14: importing model.py raised FileNotFoundError",
    ),
    "an error in a function": (
        "model.py:build",
        {"model.py": MODEL + "def build():\n    raise KeyError('weights')\n"},
        "model.py:15: calling build raised KeyError: 'weights' (`raise KeyError('weights')`)",
    ),
    "no module given": (
        "model.py:build",
        {"model.py": MODEL + "def build():\n    return {}\n"},
        "build gives a dict; it must be an nn.Module, an Adapter or (module, options)",
    ),
    "an unknown option": (
        "model.py:build",
        {"model.py": MODEL + "def build():\n    return Model(), {'vocap': 3}\n"},
        "build gives the option 'vocap'; did you mean vocab?",
    ),
    "a class of something else": (
        "model.py:Other",
        {"model.py": MODEL + "class Other: pass\n"},
        "Other is a class, but no nn.Module",
    ),
    "a device without numbers": (
        "model.py:net",
        {"model.py": MODEL + "net = Model().to('meta')\n"},
        "net has parameters on the device 'meta', without numbers",
    ),
    "a folder": (
        "pack",
        {"pack/model.py": MODEL},
        "pack has no config.json, so it is no Hugging Face model; name a file",
    ),
    "a folder with a name": (
        "pack/:Model",
        {"pack/model.py": MODEL},
        "pack/ is a folder; name the file in it, as in pack",
    ),
    "no module": (
        "not_there:Model",
        {},
        "there is no module 'not_there' in this folder or among the installed packages",
    ),
    "no Python file": ("pack/text.txt:Model", {"pack/text.txt": "x"}, "pack/text.txt is no Python file"),
}


@pytest.mark.parametrize(("name", "files", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_loaded_is_said_in_a_sentence(name: str, files: dict[str, str], sentence: str) -> None:
    write(files)
    with pytest.raises(UserError) as raised:
        load_named(name)
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_model_on_cuda_names_the_line_that_needs_it() -> None:
    write({"model.py": MODEL + "net = Model().cuda()\n"})
    with pytest.raises(
        UserError, match=r"model\.py:14: `net = Model\(\)\.cuda\(\)` needs CUDA, and this machine has none"
    ):
        load_named("model.py:net")


@pytest.mark.skipif(not hasattr(importing.signal, "SIGALRM"), reason="this system has no timers of signals")
def test_a_file_that_trains_when_it_is_imported_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "IMPORT_SECONDS", 0.2)
    # as training loops do, it catches exceptions
    loop = "while True:\n    try:\n        torch.ones(3)\n    except Exception:\n        pass\n"
    write({"model.py": MODEL + loop})
    with pytest.raises(UserError, match=r"importing model\.py was stopped after 0\.2 seconds .*does it train\?"):
        load_named("model.py:Model")


def test_what_a_file_prints_stays_out_of_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    write({"model.py": MODEL + "print('number of parameters')\ndef build():\n    print('built')\n    return Model()\n"})
    load_named("model.py:build")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "number of parameters\nbuilt\n"


def test_one_file_is_imported_once() -> None:
    write(
        {
            "model.py": MODEL
            + "import pathlib\npathlib.Path('count').write_text('x' if not pathlib.Path('count').exists() else 'xx')\n"
        }
    )
    load_named("model.py:Model")
    load_named("./model.py:Model")
    assert Path("count").read_text() == "x"


class Pickled:
    """Leaves a file when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return open, ("unpickled", "w")


def test_nothing_is_unpickled() -> None:
    for name in ("model.pt", "model.bin", "model.ckpt"):
        torch.save(Pickled(), name)
        with pytest.raises(UserError, match="holds weights or a pickled object, which is not loaded"):
            load_named(name)
    torch.save(Pickled(), "model.pt2")
    with pytest.raises(UserError, match=r"loading model\.pt2 raised"):
        load_named("model.pt2")
    assert not Path("unpickled").exists()


class Small(nn.Module):
    """A model that torch can trace, script and export."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.head = nn.Linear(8, 13)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.embed(tokens))
        return result


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_programs_of_torch_compute_as_the_module_did() -> None:
    model = Small().eval()
    tokens = torch.arange(10).view(2, 5)
    torch.jit.trace(model, tokens).save("traced.pt")  # type: ignore[no-untyped-call]
    torch.export.save(torch.export.export(model, (tokens,)), "exported.pt2")
    for name, notes in (("traced.pt", ("TorchScript: the code in the file was run",)), ("exported.pt2", ())):
        loaded = load_named(name)
        assert isinstance(loaded.model, nn.Module)
        assert torch.equal(loaded.model(tokens), model(tokens))
        assert loaded.notes == notes


def test_a_folder_of_transformers_is_loaded_with_its_weights_or_random_ones() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=40, n_positions=32)
    model = transformers.GPT2LMHeadModel(config).eval()
    model.save_pretrained("whole")
    Path("empty").mkdir()
    Path("empty/config.json").write_text(json.dumps({**config.to_dict(), "architectures": ["GPT2LMHeadModel"]}))
    tokens = torch.arange(10).view(2, 5)
    loaded = load_named("whole").model
    assert isinstance(loaded, nn.Module)
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert load_named("empty").notes == ("empty has no weights: they are random",)
