"""Code in every file and field of a folder, in each form that some library would run: all of it writes to one file."""

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

MODULES = (
    *("planted.py", "modeling_planted.py", "modeling_manyformer.py", "__init__.py", "sitecustomize.py", "conftest.py"),
    *("usercustomize.py", "torch.py", "yaml.py", "transformers.py", "tiktoken.py", "kernels.py", "setup.py"),
)
"""Modules that a config names, and some with the names of libraries, which a path to the folder would import."""

PICKLES = (
    *("pytorch_model.bin", "adapter_model.bin", "training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"),
    *("tokenizer.pkl", "train.pkl", "data.pickle", "model.ckpt", "vocab.bin", "corpus.bin", "checkpoint.pt"),
)

SETTINGS = {
    *("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("adapter_config.json", "dataset_info.json", "dataset_infos.json", "state.json"),
}
"""Files of other libraries that may have fields beyond those that are read."""

AUTO_CLASSES = (
    *("AutoConfig", "AutoTokenizer", "AutoProcessor", "AutoImageProcessor", "AutoFeatureExtractor", "AutoModel"),
    *("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModelForSequenceClassification"),
)


class OnUnpickling:
    """An object whose pickle writes to a file when it is read."""

    def __init__(self, fired: Path) -> None:
        self.fired = fired

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, (f"open({str(self.fired)!r}, 'a').write('pickle ')",))


def plant_beside(folder: Path, fired: Path) -> None:
    """Put modules, pickles, templates and path files into a folder and those in it; nothing of it is overwritten."""
    template = "{{ cycler.__init__.__globals__.os.system('echo template >> " + str(fired) + "') }}"
    for place in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        code = f"open({str(fired)!r}, 'a').write(__name__ + ' ' + __file__ + ' ')\n"
        for name in (*MODULES, f"{folder.name}.py"):
            _write(place / name, (code + "class Planted:\n    pass\n").encode())
        for name in PICKLES:
            _write(place / name, pickle.dumps(OnUnpickling(fired)))
        _write(place / "planted.pth", f"import sys; {code}".encode())
        _write(place / "chat_template.jinja", template.encode())
        _write(place / "requirements.txt", b"planted-package\n")
        _write(place / "data.py.lock", b"")
        if not (place / "planted.npz").exists():
            np.savez(place / "planted.npz", x=np.array([OnUnpickling(fired)], dtype=object), allow_pickle=True)
        for name, classes in (
            ("generation_config.json", {}),
            ("processor_config.json", {"processor_class": "Planted"}),
        ):
            if (place / "config.json").exists():
                _write(place / name, json.dumps({**classes, **_fields("planted.Planted")}).encode())


def _write(file: Path, content: bytes) -> None:
    if not file.exists():
        file.write_bytes(content)


def _fields(reference: str) -> dict[str, Any]:
    """Fields by which libraries are told what to import or where to look."""
    return {
        "auto_map": dict.fromkeys(AUTO_CLASSES, reference) | {"AutoTokenizer": [reference, reference]},
        "auto_mapping": {"base_model_class": "Planted", "parent_library": "planted"},
        "custom_pipelines": {"text-generation": {"impl": reference, "pt": ["AutoModel"]}},
        "custom_generate": "planted",
        "_attn_implementation": "planted/kernel",
        "attn_implementation": "planted/kernel",
        "quantization_config": {"quant_method": "planted", "modules_to_not_convert": [reference]},
        "chat_template": "{{ cycler.__init__.__globals__.os.getcwd() }}",
        "imports": ["planted"],
        "import": ["planted"],
        "module": "planted",
        "plugins": ["planted"],
    }


def plant_fields(folder: Path, reference: str = "planted.Planted") -> None:
    """Add to the settings of other libraries in a folder the fields that name code; what they say otherwise stays.

    Our own files have no fields but ours, see `text_places`."""
    for file in _json_files(folder):
        content = json.loads(file.read_text())
        if file.name in SETTINGS and "recipe" not in content:
            file.write_text(json.dumps({**_fields(reference), **content}))


def text_places(folder: Path) -> Iterator[tuple[Path, tuple[Any, ...]]]:
    """Each text in the JSON files of a folder, by its place; of lists and vocabularies the first ones."""
    for file in _json_files(folder):
        if file.name not in ("vocab.json", "manifest.json"):
            yield from ((file, place) for place in _texts(json.loads(file.read_text()), ()))


def replace_text(file: Path, place: tuple[Any, ...], text: str) -> None:
    """Put a text in the place of another one in a JSON file."""
    content = json.loads(file.read_text())
    target = content
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = text
    file.write_text(json.dumps(content))


def yaml_places(folder: Path) -> Iterator[tuple[Path, int]]:
    """Each line of the YAML files of a folder that gives a value."""
    for file in sorted(folder.rglob("*.yaml")):
        for number, line in enumerate(file.read_text().splitlines()):
            if ": " in line:
                yield file, number


def replace_line(file: Path, number: int, tag: str) -> None:
    """Put an object of Python in the place of the value in a line of a YAML file."""
    lines = file.read_text().splitlines()
    lines[number] = f"{lines[number].partition(': ')[0]}: {tag}"
    file.write_text("\n".join(lines) + "\n")


def _texts(value: Any, place: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, str) and place:
        yield place
    elif isinstance(value, dict):
        for key in list(value)[:20]:
            yield from _texts(value[key], (*place, key))
    elif isinstance(value, list):
        for number in range(min(len(value), 2)):
            yield from _texts(value[number], (*place, number))


def _json_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*.json") if file.is_file())
