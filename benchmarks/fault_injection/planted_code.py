"""Code in every place of a folder or a data set from which a careless reader would run it."""

import json
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fault_injection import scenarios
from fault_injection.forked_commands import LOAD, SENTINEL, Surroundings
from fault_injection.outcomes import NotRun, Trial, judge, worst
from fault_injection.scenarios import Command, Scenario
from fault_injection.workshop import Workshop

FAMILY = "planted-code"
ANSWERS = Surroundings(input=b"yes\ny\n1\n" * 10 + b"to be or not\n")
"""What a library that asks whether it may run code would read."""
COMMANDS_OF_A_TRIAL = 3

LLAMA_USES: tuple[Command, ...] = (
    ("generate", "llama", "-", "--max-new", "2"),
    ("generate", "llama", "to be", "--max-new", "2"),
    ("import", "llama", "--out", "imported"),
    (LOAD, "llama"),
    ("convert", "llama", "--to", "llama", "--out", "converted"),
    ("evaluate", "llama", "--data", "text.txt"),
    ("view", "llama", "to be", "--out", "page.html"),
    ("show", "llama"),
    ("check", "llama", "--only", "causal"),
    ("export", "llama", "--out", "exported"),
    ("import", "adapter", "--base", "llama", "--out", "merged"),
    ("train", "llama", "init_from=llama", "data.path=text.txt", "limits.steps=1", "batch.tokens=512", "out=tuned"),
)
BERT_USES: tuple[Command, ...] = (
    ("predict", "bert", "-"),
    ("predict", "bert", "text.txt", "--json"),
    ("import", "bert", "--out", "imported"),
    (LOAD, "bert"),
    ("view", "bert", "to be", "--out", "page.html"),
)
RUN_USES: tuple[Command, ...] = (
    scenarios.GENERATE,
    ("evaluate", "run", "--json"),
    (LOAD, "run"),
    ("show", "run"),
    ("plot", "run"),
    ("heads", "run", "--sentences", "4"),
    ("view", "run", "to be", "--out", "page.html"),
    ("export", "run", "--out", "exported"),
    ("convert", "run", "--to", "collaborative", "shared_dim=8", "--out", "converted"),
    ("prune", "run", "--keep", "3", "--how", "importance", "--out", "pruned"),
    ("attention", "run", "to be"),
)


@dataclass(frozen=True)
class Plant:
    """Code that is planted in the folder of a scenario, and the commands that would come upon it."""

    deed: str
    scenario: Scenario
    carry_out: Callable[[Path, str], object]
    """Gets the folder of the trial and the line of Python."""
    uses: tuple[Command, ...]
    finished: bool = True
    names: frozenset[str] = frozenset()


class _Payload:
    """What runs a line of Python when it is unpickled."""

    def __init__(self, line: str) -> None:
        self.line = line

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (self.line,)


def change_json(file: Path, **fields: Any) -> None:
    """Other values of fields of a JSON object."""
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**content, **fields}))


def _write_tokenizer(folder: Path, files: str) -> None:
    """The tokenizer in one file (json), in the files of old versions (old), or not at all (none)."""
    if files == "json":
        from tokenizers import Tokenizer, models, pre_tokenizers

        vocab = {word: number for number, word in enumerate(["[UNK]", *scenarios.WORDS])}
        tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.save(str(folder / "tokenizer.json"))
    if files == "none":
        for name in ("merges.txt", "vocab.json", "vocab.txt"):
            (folder / name).unlink(missing_ok=True)


def _auto_map(folder: Path, line: str, model: str, files: str, config: str) -> None:
    place = folder / model
    _write_tokenizer(place, files)
    names = {
        "config.json": {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"},
        "tokenizer_config.json": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]},
    }
    change_json(place / config, auto_map=names[config])
    if config == "tokenizer_config.json":
        change_json(place / config, tokenizer_class="Evil")
    (place / "evil.py").write_text(line)


def _with_pickle(folder: Path, line: str, file: str, *, instead_of: str | None) -> None:
    if instead_of is not None:
        (folder / file).with_name(instead_of).unlink()
    (folder / file).write_bytes(pickle.dumps(_Payload(line)))


def _template(folder: Path, line: str, name: str) -> None:
    code = f"{{{{ cycler.__init__.__globals__.__builtins__.exec({line!r}) }}}}"
    if name == "chat_template.jinja":
        (folder / "llama" / name).write_text(code)
    else:
        change_json(folder / "llama" / name, chat_template=code)


def _modules_beside(folder: Path, line: str, model: str) -> None:
    names = ("__init__", "modeling_llama", "configuration_llama", "tokenization_gpt2", "modeling_bert", "setup")
    for name in (*names, "conftest", "sitecustomize", "custom_generate/generate", "tokenizers", "torch"):
        file = folder / model / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(line)


def _yaml_tag(folder: Path, line: str, file: str) -> None:
    (folder / file).write_text(f"recipe: !!python/object/apply:builtins.exec [{json.dumps(line)}]\n")


def _yaml_import(folder: Path, line: str, file: str) -> None:
    (folder / "evil_module.py").write_text(line)
    path = folder / file
    path.write_text("import: [evil_module]\n" + path.read_text())


def _module_of_recipe(folder: Path, line: str) -> None:
    (folder / "evil_module.py").write_text(line)
    change_json(folder / "run/model/config.json", recipe_module="evil_module", recipe="evil")


def _objects(folder: Path, line: str, file: str, name: str) -> None:
    with np.load(folder / file) as archive:
        arrays = {key: archive[key] for key in archive.files}
    array = np.empty(len(arrays[name]), object)
    array[:] = [_Payload(line)] * len(array)
    np.savez(folder / file, **{**arrays, name: array})


def _script_of_datasets(folder: Path, line: str) -> None:
    (folder / "corpus").mkdir()
    for name in ("corpus.py", "dataset_infos.json", "README.md"):
        (folder / "corpus" / name).write_text(line if name.endswith(".py") else "{}")


def _front_matter(folder: Path, line: str) -> None:
    tag = f"---\nlicense: !!python/object/apply:builtins.exec [{json.dumps(line)}]\n---\n"
    for file in (folder / "run/model/README.md", folder / "run/README.md"):
        file.write_text(tag)


def plants() -> list[Plant]:
    """All that can be planted, in the same order each time."""
    foreign, language = scenarios.FOREIGN, scenarios.LANGUAGE
    listed = [
        Plant(
            f"auto_map in {model}/{config}, tokenizer: {files}",
            foreign,
            lambda folder, line, model=model, files=files, config=config: _auto_map(folder, line, model, files, config),
            uses,
            finished=False,
            names=frozenset({config, "auto_map", model}),
        )
        for model, uses in (("llama", LLAMA_USES), ("bert", BERT_USES))
        for files in ("json", "old", "none")
        for config in ("config.json", "tokenizer_config.json")
    ]
    for model, uses in (("llama", LLAMA_USES), ("bert", BERT_USES)):
        for name in ("pytorch_model.bin", "training_args.bin", "model.safetensors", "spiece.model", "tokenizer.model"):
            for instead_of in ("model.safetensors", None):
                file = f"{model}/{name}"
                listed.append(
                    Plant(
                        f"a pickle as {file}{', alone' if instead_of else ''}",
                        foreign,
                        lambda folder, line, file=file, instead_of=instead_of: _with_pickle(
                            folder, line, file, instead_of=instead_of
                        ),
                        uses,
                        finished=False,
                        names=frozenset({name, model, "safetensors"}),
                    )
                )
        listed.append(
            Plant(
                f"modules in {model}/",
                foreign,
                lambda folder, line, model=model: _modules_beside(folder, line, model),
                uses,
                finished=False,
                names=frozenset({model}),
            )
        )
    listed += [
        Plant(
            f"a template that escapes in {name}",
            foreign,
            lambda folder, line, name=name: _template(folder, line, name),
            LLAMA_USES,
            finished=False,
            names=frozenset({name}),
        )
        for name in ("tokenizer_config.json", "chat_template.jinja")
    ]
    listed.append(
        Plant(
            "a pickle as adapter/adapter_model.bin",
            foreign,
            lambda folder, line: _with_pickle(
                folder, line, "adapter/adapter_model.bin", instead_of="adapter_model.safetensors"
            ),
            (("import", "adapter", "--base", "llama", "--out", "merged"),),
            finished=False,
            names=frozenset({"adapter_model"}),
        )
    )
    for file in ("run/run.yaml", "run/model/run.yaml"):
        listed += [
            Plant(
                f"an object of Python in {file}",
                language,
                lambda folder, line, file=file: _yaml_tag(folder, line, file),
                (*RUN_USES, ("train", "run/run.yaml", "out=more")),
                names=frozenset({"run.yaml", "model"}),
            ),
            Plant(
                f"a module to import in {file}",
                language,
                lambda folder, line, file=file: _yaml_import(folder, line, file),
                RUN_USES,
                names=frozenset({"run.yaml", "evil_module", "model"}),
            ),
        ]
    listed += [
        Plant(
            "the module of a recipe in run/model/config.json",
            language,
            _module_of_recipe,
            RUN_USES,
            names=frozenset({"config.json", "evil"}),
        ),
        Plant("an object of Python in README.md", language, _front_matter, RUN_USES, names=frozenset({"README.md"})),
        Plant(
            "a script of datasets",
            language,
            _script_of_datasets,
            tuple(
                ("train", "transformer-lm", f"data.path={path}", "limits.steps=1", "out=new")
                for path in ("hub:corpus", "hub:./corpus", "corpus")
            ),
            names=frozenset({"corpus"}),
        ),
        Plant(
            "an object of Python in a comparison",
            scenarios.COMPARISON,
            lambda folder, line: _yaml_tag(folder, line, "two.yaml"),
            (("compare", "two.yaml", "--out", "comparison"), ("compare", "two.yaml", "--dry-run")),
            finished=False,
            names=frozenset({"two.yaml"}),
        ),
    ]
    for scenario, file, names in (
        (scenarios.IMAGES, "images.npz", ("x_train", "y_train")),
        (scenarios.CAPTIONS, "captions.npz", ("images", "texts")),
    ):
        listed += [
            Plant(
                f"pickles as {name} of {file}",
                scenario,
                lambda folder, line, file=file, name=name: _objects(folder, line, file, name),
                (scenario.command, ("predict", "run", file), ("caption", "run", file), ("evaluate", "run")),
                finished=False,
                names=frozenset({file, "run"}),
            )
            for name in names
        ]
    return listed


def carry_out(workshop: Workshop, number: int) -> Trial | NotRun:
    """One plant and a few of the commands that would come upon it; each is planted once before any comes again."""
    listed = plants()
    workshop.chance(FAMILY).shuffle(listed)
    plant = listed[number % len(listed)]
    workshop.set_up(plant.scenario, finished=plant.finished)
    plant.carry_out(workshop.here, workshop.planted)
    uses = workshop.chance(FAMILY, number).sample(plant.uses, min(COMMANDS_OF_A_TRIAL, len(plant.uses)))
    began = time.monotonic()
    outcomes = []
    for command in uses:
        result = workshop.run(command, ANSWERS)
        # that no code runs is what counts: any refusal in a sentence will do
        folders = {word.rpartition("=")[2] for word in command[1:3]}
        outcome, detail = judge(result, {*plant.names, *folders, SENTINEL, "error: "}, same=None)
        outcomes.append((outcome, detail, str(result)))
    outcome, detail, line = worst(outcomes)
    return Trial(FAMILY, number, plant.deed, outcome, line, detail, time.monotonic() - began)
