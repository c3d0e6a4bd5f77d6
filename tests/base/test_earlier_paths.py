"""Import paths of earlier versions: they give the same objects, and a warning that names the path of today."""

import importlib
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from manyformer.base.earlier_paths import EarlierPaths

FILES = {
    "house/__init__.py": "",
    "house/attic/__init__.py": "from house.attic.trunk import Key\n__all__ = ['Key']",
    "house/attic/trunk.py": "class Key: pass\nif __name__ == '__main__': print('opened', __spec__.name)",
    "house/cellar.py": "class Shelf: pass",
}
"""A package as it is today: its attic was the loft, and what was in the shed is in attic and cellar."""

MODULES = {"house.loft": "house.attic", "house.loft.box": "house.attic.trunk"}
NAMES = {"house.shed": {"Key": "house.attic.trunk", "Shelf": "house.cellar"}}


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, EarlierPaths(MODULES, NAMES)])
    importlib.invalidate_caches()
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "house"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("statement", "earlier", "current"),
    [
        ("import house.loft.trunk as module; Key = module.Key", "house.loft.trunk", "house.attic.trunk"),
        ("import house.loft.box as module; Key = module.Key", "house.loft.box", "house.attic.trunk"),
        ("from house.loft.trunk import Key", "house.loft.trunk", "house.attic.trunk"),
        ("from house.loft import trunk; Key = trunk.Key", "house.loft.trunk", "house.attic.trunk"),
        ("from house.loft import Key", "house.loft.Key", "house.attic.Key"),
        ("from house.shed import Key", "house.shed.Key", "house.attic.trunk.Key"),
        ("import house.shed; Key = house.shed.Key", "house.shed.Key", "house.attic.trunk.Key"),
    ],
)
@pytest.mark.usefixtures("house")
def test_an_earlier_path_gives_the_same_class_and_names_the_new_path(
    statement: str, earlier: str, current: str
) -> None:
    found: dict[str, object] = {}
    with pytest.warns(DeprecationWarning, match=f"^{earlier} is {current} now; .* version 0.4$") as warned:
        exec(compile(statement, "a user's file", "exec"), found)
    assert {warning.filename for warning in warned} == {"a user's file"}
    assert found["Key"] is importlib.import_module("house.attic.trunk").Key


@pytest.mark.usefixtures("house")
def test_a_star_gives_all_public_names() -> None:
    found: dict[str, object] = {}
    with pytest.warns(DeprecationWarning, match="is house"):
        exec("from house.shed import *\nfrom house.loft import *", found)
    assert {"Key", "Shelf"} <= found.keys()


@pytest.mark.usefixtures("house")
def test_a_module_is_not_loaded_twice() -> None:
    with pytest.warns(DeprecationWarning, match="is house"):
        earlier = importlib.import_module("house.loft.trunk")
    current = importlib.import_module("house.attic.trunk")
    assert earlier is current
    assert current.__name__ == current.__spec__.name == "house.attic.trunk"


@pytest.mark.usefixtures("house")
def test_what_was_never_there_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"house\.loft\.lamp"):
        importlib.import_module("house.loft.lamp")
    with pytest.raises(ImportError, match="cannot import name 'Lamp'"):
        exec("from house.shed import Lamp")
    with pytest.raises(ModuleNotFoundError, match=r"house\.garden"):
        importlib.import_module("house.garden")


@pytest.mark.usefixtures("house")
def test_paths_of_today_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert importlib.import_module("house.attic").Key is importlib.import_module("house.attic.trunk").Key


def test_an_earlier_path_runs_as_a_program(house: Path) -> None:
    code = (
        "import runpy, sys; from manyformer.base.earlier_paths import EarlierPaths; "
        f"sys.meta_path.append(EarlierPaths({MODULES}, {NAMES})); runpy.run_module('house.loft.trunk', "
        "run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-W", "always", "-c", code]
    result = subprocess.run(command, cwd=house, capture_output=True, text=True, check=True)
    assert result.stdout == "opened house.loft.trunk\n"
    assert "house.loft.trunk is house.attic.trunk now" in result.stderr


DOCUMENTED = {
    "manyformer.api": "build explain load recipes",
    "manyformer.attention": "Attention",
    "manyformer.autocast": "autocast_disabled",
    "manyformer.batches": "CausalLMBatch TextUnits",
    "manyformer.check": "Adapter check",
    "manyformer.check.tiny_models": "build_tiny",
    "manyformer.compare": "compare",
    "manyformer.config": "LoraConfig TransferConfig run_description shipped_comparisons shipped_runs",
    "manyformer.config.data_sections": "DataSection",
    "manyformer.context_windows": "ContextWindows",
    "manyformer.core": (
        "Context Layer LayerOutput PADDING_SEGMENT State TokenPositions WatchFn contiguous_positions no_watch"
    ),
    "manyformer.data": "OpenRequest register",
    "manyformer.data.graph_archive": "graphs_of_networkx",
    "manyformer.data.length_buckets": "SequenceDataset held_out_batches training_buckets",
    "manyformer.data.opened": "EvaluationData EvaluationPath LengthLimit OpenedData path_name",
    "manyformer.data.saved_tokenizers": "TokenizerPair",
    "manyformer.data.tokenizer": "Tokenizer",
    "manyformer.data.tokenizer_kinds": "train_tokenizer",
    "manyformer.datastore": "Datastore knn_lm",
    "manyformer.errors": "NonFiniteWeights UserError",
    "manyformer.evaluate": "evaluate predict",
    "manyformer.exits": "use_calibration",
    "manyformer.kernels.kernel": "KernelCall",
    "manyformer.models.classifier": "mean_over_tokens",
    "manyformer.tasks.encoder_task": "BIDIRECTIONAL EncoderTask",
    "manyformer.experts": "GatedExperts LoadBalanceLoss MixtureOfExperts SoftmaxRouter",
    "manyformer.feedforward": "FeedForward GatedFeedForward",
    "manyformer.files.json_records": "DamagedFile read_json validate_json",
    "manyformer.files.text_tables": "markdown_table",
    "manyformer.generate": (
        "SourceBatch answer_sources complete decoding_from_options enlarge generate paint paint_classes"
    ),
    "manyformer.heads.head_importance": "head_importance",
    "manyformer.interop.families": "register_family",
    "manyformer.kernels": "Kernel KernelCall SoftmaxKernel",
    "manyformer.masks": "Causal FirstTokens Mask VisibleToAll Window",
    "manyformer.models": (
        "BatchLoss BatchScore ClassHead EncoderModel EpisodeDecoder LanguageModel ModelOutput TokenEmbedding"
    ),
    "manyformer.position": "NoPosition RotaryPosition SinusoidalPosition",
    "manyformer.properties": "attention_properties permutation_change",
    "manyformer.recipes": "RECIPES get_recipe recipe",
    "manyformer.recipes.baselines": "language_model sinusoidal_embedding",
    "manyformer.recipes.stacks": "init_std stack",
    "manyformer.relevance": "head_relevance",
    "manyformer.surgery": "register",
    "manyformer.surgery.lora": "attach_lora merge_lora",
    "manyformer.tasks": "Task register",
    "manyformer.tasks.language_modelling": "LANGUAGE_MODELLING",
    "manyformer.tasks.requests": "EvaluationRequest EvaluationResult",
    "manyformer.tasks.score_sums": "ScoreSums",
    "manyformer.tasks.task": "Inputs",
    "manyformer.tasks.toy": "Toy ToyDraw",
    "manyformer.train": "train",
    "manyformer.train.process_group": "ProcessFailed",
    "manyformer.training_hooks": "",
    "manyformer.view": "attention_masks draw draw_mixing mixing_strengths",
    "manyformer.view.attention_maps": "attention_maps",
    "manyformer.viewer": "view",
}
"""Names that pages, examples or the interface of version 0.2.0 import, or those of a plug-in do, by their path then."""

CHECK = """
import importlib, json, sys, warnings
import manyformer as mf
warnings.simplefilter("ignore", DeprecationWarning)
for module, names in json.load(sys.stdin).items():
    found = importlib.import_module(module)
    for name in names.split():
        getattr(found, name)
assert callable(mf.train) and callable(mf.generate) and callable(mf.check) and callable(mf.view)
importlib.import_module("manyformer.interop.auto_model")
"""


def test_all_documented_paths_of_earlier_versions_are_known() -> None:
    """In a process of its own, in which no other test sees the earlier modules."""
    text = repr(DOCUMENTED).replace("'", '"')
    result = subprocess.run([sys.executable, "-c", CHECK], input=text, text=True, check=False, stderr=subprocess.PIPE)
    assert result.stderr == ""
    assert result.returncode == 0


def test_the_code_of_exported_folders_runs_without_a_warning() -> None:
    """It is on disk and on the hub, where nobody rewrites it."""
    code = "from manyformer.interop.auto_model import ManyformerForCausalLM as Model; print(Model.__module__)"
    command = [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", code]
    result = subprocess.run(command, text=True, check=False, capture_output=True)
    assert result.stdout.startswith("manyformer.conversion.hugging_face.auto_model"), result.stderr
    assert result.stderr == ""
