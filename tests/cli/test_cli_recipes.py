"""list, show, check, doctor, runs: what there is and what it is like."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from commands import Cli
from torch import nn

import manyformer as mf
from manyformer.analysis.own_models import tiny_keywords
from manyformer.cli.show_pages import recipe_screen
from manyformer.config import shipped_runs
from manyformer.config.published_sizes import PUBLISHED_SIZES
from manyformer.recipes import get_recipe
from manyformer.recipes.parts.cards import FAMILIES
from manyformer.recipes.parts.model_summary import ForwardCost, count_parameters, forward_cost, module_rows
from manyformer.recipes.parts.registry import build_on_meta


def test_a_piped_list_has_a_whole_line_for_each_recipe(cli: Cli) -> None:
    header, *listed = cli("list").out.splitlines()
    assert len(listed) == len(mf.recipes())
    # the families in the order of the screen, each together, and names in alphabetical order within
    families = [row.split()[2 if row.split()[1].isdecimal() else 1] for row in listed]
    assert list(dict.fromkeys(families)) == [family for family in FAMILIES if family in families]
    assert listed == sorted(listed, key=lambda row: (list(FAMILIES).index(families[listed.index(row)]), row.split()[0]))
    assert header.split() == ["recipe", "year", "family", "task", "state", "title"]
    assert {row.split()[0] for row in listed} == set(mf.recipes())
    assert all(row.endswith(mf.recipes()[row.split()[0]].card.title) for row in listed)
    records = {record["name"]: record["cost"] for record in json.loads(cli("list", "--json").out)}
    assert records == {name: recipe.card.cost for name, recipe in mf.recipes().items()}


@pytest.mark.parametrize("words", [[], ["--state", "constant"], ["--task", "language-model"]])
def test_the_list_fits_a_screen_of_eighty_columns(cli: Cli, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    rows = re.sub(r"\x1b\[\d*m", "", cli("list", *words).out).splitlines()
    assert len(rows) <= 50
    assert max(map(len, rows)) <= 80
    # names are never broken: each is found whole between spaces and commas
    found = {word.strip(",") for row in rows for word in row.split()}
    records = json.loads(cli("list", *words, "--json").out)
    assert len(records) > 20
    assert {record["name"] for record in records} <= found


def test_list_can_be_narrowed(cli: Cli) -> None:
    def names(*words: str) -> list[str]:
        return [record["name"] for record in json.loads(cli("list", *words, "--json").out)]

    masked = [name for name, recipe in mf.recipes().items() if recipe.card.task.name == "masked-lm"]
    assert "bert" in names("--task", "masked-lm") == masked
    assert "transformer-lm" in names("*-lm") == [name for name in mf.recipes() if name.endswith("-lm")]
    assert {"gat", "graphormer"} < set(names("--family", "graph"))
    assert {"mamba", "rwkv-7", "longformer-lm"} < set(names("--state", "constant"))
    assert "llama" in names("--state", "grows")
    assert set(names("--year", "2024-", "--family", "experts")) == {"deepseek", "gpt-oss", "mixtral"}
    assert names("--year", "2015") == ["bahdanau"]
    # words of summaries are found, too, and the name of a published size finds its recipe
    assert "fnet" in names("fourier")
    assert names("gpt2-xl") == ["transformer-lm"]
    assert set(names()) == set(mf.recipes())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--family", "linaer"], "there is no family 'linaer'; did you mean linear"),
        (["--state", "fixed"], "--state (fixed) must be constant or grows"),
        (["--year", "soon"], "--year (soon) must be a year or years, such as 2021, 2020-2022 or 2024-"),
        (["--year", "1990"], "no recipe matches --year 1990; leave one of them out"),
        (["zzz", "--task", "translation"], "no recipe matches 'zzz' --task translation; "),
    ],
)
def test_a_list_without_matches_says_what_to_change(cli: Cli, words: list[str], sentence: str) -> None:
    ended = cli("list", *words)
    assert ended.code == 2
    assert sentence in ended.err


@pytest.mark.thinned(6)
@pytest.mark.parametrize("name", sorted(mf.recipes()))
def test_show_tells_all_of_a_recipe(cli: Cli, name: str) -> None:
    card = mf.recipes()[name].card
    small = tiny_keywords(name)
    words = [f"{word}={json.dumps(value)}" for word, value in small.items()]
    out = cli("show", name, *words, "--length", "16", "--all").out
    for what in (card.title, card.paper, card.summary, card.cost, *card.reasons.values()):
        assert what in out
    model = mf.build(name, **small)
    parameters = sum(p.numel() for p in model.parameters())
    assert f"{parameters:,}" in out
    assert sum(part.parameters for part in module_rows(model) if part.level == 0) == parameters
    assert count_parameters(build_on_meta(name, {})) > parameters


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", sorted({*mf.recipes(), *PUBLISHED_SIZES}))
def test_a_recipe_is_shown_within_a_screen(name: str) -> None:
    recipe = get_recipe(name)
    model = build_on_meta(name, {})
    # what it costs takes long for models that depend on the tokens, and has five lines for every model
    cost = ForwardCost(length=512, flops=10**12, state_bytes=10**6, bytes_per_token=10**3)
    lines = "\n".join(str(block) for block in recipe_screen(recipe, model, cost, 80)).splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 80
    # words are whole: of two lines of the summary none is a part of one
    summary = lines[next(number for number, line in enumerate(lines) if line.startswith("summary")) :][:2]
    first = summary[0].removeprefix("summary").split()
    assert first == recipe.card.summary.split()[: len(first)]


def test_show_of_a_published_size_names_its_recipe(cli: Cli) -> None:
    assert "`transformer-lm` with vocab=50257 dim=768 depth=12" in cli("show", "gpt2").out


def test_the_paper_s_base_model_is_as_large_as_published(cli: Cli) -> None:
    record = json.loads(cli("show", "transformer", "--json").out)
    assert record["parameters"] == 63_082_496
    assert sum(part["parameters"] for part in record["modules"] if part["level"] == 0) == record["parameters"]
    record = json.loads(cli("show", "transformer", "depth=1", "--dim", "64", "--json").out)
    assert {word["name"]: word["value"] for word in record["keywords"]}["dim"] == 64


def test_show_reads_a_trained_run(cli: Cli, text_run: Path) -> None:
    ended = cli("show", str(text_run), "--json")
    assert json.loads(ended.out)["parameters"] == count_parameters(mf.load(text_run))


def test_equal_layers_are_listed_once_and_shared_weights_counted_once() -> None:
    shared = nn.Linear(3, 3)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "c": shared})
    actual = module_rows(model)
    assert [(p.name, p.times, p.parameters) for p in actual] == [
        ("a", 1, 12),
        ("b", 1, 12),
        ("0..1", 2, 12),
        ("c", 1, 0),
    ]
    assert actual[-1].note == "the same as a"


def test_cost_is_what_can_be_counted_by_hand() -> None:
    dim, length, vocab, depth = 32, 64, 11, 2
    model = build_on_meta(
        "transformer-lm", {"vocab": vocab, "dim": dim, "depth": depth, "heads": 2, "max_length": length}
    )
    actual = forward_cost(model, length)
    projections = 2 * length * depth * 12 * dim * dim
    attention = depth * 2 * 2 * length * length * dim
    assert actual.flops == projections + attention + 2 * length * dim * vocab
    assert actual.bytes_per_token is not None
    # keys and values in float32, and where each token is: two int64 a layer
    assert actual.bytes_per_token == depth * (2 * dim * 4 + 16)


@pytest.mark.slow
def test_a_sketch_costs_what_the_model_does() -> None:
    keywords = {"vocab": 50, "dim": 192, "depth": 1, "heads": 2}
    for name, recipe in mf.recipes().items():
        given = {word: value for word, value in keywords.items() if word in recipe.signature.parameters}
        model = mf.build(name, **given)
        if any(getattr(part, "content_based", False) for part in model.modules()):
            # other weights, other pairs
            assert forward_cost(build_on_meta(name, given), 16) == forward_cost(build_on_meta(name, given), 16)
        else:
            assert forward_cost(build_on_meta(name, given), 16) == forward_cost(model, 16)


def test_cost_refuses_a_length_that_the_model_does_not_allow(cli: Cli) -> None:
    ended = cli("show", "bert", "--length", "513")
    assert ended.code == 2
    assert "max_length=512" in ended.err


def test_check_is_a_table_and_json(cli: Cli) -> None:
    words = ("check", "transformer-lm", "depth=1", "--only", "causal,saving", "--length", "16")
    ended = cli(*words)
    assert ended.code == 0
    assert "2 passed" in ended.out
    record = json.loads(cli(*words, "--json").out)
    assert record["ok"]
    assert [row["contract"] for row in record["rows"]] == ["causal", "saving"]


def test_a_broken_promise_is_exit_code_1(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = nn.functional.scaled_dot_product_attention

    def leaking(*args: torch.Tensor, is_causal: bool = False, **settings: object) -> torch.Tensor:
        return forward(*args)

    monkeypatch.setattr("manyformer.nn.ops.softmax_attention.F.scaled_dot_product_attention", leaking)
    ended = cli("check", "transformer-lm", "--only", "causal", "--length", "16")
    assert ended.code == 1
    assert "failed" in ended.out


def test_the_doctor_finds_what_is_there(cli: Cli) -> None:
    ended = cli("doctor", "--json")
    assert ended.code == 0, ended
    actual = {finding["subject"]: finding for finding in json.loads(ended.out)}
    assert torch.__version__ in actual["torch"]["result"]
    assert actual["SDPA"]["state"] == actual["FlexAttention"]["state"] == "ok"


def test_the_doctor_says_why_it_no_longer_tunes(cli: Cli) -> None:
    ended = cli("doctor", "--tune")
    assert ended.code == 2
    assert "--tune is gone: " in ended.err
    assert "no run recorded" in ended.err
    assert "--tune" not in cli("doctor", "--help").out


def test_the_doctor_verifies_a_folder(cli: Cli, tmp_path: Path) -> None:
    model = tmp_path / "run/model"
    mf.build("transformer-lm", vocab=11, dim=8, depth=1, heads=2).save(model)
    assert cli("doctor", str(tmp_path / "run")).code == 0
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    ended = cli("doctor", str(tmp_path / "run"))
    assert ended.code == 1
    assert "model.safetensors is damaged" in " ".join(ended.out.split())
    assert cli("doctor", str(tmp_path / "empty")).code == 2


def test_the_doctor_gives_the_pip_line_of_an_extra(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ended = cli("doctor")
    assert "pip install 'manyformer[hf]'" in ended.out
    assert ended.code == 0


@pytest.mark.slow
def test_a_broken_machine_is_exit_code_1(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", "1.0.0")
    ended = cli("doctor")
    assert ended.code == 1
    assert "2.10 or newer is needed" in ended.out


def test_a_newer_torch_is_called_untested_and_not_broken(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", "3.1.0a0+git1234")
    ended = cli("doctor", "--json")
    assert ended.code == 0, ended
    torch_finding = next(finding for finding in json.loads(ended.out) if finding["subject"] == "torch")
    assert torch_finding["state"] == "ok"
    assert "3.1.0a0+git1234, not tested with this version" in torch_finding["result"]


def test_runs_are_listed_shown_and_copied(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    records = json.loads(cli("runs", "list", "--json").out)
    assert [record["name"] for record in records] == list(shipped_runs())
    assert all(record["about"] and record["recipe"] in mf.recipes() for record in records)
    listed = cli("runs").out
    assert all(record["name"] in listed for record in records)
    shown = cli("runs", "show", "lm/stdlib").out
    assert shown.startswith("# ")
    assert cli("runs", "copy", "lm/stdlib").code == 0
    assert (tmp_path / "stdlib.yaml").read_text() == shown
    again = cli("runs", "copy", "lm/stdlib")
    assert again.code == 2
    assert "--force" in again.err
    assert cli("runs", "copy", "lm/stdlib", "--force").code == 0
    assert cli("runs", "copy", "lm/stdlib", "mine.txt").code == 2
    dry = yaml.safe_load(cli("train", "stdlib.yaml", "--print-config").out)
    assert dry["out"] == "runs/stdlib"


def test_the_schema_knows_every_section(cli: Cli) -> None:
    schema = json.loads(cli("runs", "schema").out)
    assert {"recipe", "model", "data", "optim", "extends"} <= set(schema["properties"])


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", shipped_runs())
def test_every_shipped_run_is_valid_and_makes_a_model(cli: Cli, name: str) -> None:
    ended = cli("train", name, "--dry-run")
    # the data of some is the user's
    assert ended.code == 0 or "there is no such" in ended.err, ended.err
    assert yaml.safe_load(ended.out)["out"] == f"runs/{name.replace('/', '-')}"
    assert "parameters" in ended.out


def test_properties_of_a_recipe_and_of_a_run(cli: Cli, text_run: Path) -> None:
    ended = cli("show", "transformer", "--properties")
    assert ended.code == 0, ended.err
    assert "tiny sizes, random weights" in ended.out
    assert "encoder.0.attention" in ended.out
    assert "they depend on the order" in ended.out
    actual = json.loads(cli("show", "compose", "--kernel", "rfa", "--properties", "--json").out)
    assert {one["kernel"] for one in actual["layers"]} == {"LinearKernel"}
    assert not all(one["in_convex_hull"] for one in actual["layers"])
    trained = cli("show", str(text_run), "--properties", "--length", "8")
    assert "trained weights, 8 random tokens" in trained.out
    for words, message in (
        (("show", "bahdanau", "--properties"), "no kernel computes the attention of bahdanau"),
        (("show", "transformer", "--properties", "--pattern"), "either --pattern or --properties"),
        (("show", str(text_run), "depth=2", "--properties"), "leave the keywords out"),
    ):
        assert message in cli(*words).err


def test_advice_begins_with_three_candidates_and_says_what_they_rest_on(cli: Cli) -> None:
    lines = cli("advise", "--length", "2000").out.splitlines()
    assert lines[0] == "for all tasks of the suite, 2,000 tokens, on a CPU:"
    assert lines[1].startswith("1. ")
    assert any(line.startswith("note: measured: ") for line in lines)
    assert [line[:2] for line in lines if line[:1].isdecimal() and line[1:2] == "."] == ["1.", "2.", "3."]
    assert len(lines) <= 50
    assert max(map(len, lines)) <= 80
    # all rows that it chose among
    assert len(cli("advise", "--length", "2000", "--all").out.splitlines()) > 200
    found = json.loads(cli("advise", "--length", "2000", "--json").out)
    best = {row["case"] for row in found["rows"] if row["is_best"]}
    assert {candidate["row"]["case"] for candidate in found["candidates"]} <= best


@pytest.mark.parametrize("task", ["image-generation", "tagging"])
def test_advice_for_an_unmeasured_task_says_that_nothing_was_measured(cli: Cli, task: str) -> None:
    out = " ".join(cli("choose", "--length", "2000", "--task", task).out.split())
    assert f"no score was measured for {task}" in out
    found = json.loads(cli("advise", "--length", "2000", "--task", task, "--json").out)
    assert {mf.recipes()[one["recipe"]].card.task.name for one in found["candidates"]} == {task}


def test_a_person_is_asked_for_what_is_not_given(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["translation", "60", "h100", "20M", "", "3"])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda: next(answers))
    ended = cli("advise")
    heading = "for translation, 60 tokens, at most 20,000,000 parameters, 3 minutes, on one h100 of 80 GB:"
    assert " ".join(ended.out.split()).startswith(heading)
    assert ended.err.count("?") == 6


def test_advice_without_a_length_asks_for_one(cli: Cli) -> None:
    ended = cli("advise")
    assert ended.code == 2
    assert "advise needs --length" in ended.err
