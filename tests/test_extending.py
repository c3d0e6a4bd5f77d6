"""The page on additions: its code, added to a copy of the package or as plug-ins, works, and its counts are right."""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/extending.md"
sys.path.insert(0, str(ROOT / "tests/examples"))
from installing import Process  # noqa: E402 - a module of another folder of tests

NN = "src/manyformer/nn"
FAMILIES = "src/manyformer/conversion/hugging_face/families"
SETTINGS = (
    *("data.path=text.txt", "data.tokenizer=char", "data.length=32", "dim=32", "depth=1", "batch.tokens=256"),
    *("limits.steps=3", "device=cpu", "--quiet"),
)
DECODING = "causal,cached,decode,packing"

HEADINGS = {
    "kernel": "A kernel",
    "position": "A position",
    "mixer": "A mixer",
    "recipe": "A recipe",
    "family": "A family of checkpoints",
    "task": "A task",
    "data": "A format of data",
    "verb": "A verb",
}


def section(name: str) -> str:
    """The part of the page on one kind of addition."""
    return PAGE.read_text().split(f"\n## {HEADINGS[name]}\n")[1].split("\n## ")[0]


def code(text: str) -> list[str]:
    """The Python of the blocks of a section, and of the parts of files that it includes, in their order."""
    blocks = []
    for fence, body in re.findall(r"^```(\{literalinclude\} \S+|python)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        blocks.append(included(fence.split()[1], body) if "literalinclude" in fence else body)
    return blocks


def included(path: str, options: str) -> str:
    """The part of a file that the site shows."""
    text = (PAGE.parent / path).read_text()
    borders = {name: value.strip('"') for name, value in re.findall(r"^:(start-at|end-before): (.*)$", options, re.M)}
    start = text.index(borders["start-at"]) if "start-at" in borders else 0
    return text[start : text.index(borders["end-before"], start) if "end-before" in borders else None]


def named_files(text: str) -> dict[str, str]:
    """The blocks that name a file of the package in their first line."""
    blocks = (block.partition("\n") for block in code(text))
    return {head.removeprefix("# "): rest for head, _, rest in blocks if head.startswith("# src/")}


def changes(text: str) -> Iterator[tuple[str, str, str]]:
    """Files of the package, lines that stand there, and what the page makes of them."""
    for path, body in re.findall(r"^```diff\n--- (\S+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for hunk in body.split("@@\n"):
            lines = hunk.splitlines(keepends=True)
            before = "".join(line[1:] for line in lines if line.startswith(" "))
            yield path, before, "".join(line[1:] for line in lines)


def additions(name: str) -> dict[str, str]:
    """The new files of an addition with their contents, by the paths that they have in the package."""
    files = named_files(section(name))
    if name == "mixer":
        mixer = next(block for block in code(section(name)) if "class FadingSum" in block)
        known = [line for line in mixer.splitlines(keepends=True) if "manyformer.models" not in line]
        unused = ("manyformer.nn.feed_forward", "manyformer.nn.residual")
        files[f"{NN}/token_mixing/fading_sum.py"] = "".join(
            line for line in known if not any(module in line for module in unused)
        ).replace(
            "Chain, Context, ContiguousLayout, Layer, LayerOutput, Pointwise",
            "Context, ContiguousLayout, Layer, LayerOutput",
        )
    if name == "family":
        imports, family = code(section(name))
        head = "from collections.abc import Iterator, Mapping\nfrom typing import Any\n\n"
        files[f"{FAMILIES}/seed_oss.py"] = f'"""Seed-OSS."""\n\n{head}{imports}\n\n{family}\nFAMILIES = (SEED_OSS,)\n'
    if name == "task":
        files |= task_files()
    if name == "data":
        ((path, text),) = files.items()
        settings, rule = text[text.index("class CoinsData") :].split("@register_rule(CoinsData)")
        imports = text[: text.index("class CoinsData")].replace(
            "from manyformer.config.data_sections import SyntheticData",
            "from manyformer.config.data_sections.structure_rule_sections import CoinsData",
        )
        files[path] = f"{imports}@register_rule(CoinsData){rule}".replace(
            "from typing import ClassVar, Literal\n\n", ""
        )
        sections = "src/manyformer/config/data_sections/structure_rule_sections.py"
        files[f"{sections}+"] = f"\n\n@register_rule_section\n{settings.rstrip()}\n"
    return files


def task_files() -> dict[str, str]:
    """The files of the example package at their places in the package, the batch apart from the model."""
    folder = ROOT / "examples/manyformer-text-regression/src/manyformer_text_regression"
    texts = {name: (folder / f"{name}.py").read_text() for name in ("model", "task", "data", "recipe")}
    start, stop = (texts["model"].index(mark) for mark in ("class RegressionBatch", "@final"))
    batch = texts["model"][start:stop].rstrip()
    batch_imports = "from typing import NamedTuple, Self\n\nimport torch\nfrom torch import Tensor\n"
    layers = "from manyformer.nn.core import PADDING_SEGMENT"
    texts["batch"] = f'"""Texts with numbers."""\n\n{batch_imports}\n{layers}\n\n\n{batch}\n'
    own = "from manyformer.nn.batches.regression_batch import RegressionBatch\n"
    texts["model"] = (
        (texts["model"][:start] + texts["model"][stop:])
        .replace("import NamedTuple, Self, final", "import final")
        .replace(layers, f"{own}from manyformer.nn.core import")
        .replace("import, LayerOutput", "import LayerOutput")
    )
    places = {
        "batch": f"{NN}/batches/regression_batch.py",
        "model": "src/manyformer/models/text_regressor.py",
        "task": "src/manyformer/models/tasks/text_regression.py",
        "data": "src/manyformer/data/text/open_numbers.py",
        "recipe": "src/manyformer/recipes/text_regression.py",
    }
    package = "from manyformer_text_regression"
    moved = {
        "from manyformer_text_regression.model import RegressionBatch\n": own,
        "from manyformer_text_regression.model import RegressionBatch, ": f"{own}{package}.model import ",
        "manyformer_text_regression.model": "manyformer.models.text_regressor",
        "manyformer_text_regression.task": "manyformer.models.tasks.text_regression",
        # every instance in the folder of tasks is registered, and the registry imports this file
        "from manyformer.models.tasks import register\n": "",
        "TEXT_REGRESSION = TextRegression()\nregister(TEXT_REGRESSION)": "TEXT_REGRESSION = TextRegression()",
        "from manyformer.recipes import recipe\n": "from manyformer.recipes.parts.registry import recipe\n",
        "from manyformer.nn import Attention, SoftmaxKernel\n": (
            "from manyformer.nn.attention.attention import Attention\n"
            "from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel\n"
        ),
        "from manyformer.data import DataKind, OpenRequest, Sampler, register\n": (
            "from manyformer.data.batching.epochs import Sampler\n"
            "from manyformer.data.pipeline.kind import DataKind, OpenRequest, register\n"
        ),
    }
    for name, text in texts.items():
        for old, new in moved.items():
            text = text.replace(old, new)
        texts[name] = text
    return {places[name]: text for name, text in texts.items()}


def test_the_table_counts_files_and_lines() -> None:
    rows = re.findall(r"^\| .*\| \[.*?\]\(#([a-z-]+)\) \| (\d+) \| (\d+) \|", PAGE.read_text(), re.MULTILINE)
    counted = []
    for name, heading in HEADINGS.items():
        edited = list(changes(section(name)))
        lines = sum(len(after.splitlines()) - len(before.splitlines()) for _, before, after in edited)
        lines += sum(bool(line.strip()) for text in additions(name).values() for line in text.splitlines())
        files = {*additions(name), *(path for path, *_ in edited)}
        counted.append((heading.lower().replace(" ", "-"), str(len(files)), str(lines)))
    assert rows == counted


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """Commands of a copy of the package with the eight additions, in a folder with a text."""
    folder = tmp_path_factory.mktemp("house")
    shutil.copytree(ROOT / "src", folder / "src")
    for name in HEADINGS:
        for path, text in additions(name).items():
            place = folder / path.removesuffix("+")
            assert place.exists() == path.endswith("+"), path
            with place.open("a") as file:
                file.write(text)
        for path, before, after in changes(section(name)):
            present = (folder / path).read_text()
            assert present.count(f"\n{before}") == 1, f"{path} has not once:\n{before}"
            (folder / path).write_text(present.replace(f"\n{before}", f"\n{after}"))
    yield from _process(folder, folder / "src")


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """Commands of the package itself, in a folder with plug-ins."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "mean_kernel.py").write_text("\n".join(code(section("kernel"))))
    (folder / "log_distance.py").write_text(
        f"{code(section('position'))[0]}\nfrom manyformer.recipes.compose import POSITIONS\n"
        'POSITIONS["log"] = lambda sizes: LogDistancePosition\n'
    )
    mixer, recipe = code(section("mixer"))
    own = "from manyformer.nn.token_mixing.fading_sum import FadingSum\n"
    assert own in recipe
    (folder / "fading_sum.py").write_text(mixer + recipe.replace(own, ""))
    (folder / "my_file.py").write_text(code(section("recipe"))[0])
    yield from _process(folder, folder)


def _process(folder: Path, packages: Path) -> Iterator[Process]:
    (folder / "text.txt").write_text("the cat sat on the mat and the dog lay by the door; " * 200)
    process = Process(packages, folder)
    yield process
    process.close()


def works(process: Process, *words: str) -> None:
    """A model trains steps, and writes a text with a cache."""
    name, *keywords = [word for word in words if not word.startswith(("--import", "./"))]
    imports = [word for word in words if word.startswith(("--import", "./"))]
    process.manyformer("train", name, *keywords, *SETTINGS, "out=run", "--fresh", *imports)
    assert process.manyformer("generate", "run", "the cat ", "--max-new", "5", "--greedy", *imports).strip()


MODELS = {
    "kernel": ("compose", "kernel=mean"),
    "position": ("compose", "position=log"),
    "mixer": ("fading-sum",),
    "recipe": ("my-model",),
}
PLUGINS = {"kernel": "mean_kernel", "position": "log_distance", "mixer": "fading_sum", "recipe": "my_file"}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_part_of_a_model_works_in_the_package(house: Process, name: str) -> None:
    house.manyformer("check", *MODELS[name], "--only", DECODING)
    works(house, *MODELS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_part_of_a_model_works_from_outside(outside: Process, name: str) -> None:
    works(outside, *MODELS[name], "--import", f"./{PLUGINS[name]}.py")


@pytest.mark.slow
def test_a_family_in_the_package_reads_checkpoints(house: Process) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 29, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = transformers.SeedOssConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    transformers.SeedOssForCausalLM(config).save_pretrained(house.cwd / "theirs")
    report = house.manyformer("import", "theirs", "--out", "imported")
    assert json.loads((house.cwd / "imported/config.json").read_text())["keywords"]["biases"] == "qkv", report


@pytest.mark.slow
def test_a_task_in_the_package_is_trained_and_scored(house: Process) -> None:
    texts = [f"{'a' * (row % 7)}{'b' * (row * 5 % 11)}" for row in range(200)]
    (house.cwd / "numbers.tsv").write_text("".join(f"{text}\t{text.count('a') / 10}\n" for text in texts))
    small = ("dim=16", "heads=2", "depth=1", "batch.tokens=512", "limits.steps=3", "device=cpu", "--quiet")
    house.manyformer("train", "text-regression", "data.path=numbers.tsv", *small, "out=regression")
    (score,) = json.loads(house.manyformer("evaluate", "regression", "--json"))["scores"]
    assert score["name"] == "rmse"


@pytest.mark.slow
def test_a_rule_of_data_in_the_package_is_learned_from(house: Process) -> None:
    small = ("data.length=16", "data.valid=16", "batch.tokens=64", "limits.steps=2", "dim=16", "depth=1", "heads=2")
    house.manyformer(
        "train", "transformer-lm", "data.kind=synthetic", "data.rule=coins", *small, "device=cpu", "out=coins"
    )
    assert "rule: coins" in (house.cwd / "coins/run.yaml").read_text()


@pytest.mark.slow
def test_a_verb_in_the_package_is_listed_and_counts(house: Process) -> None:
    assert re.search(r"count .*Count the parameters", house.manyformer("--help"))
    counts = json.loads(house.manyformer("count", "transformer-lm", "dim=32", "depth=1", "heads=2", "--json"))
    assert counts["body"] > 0


@pytest.mark.slow
def test_the_rules_of_the_house_hold_with_all_additions(house: Process) -> None:
    rules = "arrows or circle or needed or each_file_of_recipes"
    assert "5 passed" in house.pytest(str(ROOT / "tests/test_architecture.py"), "-k", rules)
