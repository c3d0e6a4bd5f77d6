"""The logic of `benchmarks/gpu.py`, rehearsed on a CPU: what it keeps, how it goes on, and what it calls a failure."""

import json
import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import gpu
from gpu_parts import attention_speed, correctness, decoding_speed, figures, fla_paths, workers
from gpu_parts.kept_results import KeptItem, KeptResults, read_results
from gpu_parts.outcome import Outcome, Setting
from gpu_parts.waves import PARTS, WAVES, Wave, all_items, names_of

import manyformer as mf
from manyformer.base.errors import UserError

REHEARSAL = Setting(torch.device("cpu"), tiny=True)


def serve_faults(connection: Connection, setting: Setting) -> None:
    """A worker that dies at the item "crash" and hangs at "hang"."""
    while name := connection.recv_bytes().decode():
        if name == "crash":
            os._exit(7)
        if name == "hang":
            time.sleep(60)
        connection.send_bytes(json.dumps(["passed", name, {}, []]).encode())


def test_a_rehearsal_runs_to_its_end_and_goes_on_where_it_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gpu.json"
    words = ["--rehearse", "--only", "correct", "half", "--out", str(out)]
    assert gpu.main([*words, "--minutes", "0"]) == gpu.INCOMPLETE
    assert "8 of 8 items are left" in capsys.readouterr().out
    assert gpu.main(words) == 0
    items = json.loads(out.read_text())["items"]
    assert len(items) == 8
    assert {item["verdict"] for item in items.values()} == {"passed"}
    assert any("sdpa" in path for path in items["correct/transformer-lm"]["paths"])
    text = out.with_suffix(".md").read_text()
    assert "A rehearsal" in text
    assert "| linear-transformer | passed |" in text
    capsys.readouterr()
    # all is kept: nothing is run again
    assert gpu.main(words) == 0
    assert " s passed" not in capsys.readouterr().out


def test_crashes_and_hangs_are_failures_and_the_next_item_goes_on() -> None:
    with workers.Workers(REHEARSAL, serve_faults) as pool:
        outcomes = {name: run_of(pool, name) for name in ("first", "crash", "second")}
        verdicts = {name: item.verdict for name, item in outcomes.items()}
        assert verdicts == {"first": "passed", "crash": "failed", "second": "passed"}
        assert "exit code 7" in outcomes["crash"].sentence
        assert pool.run("hang", 0.5) is None
        assert run_of(pool, "third").verdict == "passed"


def run_of(pool: workers.Workers, name: str) -> KeptItem:
    item = pool.run(name, 20.0)
    assert item is not None
    return item


def test_an_item_cut_by_the_end_of_its_wave_is_left_and_one_that_hangs_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "Workers", lambda setting: workers.Workers(setting, serve_faults))
    wave = Wave("faults", (), 1, item_seconds=0.5)
    results = KeptResults(tmp_path / "gpu.json", REHEARSAL)
    gpu.run_wave(REHEARSAL, wave, results, ["first", "hang", "second"], time.monotonic() + 20)
    assert [item.verdict for item in results.items.values()] == ["passed", "failed", "passed"]
    assert results.items["hang"].sentence == "not finished after 0 s"
    left = KeptResults(tmp_path / "left.json", REHEARSAL)
    gpu.run_wave(REHEARSAL, wave._replace(item_seconds=20.0), left, ["first", "hang"], time.monotonic() + 1)
    assert list(left.items) == ["first"]


def test_no_part_is_in_no_wave_and_none_in_two() -> None:
    parts = [part for wave in WAVES.values() for part in wave.parts]
    assert sorted(parts) == sorted(PARTS)
    names = [name for wave in WAVES.values() for name in names_of(wave, REHEARSAL)]
    assert names == list(dict.fromkeys(names))
    assert set(names) == set(all_items(REHEARSAL))


def test_results_of_two_machines_stand_on_one_page(tmp_path: Path) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, verdict in zip(paths, ("passed", "failed")):
        results = KeptResults(path, REHEARSAL, commit="abc1234567")
        results.machine = results.machine | {"device": f"GPU {path.stem}"}
        item = KeptItem(verdict, f"said {verdict}", {"ms": 1.5}, [], 1.0, "", "2026-11-27 14:00 UTC")
        results.add("part/item", item)
    assert gpu.main(["--merge", *map(str, paths), "--out", str(tmp_path / "page.json")]) == 0
    text = (tmp_path / "page.md").read_text()
    assert text.startswith("# manyformer on GPU a, GPU b\n")
    assert (
        f"- `part/item` on GPU b, torch {torch.__version__}, commit abc1234567, 2026-11-27 14:00 UTC: said failed"
        in text
    )
    assert f"| item on GPU a, torch {torch.__version__} | passed | said passed | ms 1.5 |" in text
    assert "commit abc1234567; 2026-11-27" in text
    assert read_results(paths[1]).items["part/item"].verdict == "failed"


def test_exceptions_are_failures_with_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Outcome:
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr("gpu_parts.waves.all_items", lambda setting: {"part/broken": broken})
    outcome, can_go_on = workers.run_item(REHEARSAL, "part/broken")
    assert outcome.verdict == "failed"
    assert "illegal memory access (broken, test_gpu_benchmark.py" in outcome.sentence
    assert not can_go_on


def test_failed_items_are_run_again_after_new_ones(tmp_path: Path) -> None:
    results = KeptResults(tmp_path / "gpu.json", REHEARSAL)
    results.add("a", KeptItem("failed", "", {}, [], 1.0, "", ""))
    results.add("b", KeptItem("passed", "", {"error": float("nan")}, [], 1.0, "", ""))
    again = KeptResults(tmp_path / "gpu.json", REHEARSAL)
    assert again.remaining(["a", "b", "c"]) == ["c", "a"]


def test_results_of_another_machine_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    KeptResults(path, REHEARSAL).add("a", KeptItem("passed", "", {}, [], 1.0, "", ""))
    content: dict[str, Any] = json.loads(path.read_text())
    for damaged, message in (
        (content | {"machine": {"device": "NVIDIA H200"}}, "was measured on"),
        (content | {"items": {"a": {"verdict": 3}}}, "items|verdict"),
        (content | {"format": 9}, "not a result of gpu.py in format 1"),
    ):
        path.write_text(json.dumps(damaged))
        with pytest.raises(UserError, match=message):
            KeptResults(path, REHEARSAL)


def test_a_wrong_weight_is_noticed() -> None:
    model, data = correctness.prepared("transformer-lm")
    expected = correctness.result_of(model, data)
    assert correctness.judge(correctness.result_of(model, data), expected, []).verdict == "passed"
    with torch.no_grad():
        next(model.parameters())[0, 0] += 0.1
    outcome = correctness.judge(correctness.result_of(model, data), expected, [])
    assert outcome.verdict == "failed"
    assert "differ by more than" in outcome.sentence


def test_missed_goals_of_attention_are_named() -> None:
    times = {"flash": 1.0, "flex": 1.1, "sdpa": 1.0, "our linear": 0.9}
    assert attention_speed.goals(times, 8192) == []
    (miss,) = attention_speed.goals(times | {"flex": 1.5}, 1024)
    assert "0.67 of FlashAttention's speed" in miss
    (miss,) = attention_speed.goals(times | {"our linear": 1.2}, 8192)
    assert "1.20 of SDPA's time" in miss


def test_a_machine_without_a_gpu_is_told_to_rehearse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["--out", str(tmp_path / "gpu.json")])
    assert "torch finds no GPU; --rehearse tests the script without one" in capsys.readouterr().err


def test_a_gpu_would_be_asked_about_every_recipe() -> None:
    names = all_items(Setting(torch.device("cuda"), tiny=False))
    for part in ("check", "compile", "correct", "half", "generate", "waits"):
        tested = {name.partition("/")[2] for name in names if name.startswith(f"{part}/")}
        assert tested == set(mf.recipes())
    assert "flex/t5 bias, 1025 tokens, bfloat16" in names
    assert "decode/graph transformer-lm, 1 rows" in names


def test_a_loss_that_draws_what_it_scores_is_not_compared() -> None:
    model, data = correctness.prepared("etc")
    results = [correctness.result_of(model, data, seed=seed) for seed in (0, 1)]
    assert torch.equal(results[0].logits, results[1].logits)
    assert correctness.draws_numbers(*results)


def test_tokens_of_the_device_are_compared_with_those_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    item = all_items(REHEARSAL)["generate/transformer-lm"]
    assert item().verdict == "passed"
    shares = iter((1.0, 0.5))
    monkeypatch.setattr("gpu_parts.generated_tokens.equal_share", lambda left, right: next(shares))
    outcome = item()
    assert outcome.verdict == "failed"
    assert "50% of the tokens of auto steps are those of the CPU" in outcome.sentence


def test_static_steps_are_rehearsed() -> None:
    items = {name: item for name, item in all_items(REHEARSAL).items() if name.startswith("decode/graph")}
    assert len(items) == 4
    outcome = items["decode/graph gated-deltanet, 16 rows"]()
    assert outcome.verdict == "passed"
    assert outcome.paths == ("eager: with cache", "static: with cache, static steps")
    assert outcome.numbers["static, tokens/s"] > 0


def test_recurrences_of_fla_are_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    items = {name: item for name, item in all_items(REHEARSAL).items() if name.startswith("fla")}
    assert len(items) == 18
    for name in ("fla/gated delta, packed", "fla/decay of channels, one document", "fla speed/sum"):
        assert items[name]().verdict == "passed"
    chunked = fla_paths.matrix_recurrence.chunked
    monkeypatch.setattr(
        fla_paths, "operator_of", lambda setting, kind: lambda dtype, q, **words: chunked(1.1 * q, **words)
    )
    assert "outputs differ by more than 2e-02" in items["fla/delta, packed"]().sentence


def test_without_fla_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla_paths, "operator_of", lambda setting, kind: "fla-core is not installed")
    outcome = all_items(REHEARSAL)["fla/sum, packed"]()
    assert outcome[:2] == ("not run", "fla-core is not installed")


def test_other_tokens_of_static_steps_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding_speed, "equal_share", lambda left, right: 0.5)
    outcome = all_items(REHEARSAL)["decode/graph transformer-lm, 1 rows"]()
    assert outcome.verdict == "failed"
    assert "50.0% of the tokens are those of eager steps" in outcome.sentence


@pytest.mark.slow
# x-transformers compiles a function with torch.jit.script where it is imported first
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.usefixtures("unchecked")
def test_every_part_is_rehearsed(tmp_path: Path) -> None:
    assert gpu.main(["--rehearse", "--minutes", "30", "--out", str(tmp_path / "gpu.json")]) == 0


def test_a_figure_without_its_data_fails_and_names_the_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MANYFORMER_DATA", str(tmp_path))
    outcome = figures.measure(REHEARSAL, figures.FIGURES["Shakespeare characters"])
    assert outcome == Outcome("failed", "MANYFORMER_DATA must name a folder with tinyshakespeare/input.txt")


def test_a_figure_whose_score_needs_a_missing_package_fails_before_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    figure = figures.FIGURES["Multi30k, English to German"]._replace(package="no_such_package")
    monkeypatch.setenv("MANYFORMER_DATA", str(tmp_path))
    for name in (name for names in figure.data.values() for name in names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert figures.measure(REHEARSAL, figure) == Outcome("failed", "BLEU needs the package no_such_package")


@pytest.mark.parametrize(("losses", "verdict"), [([1.9, 1.48, 1.6], "passed"), ([1.9, 1.5, 1.49], "failed")])
def test_the_best_loss_of_a_run_is_compared_with_the_published_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, losses: list[float], verdict: str
) -> None:
    text = tmp_path / "tinyshakespeare" / "input.txt"
    text.parent.mkdir()
    text.write_text("First Citizen:")
    monkeypatch.setenv("MANYFORMER_DATA", str(tmp_path))
    commands = []

    def train(words: list[str], folder: Path, seconds: float | None) -> tuple[str, str]:
        commands.append(words)
        records = [{"step": step, "seconds": 120.0, "valid_loss": loss} for step, loss in enumerate(losses)]
        (folder / "run").mkdir()
        (folder / "run" / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return "", ""

    monkeypatch.setattr(figures, "run_verb", train)
    outcome = figures.measure(Setting(torch.device("cpu"), tiny=False), figures.FIGURES["Shakespeare characters"])
    assert commands == [["train", "lm/nanogpt-characters-gpu", f"data.path={text}", "out=run"]]
    assert outcome.verdict == verdict
    assert outcome.numbers == {"best loss, nats": min(losses), "published": 1.4697, "training, minutes": 2.0}
