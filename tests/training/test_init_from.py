"""A run that begins with the weights of another: the next stage of a training with longer windows (Longformer)."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import FakeSource, FakeSpan, a_run
from runs import Heard, go, learned

import manyformer as mf
from manyformer.analysis.own_models import build_tiny
from manyformer.base.errors import UserError
from manyformer.config import LabelsData, RunConfig, TreesData
from manyformer.data.tokenizers.native_tokenizers import CharTokenizer
from manyformer.training.events import TrainingNote
from manyformer.training.init_from import load_initial_weights
from manyformer.training.session import DataOpener

SIZES = {"dim": 16, "depth": 2, "heads": 2, "dropout": 0.0}
WINDOWS: list[dict[str, Any]] = [
    {"window": 2, "top_window": 3, "dilated_heads": 1},
    {"window": 4, "top_window": 6, "dilated_heads": 1},
]


class OtherWords(FakeSource):
    """As many tokens, but other ones."""

    def save(self, folder: Path) -> None:
        CharTokenizer("abcdef").save(folder / "tokenizer.json")


def source(task: str, longest: int = 8, kind: type[FakeSource] = FakeSource) -> FakeSource:
    actual = kind(task)
    actual.length_limits = [FakeSpan(longest)]
    return actual


def opened(found: FakeSource) -> DataOpener:
    return lambda run, out, say: found


def stage(out: Path, model: dict[str, Any], **given: Any) -> RunConfig:
    return a_run(out, "longformer-lm", model=SIZES | model, limits={"steps": 4}, save={"every": 100}, **given)


def test_windows_twice_as_long_go_on_where_shorter_ones_stopped(tmp_path: Path) -> None:
    """Beltagy et al. 2020, section 4.2: windows and sequences double from stage to stage, the rate is halved."""
    text = source("language-model")
    first = go(stage(tmp_path / "1", WINDOWS[0]), opened=opened(text))
    run = stage(tmp_path / "2", WINDOWS[1], init_from=str(tmp_path / "1"), optim={"lr": 5e-3}, evaluate={"every": 1})
    second = go(run, opened=opened(source("language-model", 16)))
    windows = [[part.mask for part in run.load().modules() if hasattr(part, "mask")] for run in (first, second)]
    assert repr(windows[0][0]) == "Window(2)"
    assert repr(windows[1][0]) == "Window(4)"
    begun: Any = mf.build("longformer-lm", vocab=11, **SIZES, **WINDOWS[1])
    load_initial_weights(begun, str(tmp_path / "1"), text)
    assert all(torch.equal(a, b) for a, b in zip(begun.parameters(), first.load().parameters(), strict=True))
    # four steps from nothing lead nowhere near
    fresh = go(stage(tmp_path / "3", WINDOWS[1]), opened=opened(text))
    assert second.scores["loss"] < first.scores["loss"] < fresh.scores["loss"] + 0.5
    assert learned(tmp_path / "2")[0] != learned(tmp_path / "3")[0]


def test_an_interrupted_stage_goes_on_with_its_own_weights(tmp_path: Path) -> None:
    text = source("language-model")
    go(stage(tmp_path / "1", WINDOWS[0]), opened=opened(text))
    run = stage(tmp_path / "2", WINDOWS[1], init_from=str(tmp_path / "1"))
    full = go(run, opened=opened(text))
    # the earlier stage may be gone by now
    (tmp_path / "1").rename(tmp_path / "elsewhere")
    again = go(run.model_copy(update={"limits": run.limits.model_copy(update={"steps": 6})}), opened=opened(text))
    assert (full.step, again.step) == (4, 6)


def test_learned_positions_are_repeated(tmp_path: Path) -> None:
    """Section 5: a table of 512 positions copied eight times serves 4,096."""
    run = a_run(tmp_path / "1", "longformer", model=SIZES | {"window": 2}, limits={"steps": 4}, save={"every": 9})
    short = go(run, opened=opened(source("masked-lm"))).load()
    longer: Any = mf.build("longformer", vocab=11, **SIZES, window=4, max_length=20)
    load_initial_weights(longer, str(tmp_path / "1"), source("masked-lm", 20))
    table: Any = short.get_parameter("embed.position.weight")
    assert torch.equal(longer.embed.position.weight, torch.cat([table, table, table[:4]]))


def test_another_recipe_takes_the_weights_of_a_conversion(tmp_path: Path) -> None:
    """`mf.convert` and `init_from` have the same rules."""
    run = a_run(tmp_path / "1", "bert", model=SIZES, limits={"steps": 4}, save={"every": 9})
    text = source("masked-lm")
    short: Any = go(run, opened=opened(text)).load()
    keywords: dict[str, Any] = {"window": 2, "max_length": 20}
    started: Any = mf.build("longformer", vocab=11, **SIZES, **keywords)
    sentence = load_initial_weights(started, str(tmp_path / "1"), text)
    converted = mf.convert(short, "longformer", **keywords).model.state_dict()
    assert all(torch.equal(value, converted[name]) for name, value in started.state_dict().items())
    assert "derived, copies of the projections of all tokens" in sentence
    assert "becomes GlobalLocalAttention" in sentence


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    text = source("language-model")
    go(stage(tmp_path / "1", WINDOWS[0]), opened=opened(text))
    wider: Any = mf.build("longformer-lm", vocab=11, **SIZES | {"dim": 24})
    with pytest.raises(UserError, match=r"init_from: .*/1/model \(dim=16 .*window=2 .*\): \S+ has the shape"):
        load_initial_weights(wider, str(tmp_path / "1"), text)
    with pytest.raises(UserError, match="was trained with another tokenizer"):
        load_initial_weights(wider, str(tmp_path / "1"), source("language-model", kind=OtherWords))
    with pytest.raises(UserError, match="holds no model"):
        load_initial_weights(wider, str(tmp_path), FakeSourceWithout("language-model"))


class FakeSourceWithout(FakeSource):
    """Data without a text."""

    def save(self, folder: Path) -> None:
        return None


def test_it_is_told(tmp_path: Path) -> None:
    text, heard = source("language-model"), Heard()
    go(stage(tmp_path / "1", WINDOWS[0]), opened=opened(text))
    go(stage(tmp_path / "2", WINDOWS[1], init_from=str(tmp_path / "1")), heard, opened=opened(text))
    assert any(
        isinstance(event, TrainingNote) and f"weights initialized from {tmp_path / '1'}" in event.text
        for event in heard
    )


def test_a_masked_model_begins_a_classifier_and_a_tagger(tmp_path: Path) -> None:
    sizes = SIZES | {"max_length": 8}
    go(a_run(tmp_path / "1", "bert", model=sizes, limits={"steps": 4}, save={"every": 9}), opened=masked())
    saved = mf.load(tmp_path / "1").state_dict()
    for task, data in (("classification", LabelsData(path="x")), ("tagging", TreesData(path="x"))):
        classifier: Any = mf.build("bert", vocab=11, **sizes, head=task, classes=3)
        new_head = {name: value.clone() for name, value in classifier.state_dict().items() if name.startswith("head.")}
        report = load_initial_weights(classifier, str(tmp_path / "1"), source(task))
        assert "embedding and layers are copied, the head for" in report
        assert report.endswith("that for masked language modelling is left")
        for name, value in classifier.state_dict().items():
            assert torch.equal(value, (new_head if name.startswith("head.") else saved)[name]), name
        heard = Heard()
        run = a_run(tmp_path / task, "bert", model=sizes, data=data, init_from=str(tmp_path / "1"), limits={"steps": 4})
        result = go(run, heard, opened=opened(source(task)))
        assert report in heard.notes
        assert result.load().spec.keywords["head"] == task


@pytest.mark.parametrize(
    "recipe", ["vit", "transformer-classifier", "audio-transformer-classifier", "multimodal-transformer"]
)
def test_a_classifier_begins_one_with_other_labels(recipe: str, tmp_path: Path) -> None:
    saved, model = (build_tiny(recipe, {"classes": classes}, seed) for seed, classes in enumerate((4, 7)))
    saved.save(tmp_path / "model")
    new_head = {name: value.clone() for name, value in model.state_dict().items() if name.startswith("head.")}
    data: Any = SimpleNamespace(save=lambda folder: None)
    report = load_initial_weights(model, str(tmp_path / "model"), data)
    assert "the head for 7 labels is new, that for 4 is left" in report
    assert new_head
    for name, value in model.state_dict().items():
        assert torch.equal(value, new_head[name] if name in new_head else saved.state_dict()[name]), name


def test_fewer_positions_are_the_first_ones(tmp_path: Path) -> None:
    go(a_run(tmp_path / "1", "bert", model=SIZES, limits={"steps": 4}), opened=masked(longest=20))
    shorter: Any = mf.build("bert", vocab=11, **SIZES, max_length=8)
    load_initial_weights(shorter, str(tmp_path / "1"), source("masked-lm"))
    table: Any = mf.load(tmp_path / "1").get_parameter("embed.position.weight")
    assert torch.equal(shorter.embed.position.weight, table[:8])


def masked(longest: int = 8) -> DataOpener:
    return opened(source("masked-lm", longest))
