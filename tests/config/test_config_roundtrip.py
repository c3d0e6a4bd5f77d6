"""A stored run reads back equal, whatever it holds, here and by PyYAML; and what changed between two runs."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stand_in_recipes import TASKS, load, signature_of

from manyformer.base.keyword_checks import MAX_KEYWORD
from manyformer.config import FREE_ON_RESUME, RUN_FILE, RecipeLookup, RunConfig, differences, dump_run, load_run

text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
paths = text | st.sampled_from(
    ["-", "on", "1e-3", "007", "~", "null", "0x1", "12:30", " x", "a: b", "# a", "'", "\ufeff"]
)
positive = st.integers(1, 10**12)
size = st.integers(1, MAX_KEYWORD)
rate = st.floats(min_value=0, exclude_min=True, allow_nan=False, allow_infinity=False)
share = st.floats(0, 1, exclude_max=True)
fraction = st.floats(0, 1, exclude_min=True, exclude_max=True)


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Any of the settings, or none."""
    return st.fixed_dictionaries({}, optional=fields)


def tagged(tag: str, word: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return some(**fields).map(lambda given: {tag: word, **given})


def with_tokens(kind: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    tokens = some(tokenizer=st.sampled_from(["char", "byte"])) | st.fixed_dictionaries(
        {"tokenizer": st.just("bpe"), "vocab": st.integers(1, 10**6) | st.none()}
    )
    return st.tuples(tagged("kind", kind, **fields), tokens).map(lambda both: both[0] | both[1])


data = {
    "text": with_tokens(
        "text",
        path=paths | st.lists(paths, min_size=1),
        length=positive,
        packing=st.sampled_from(["documents", "concat", "random", "contiguous"]),
        valid=fraction | paths,
        test=st.none() | paths,
        column=st.none() | paths,
        masking=fraction,
    ),
    "pairs": with_tokens(
        "pairs",
        path=paths | st.lists(paths, min_size=2, max_size=2),
        valid=fraction | paths | st.lists(paths, min_size=2, max_size=2),
        source=st.none() | st.integers(0, 9) | paths,
        shared=st.booleans(),
    ),
    "labels": with_tokens("labels", label=st.none() | st.integers(0, 9) | paths, max_length=positive).flatmap(
        lambda given: paths.map(lambda path: {**given, "path": path})
    ),
    "images": tagged(
        "kind",
        "images",
        valid=fraction | paths,
        test=st.none() | paths,
        size=st.none() | st.integers(1, 8192),
        channels=st.sampled_from([None, 1, 3]),
        levels=st.integers(2, 256),
    ).flatmap(lambda given: paths.map(lambda path: {**given, "path": path})),
    "synthetic": tagged(
        "kind", "synthetic", symbols=st.integers(4, 99), length=positive, context=share, valid=positive
    ),
}
betas = st.tuples(share, share).map(list)
adams = tagged("name", "adam", betas=betas, eps=rate, max_grad_norm=st.none() | rate)
adamws = tagged("name", "adamw", betas=betas, eps=rate, weight_decay=rate)
learning = st.one_of(
    st.fixed_dictionaries(
        {"optim": adams | adamws, "schedule": tagged("name", "noam", warmup=st.integers(1, 9), scale=rate)}
    ),
    st.fixed_dictionaries(
        {
            "optim": st.tuples(adams | adamws, rate).map(lambda both: {**both[0], "lr": both[1]}),
            "schedule": tagged("name", "cosine", warmup=st.none() | st.integers(0, 9), final_ratio=share)
            | tagged("name", "constant")
            | tagged(
                "name", "wsd", decay_share=fraction, shape=st.sampled_from(["linear", "1-sqrt"]), final_ratio=share
            ),
        }
    ),
)
keywords = some(
    dim=size, ff_dim=st.none() | size, dropout=share, tied=st.booleans(),
    norm_order=st.sampled_from(["pre", "post"]), widths=st.lists(positive),
)  # fmt: skip
rest = some(
    loss=some(label_smoothing=share),
    batch=some(tokens=positive, accumulate=positive),
    limits=st.fixed_dictionaries({"steps": st.integers(10, 10**15)}, optional={"minutes": rate, "epochs": rate}),
    evaluate=some(every=positive, patience=st.none() | positive, metric=st.sampled_from(["loss", "accuracy"])),
    save=some(every=positive, keep_last=st.integers(3, 9)),
    trackers=st.sampled_from([[], ["tensorboard"]]),
    precision=st.sampled_from(["auto", "float32", "bfloat16"]),
    compile=st.sampled_from(["auto", "on", "layers", "off"]),
    activation_checkpointing=st.booleans() | st.integers(1, 9) | st.lists(st.integers(1, 9), min_size=1),
    deterministic=st.booleans(),
    tf32=st.sampled_from(["auto", "on", "off"]),
    ema=some(beta=share, warmup=st.just(value=True)),
    seed=st.integers(0, 2**63 - 1),
    devices=st.integers(1, 8),
)


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    recipe = draw(st.sampled_from(["lm", "seq2seq", "bert", "classifier"]))
    given = {"recipe": recipe, "model": draw(keywords), "out": draw(text), **draw(learning), **draw(rest)}
    return {**given, "data": draw(st.one_of([data[kind] for kind in TASKS[recipe].data_forms]))}


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(runs())
def test_any_valid_run_reads_back_equal(tmp_path_factory: pytest.TempPathFactory, given: dict[str, Any]) -> None:
    run = RunConfig.model_validate(given)
    dumped = dump_run(run)
    path = tmp_path_factory.getbasetemp() / RUN_FILE
    path.write_text(dumped, encoding="utf-8", newline="")
    again = load(path)
    assert again == run
    assert dump_run(again) == dumped
    assert differences(run, again) == []
    # PyYAML reads YAML 1.1, as many other programs do: to them too the file says the same.
    assert yaml.safe_load(dumped) == run.model_dump(mode="json", by_alias=True)


def test_the_merged_file_does_not_need_the_file_that_it_came_from(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text("recipe: lm\nmodel: {depth: 3}\n")
    top = tmp_path / "top.yaml"
    top.write_text("extends: base.yaml\noptim: {lr: 0.5}\n")
    run = load(top, "dim=32", "schedule.name=constant", "devices=2")
    merged = tmp_path / "elsewhere" / RUN_FILE
    merged.parent.mkdir()
    merged.write_text(dump_run(run))
    base.unlink()
    assert load(merged) == run
    assert load(merged.parent) == run
    assert "extends" not in merged.read_text()


def test_a_dump_is_for_people() -> None:
    lines = dump_run(RunConfig(recipe="lm", out="runs/lm")).splitlines()
    assert lines[0] == "recipe: lm"
    assert "  betas: [0.9, 0.98]" in lines
    assert [line for line in lines if not line.startswith(" ")][1:5] == [
        "import: []",
        "model: {}",
        "init_from: null",
        "data:",
    ]


BASE = {"recipe": "lm", "model": {"depth": 2}}


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        ({}, []),
        ({"optim": {"lr": 0.5}}, ["optim.lr: 0.001, now 0.5"]),
        ({"model": {"depth": 3}}, ["model.depth: 2, now 3"]),
        ({"model": {}}, ["model.depth: 2, now not given"]),
        ({"model": {"depth": 2, "dim": 8}}, ["model.dim: not given, now 8"]),
        ({"seed": 1, "precision": "bfloat16"}, ['precision: "auto", now "bfloat16"', "seed: 0, now 1"]),
        ({"optim": {"name": "adam"}}, ['optim.name: "adamw", now "adam"']),
        ({"data": {"valid": "v.txt"}}, ['data.valid: 0.05, now "v.txt"']),
        ({"evaluate": {"metric": "accuracy"}}, ['evaluate.metric: "loss", now "accuracy"']),
        (
            {
                "limits": {"minutes": 3}, "log": {"every": 1}, "out": "x", "evaluate": {"every": 5, "patience": 3},
                "save": {"every": 7, "average_last": 1}, "trackers": ["tensorboard"],
                "devices": 2, "activation_checkpointing": True,
            },
            [],
        ),
    ],
)  # fmt: skip
def test_what_changed_between_two_runs(change: dict[str, Any], lines: list[str]) -> None:
    assert differences(RunConfig.model_validate(BASE), RunConfig.model_validate({**BASE, **change})) == lines


def test_long_values_and_mappings_are_compared_whole() -> None:
    one, two = (RunConfig.model_validate({**BASE, "model": {"parts": {"a": "x" * 100, "b": end}}}) for end in "yz")
    assert len(differences(one, two)) == 1
    longer = [RunConfig.model_validate({**BASE, "data": {"path": "x" * 100 + end}}) for end in "yz"]
    assert len(differences(*longer)) == 1


def test_noam_scales_with_its_warm_up_so_other_limits_are_a_difference() -> None:
    short, long = (
        RunConfig.model_validate({**BASE, "schedule": {"name": "noam"}, "limits": {"steps": steps}})
        for steps in (100, 200)
    )
    assert differences(short, long) == ["schedule.warmup: 10, now 20"]


def test_every_free_setting_exists() -> None:
    from manyformer.config.setting_names import RUN_SETTINGS, SECTIONS, section_members

    names = {f"{name}.{key}" for name in SECTIONS for member in section_members(name) for key in member.model_fields}
    assert names | set(RUN_SETTINGS) >= FREE_ON_RESUME


def test_a_type_that_only_the_recipe_can_judge_passes(tmp_path: Path) -> None:
    class Opaque: ...

    def recipe(part: Opaque = Opaque(), free=3) -> None: ...  # type: ignore[no-untyped-def]  # noqa: B008

    run = load_run("odd", ["part=x", "free=[1]"], recipes=RecipeLookup(lambda name: inspect.signature(recipe)))
    assert run.model == {"part": "x", "free": [1]}
    assert signature_of("lm").parameters
