"""Run files: every mistake at its line and column, YAML's traps, inheritance, shipped runs."""

import os
import sys
from pathlib import Path

import pytest
from stand_in_recipes import load, refused

from manyformer.base.errors import UserErrors
from manyformer.config import RecipeLookup, TextData, load_run, run_description, shipped_runs
from manyformer.config.run_file import resolve_scalar


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(text: str | bytes, name: str = "run.yaml") -> str:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return name


def test_seven_mistakes_in_one_report() -> None:
    file = write(
        """\
recipe: lm
model:
  d_modle: 64
  heads: seven
  norm_order: prre
optim: {lr: -1, learning_rate: 3}
data:
  kind: text
  packing: document
  betas: [1, 2]
"""
    )
    assert refused(file) == [
        "run.yaml:3:3: model.d_modle: no such setting; did you mean model.dim?",
        "run.yaml:4:3: model.heads: must be a whole number, got 'seven'",
        "run.yaml:5:3: model.norm_order: 'prre' is not one of pre, post, sandwich; did you mean pre?",
        "run.yaml:6:9: optim.lr: must be greater than 0, got -1",
        "run.yaml:6:17: optim.learning_rate: no such setting; did you mean optim.lr?",
        "run.yaml:9:3: data.packing: 'document' is not one of documents, concat, random, contiguous; "
        "did you mean documents?",
        "run.yaml:10:3: data.betas: no such setting; did you mean optim.betas?",
    ]


def test_mistakes_of_a_file_and_of_the_command_line_together() -> None:
    file = write("recipe: lm\nsede: 1\n")
    assert refused(file, "depth=four", "--limits.step", "3") == [
        "run.yaml:2:1: sede: no such setting; did you mean seed?",
        "--depth four: model.depth: must be a whole number >= 1, got 'four'",
        "--limits.step 3: no such setting; did you mean limits.steps?",
    ]


def test_conflicts_are_found_beside_other_mistakes() -> None:
    file = write("recipe: lm\nseed: x\nsave:\n  average_last: 5\nlimits: {}\nschedule:\n  warmup: 7\n  steps: 7\n")
    lines = refused(file)
    assert [line.split(": ")[0] for line in lines] == ["run.yaml:2:1", "run.yaml:4:3", "run.yaml:5:1", "run.yaml:7:3"]


def test_a_conflict_with_a_broken_setting_is_not_reported() -> None:
    file = write(
        "recipe: lm\nsave: {average_last: 5, keep_last: five}\nlimits: {steps: many}\nschedule: {warmup: 3000}\n"
    )
    assert refused(file) == [
        "run.yaml:2:25: save.keep_last: must be a whole number, got 'five'",
        "run.yaml:3:10: limits.steps: must be a whole number, got 'many'",
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("optim: {name: rprop}", "run.yaml:2:9: optim.name: 'rprop' is not one of adamw, adam"),
        (
            "optim: {name: adamm}",
            "run.yaml:2:9: optim.name: 'adamm' is not one of adamw, adam, adagrad, adadelta, muon, sgd, lion, "
            "adafactor; did you mean ",
        ),
        (
            "optim: {name: adam, eps: 1e-9, decay: 1}",
            "run.yaml:2:32: optim.decay: no such setting; did you mean optim.layer_decay?",
        ),
        (
            "schedule: noam",
            "run.yaml:2:1: schedule: must be a mapping of settings, got 'noam'; did you mean schedule.n",
        ),
        (
            "data: corpus.txt",
            "run.yaml:2:1: data: must be a mapping of settings, got 'corpus.txt'; did you mean data.p",
        ),
        ("loss: 0.1", "run.yaml:2:1: loss: must be a mapping of settings, got 0.1"),
        ("model: [1]", "run.yaml:2:1: model: must be a mapping of settings, got [1]"),
        ("lr: 0.1", "run.yaml:2:1: lr: no such setting; did you mean optim.lr?"),
        ("steps: 5", "run.yaml:2:1: steps: no such setting; did you mean limits.steps?"),
        ("depth: 3", "run.yaml:2:1: depth: no such setting; did you mean model.depth?"),
        ("every: 3", "run.yaml:2:1: every: no such setting; did you mean evaluate.every or save.every or log.every?"),
        ("batch_size: 3", "run.yaml:2:1: batch_size: no such setting; did you mean batch.tokens?"),
        ("optimizer: {lr: 1}", "run.yaml:2:1: optimizer: no such setting; did you mean optim?"),
        ("modle: {depth: 1}", "run.yaml:2:1: modle: no such setting; did you mean model?"),
        ("out: 3", "run.yaml:2:1: out: must be text, got 3; for text write '3'"),
        (
            "trackers: [tensorbord]",
            "run.yaml:2:12: trackers: 'tensorbord' is not one of tensorboard, wandb, mlflow; did you mean tensorboard?",
        ),
        ("compile: true", "run.yaml:2:1: compile: true is not one of auto, on, off"),
        (
            "data: {kind: labels}",
            "run.yaml:2:8: data.kind: lm (language-model) learns from text or synthetic or images, not from labels",
        ),
        ('data: {kind: "\\ud800"}', "run.yaml:2:8: data.kind: '\\ud800' is not one of text, pairs, labels"),
        ("model: {ff_dim: big}", "run.yaml:2:9: model.ff_dim: must be a whole number or null, got 'big'"),
        ("model: {widths: [1, x]}", "run.yaml:2:9: model.widths: must be a list of a whole number, got [1, 'x']"),
        ("model: {tied: 1}", "run.yaml:2:9: model.tied: must be true or false, got 1"),
        ("model: {dropout: .inf}", "run.yaml:2:9: model.dropout: must be a number, got inf"),
        ("model: {norm_order: 3}", "run.yaml:2:9: model.norm_order: 3 is not one of pre, post, sandwich"),
    ],
)
def test_one_mistake_one_sentence(text: str, line: str) -> None:
    actual = refused(write(f"recipe: lm\n{text}\n"))
    assert actual[0].startswith(line), actual


def test_what_is_missing_is_asked_for() -> None:
    assert refused(write("seed: 1\n")) == [
        "run.yaml:1:1: recipe: is missing; it is the architecture: a name from `manyformer list`"
    ]
    assert refused(write("recipe: classifier\ndata:\n  kind: labels\n"))[0].startswith(
        "run.yaml:2:1: data.path: is missing; it is a TSV, CSV or JSONL file"
    )
    assert refused("classifier")[0].startswith("data.path: is missing; ")


def test_an_unknown_recipe_is_told_with_the_other_mistakes() -> None:
    assert refused(write("recipe: brt\nseed: x\nmodel: {depth: 3}\n")) == [
        "run.yaml:1:1: recipe: there is no recipe 'brt'; did you mean bert?",
        "run.yaml:2:1: seed: must be a whole number, got 'x'",
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "run.yaml:1:1: is empty; a run file names at least a recipe, as `recipe: transformer-lm`"),
        ("# nothing\n---\n", "run.yaml:1:1: is empty;"),
        ("- recipe\n- lm\n", "run.yaml:1:1: must be a mapping of settings, such as `recipe: transformer-lm`, not ["),
        ("just words\n", "run.yaml:1:1: must be a mapping of settings"),
        ("recipe: lm\nmodel:\n\tdepth: 4\n", "run.yaml:3:1: a tab stands here; YAML is indented with spaces"),
        ("recipe: lm\nmodel:\n  dim: 4\n depth: 4\n", "run.yaml:4:2: does not line up"),
        ("recipe: lm\nseed 3\nout: x\n", "run.yaml:2:1: a colon is missing after this name"),
        ("recipe: lm: x\n", "run.yaml:1:11: this colon does not fit"),
        ("recipe: lm\nmodel: {depth: 4\nseed: 1\n", "run.yaml:2:8: this mapping is not closed with }"),
        ("recipe: lm\ntrack: [tensorboard\nseed: 1\n", "run.yaml:2:8: this list is not closed with ]"),
        ("recipe: 'lm\n", "run.yaml:1:9: this quotation mark is not closed"),
        ("recipe: @lm\n", "run.yaml:1:9: text that begins with this sign must be quoted"),
        ("recipe: lm\nseed: 1\nseed: 2\n", "run.yaml:3:1: seed: is given twice, first in line 2"),
        ("recipe: lm\nmodel: {dim: 1, dim: 2}\n", "run.yaml:2:17: model.dim: is given twice, first in line 2"),
        ("recipe: lm\n1: 2\n", "run.yaml:2:1: a setting's name must be text, not 1"),
        ("recipe: lm\n---\nseed: 2\n", "run.yaml:2:1: a second document starts here"),
        ("recipe: lm\nmodel: &m {dim: 4}\noptim: *m\n", "run.yaml:3:8: optim: *m refers to another place"),
        (
            "recipe: !!python/name:os.system ''\n",
            "run.yaml:1:9: recipe: the tag tag:yaml.org,2002:python/name:os.system",
        ),
        ("recipe: lm\nout: \x07\n", "run.yaml:2:6: holds a character that does not belong into text (U+0007)"),
        (b"recipe: lm\nout: caf\xe9\n", "run.yaml:2:9: is not UTF-8: byte 0xe9 at offset 19; save the file as UTF-8"),
        ("recipe: lm\n".encode("utf-16"), "run.yaml:1:1: is not UTF-8: byte 0xff at offset 0"),
        ("model: " + "[" * 200 + "]" * 200, "run.yaml:1:1: is nested too deeply"),
        (b"x" * (2 << 20), "run.yaml: is too large for a run file"),
    ],
)
def test_broken_files_get_a_sentence_with_a_place(text: str | bytes, line: str) -> None:
    actual = refused(write(text))
    assert actual[0].startswith(line), actual
    assert len(actual) == 1, "one cause, one line"


def test_a_byte_order_mark_and_windows_lines_are_no_mistake() -> None:
    assert load(write(b"\xef\xbb\xbfrecipe: lm\r\nseed: 4\r\n")).seed == 4


def test_a_section_whose_settings_are_all_commented_out_is_empty() -> None:
    assert load(write("recipe: lm\noptim:\n  # lr: 3\nmodel:\n")).optim.lr == 1e-3


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("1e-3", 1e-3), ("1_000", 1000), ("0x10", 16), ("007", 7), ("-.5", -0.5), ("+3", 3), ("1.", 1.0),
        ("null", None), ("~", None), ("", None), ("True", True), ("FALSE", False), ("tRue", "tRue"),
        ("on", "on"), ("no", "no"),
        ("12:30", "12:30"), ("2024-01-01", "2024-01-01"), ("1e", "1e"), (".", "."), ("-", "-"), ("_1", "_1"),
        ("nan", "nan"), (".inf", float("inf")),
    ],
)  # fmt: skip
def test_plain_words_are_read_as_people_mean_them(word: str, value: object) -> None:
    actual = resolve_scalar(word)
    assert actual == value
    assert type(actual) is type(value)


def test_extends_lays_a_file_over_another() -> None:
    write("recipe: lm\nmodel: {depth: 3, dim: 8}\noptim: {lr: 0.5, max_grad_norm: 2.0}\nseed: 9\n", "bases/base.yaml")
    write("extends: base.yaml\nmodel: {depth: 5}\n", "bases/middle.yaml")
    run = load(write("extends: bases/middle.yaml\noptim: {lr: 0.25}\n", "top.yaml"))
    assert run.model == {"depth": 5, "dim": 8}
    assert (run.optim.lr, run.optim.max_grad_norm, run.seed, run.out) == (0.25, 2.0, 9, "runs/top")


def test_another_optimiser_starts_from_its_own_defaults() -> None:
    write("recipe: lm\noptim: {lr: 0.5, weight_decay: 0.3}\n", "base.yaml")
    run = load(write("extends: base.yaml\noptim: {name: adam}\n"))
    assert (run.optim.name, run.optim.lr, run.optim.eps) == ("adam", 1e-3, 1e-9)
    kept = load(write("extends: base.yaml\noptim: {name: adamw}\n"))
    assert kept.optim.lr == 0.5


def test_mistakes_are_told_in_the_file_where_they_are() -> None:
    write("recipe: lm\nmodel:\n  dpeth: 3\nseed: 1\n", "base.yaml")
    assert refused(write("extends: base.yaml\nseed: x\n", "top.yaml")) == [
        "base.yaml:3:3: model.dpeth: no such setting; did you mean model.depth?",
        "top.yaml:2:1: seed: must be a whole number, got 'x'",
    ]


def test_extends_that_leads_nowhere() -> None:
    write("extends: b.yaml\n", "a.yaml")
    assert refused(write("extends: a.yaml\n", "b.yaml")) == ["a.yaml:1:1: extends: b.yaml extends this file in turn"]
    assert (
        refused(write("seed: 1\nextends: a.yml\n", "c.yaml"))
        == ["c.yaml:2:1: extends: there is no shipped run and no file 'a.yml'; did you mean a.yaml?"]
        or "did you mean a.yaml" in refused("c.yaml")[0]
    )
    assert refused(write("extends: [a]\nrecipe: lm\n", "d.yaml"))[0].startswith("d.yaml:1:1: extends: must be the name")


def test_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyformer.config.shipped.FOLDER", tmp_path / "experiments")
    write("# Bytes of the\n# standard library.\nrecipe: lm\nseed: 5\n", "experiments/lm/stdlib.yaml")
    write("extends: lm/stdlib\n", "mine.yaml")
    write("recipe: lm\nseed: 6\nout: elsewhere\n", "runs/x/run.yaml")
    assert list(shipped_runs()) == ["lm/stdlib"]
    assert run_description(shipped_runs()["lm/stdlib"]) == "Bytes of the standard library."
    assert (load("lm/stdlib").seed, load("lm/stdlib").out) == (5, "runs/lm-stdlib")
    assert (load("mine.yaml").seed, load("mine.yaml").out) == (5, "runs/mine")
    assert (load("runs/x").seed, load("runs/x").out) == (6, "elsewhere")
    assert (load("lm").seed, load("lm").out) == (0, "runs/lm")
    assert refused("lm/stdlb") == ["there is no run file, shipped run or recipe 'lm/stdlb'; did you mean lm/stdlib?"]
    assert refused("bret") == ["there is no run file, shipped run or recipe 'bret'; did you mean bert?"]
    assert refused("mien.yaml") == ["mien.yaml: there is no such run file; did you mean mine.yaml?"]


def test_a_file_with_a_recipes_name_is_not_in_its_way() -> None:
    write("recipe: bert\nseed: 8\n", "lm")
    assert (load("lm").recipe, load("lm").seed) == ("lm", 0)
    assert load("./lm").seed == load(str(Path("lm").resolve())).seed == 8
    write("recipe: bert\nseed: 8\n", "no-recipe")
    assert load("no-recipe").seed == 8


def test_a_recipe_learns_from_the_data_of_its_task() -> None:
    assert load("lm").data.kind == load("bert").data.kind == "text"
    assert load("seq2seq").data.kind == "pairs"
    run = load("classifier", "data.path=x.tsv")
    assert (run.data.kind, run.data.path) == ("labels", "x.tsv")
    assert refused("seq2seq", "data.kind=text") == [
        "--data.kind text: seq2seq (translation) learns from pairs, not from text"
    ]


def test_checkpoints_are_ranked_by_a_metric_of_the_task() -> None:
    assert load("lm", "evaluate.metric=accuracy").evaluate.metric == "accuracy"
    assert refused("lm", "evaluate.metric=f1") == [
        "--evaluate.metric f1: lm (language-model) is ranked by loss or accuracy, not by 'f1'"
    ]


def test_noam_needs_a_width() -> None:
    assert load("lm", "schedule.name=noam").warmup == 200
    assert refused("fourier", "schedule.name=noam") == [
        "--schedule.name noam: schedule.width: is needed: noam's rate follows the model's dim, "
        "and fourier has no such keyword"
    ]
    assert load("fourier", "schedule.name=noam", "schedule.width=64").recipe == "fourier"


def test_without_tasks_the_data_is_text(tmp_path: Path) -> None:
    from stand_in_recipes import signature_of

    assert isinstance(load_run("seq2seq", recipes=RecipeLookup(signature_of)).data, TextData)
    with pytest.raises(UserErrors, match="no recipe 'nothing'"):
        load_run("nothing", recipes=RecipeLookup(signature_of))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('recipe: "\\UFFFFFFFF"', "holds an escape, such as .UFFFFFFFF, that is no character"),
        ("a: " + "[" * 100_000, "is nested too deeply"),
        ("{" * 100_000, "is nested too deeply"),
        ("\n".join(f"k{number}: 1" for number in range(60_000)), "has more than 300 settings in one section"),
        ("model:\n" + "\n".join(f"  k{number}: 1" for number in range(60_000)), "has more than 300 settings"),
        ("x" * 1000 + ": 1", "has a setting whose name has more than 300 letters"),
        ("recipe: lm\nseed: 1" + "0" * 23, "seed: must be at most 9223372036854775807, got 1000"),
        ("recipe: lm\nseed: 1e23", r"seed: must be at most 9223372036854775807, got 1e\+23"),
        ("recipe: lm\ndata: {tokenizer: bpe, vocab: 1e9}", "data.vocab: must be at most 1000000, got 1000"),
        ("recipe: 5", "recipe: must be text, got 5"),
    ],
)
def test_a_hostile_run_file_gives_one_sentence(text: str, message: str) -> None:
    with pytest.raises(UserErrors, match=message):
        load(write(text))


def test_of_very_many_errors_the_first_are_told_and_the_others_counted() -> None:
    file = write("recipe: lm\n" + "recipe: lm\n" * 20_000)
    with pytest.raises(UserErrors) as errors:
        load(file)
    lines = str(errors.value).splitlines()
    assert len(lines) == 21
    assert lines[0].endswith("run.yaml:2:1: recipe: is given twice, first in line 1")
    assert lines[-1] == "and 19,980 more errors"


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/zero")
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_run_file_that_is_none_is_refused_unread(kind: str) -> None:
    path = Path("run.yaml")
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(UserErrors, match=f"run.yaml: this is a {kind}.*; give a run file"):
        load(str(path))
