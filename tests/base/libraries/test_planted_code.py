"""Whatever a folder of somebody else holds, no command runs code of it or takes an answer from the user's data."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from planted_code import plant_beside, plant_fields, replace_line, replace_text, text_places, yaml_places

from manyformer.cli import COMMANDS, run

REPOSITORY = Path(__file__).parents[3]
sys.path.insert(0, str(REPOSITORY / "benchmarks"))
from fault_injection.resigning import sign_again  # noqa: E402

RUNNER = Path(__file__).with_name("run_verbs.py")
SECONDS = 60
"""How long one command may take; the slowest takes five."""

LINES = "to be or not to be\nthat is the question\n" * 60
SMALL = ("dim=16", "depth=1", "heads=2", "batch.tokens=64", "limits.steps=2", "evaluate.batches=1")
TEXT = ("data.path=text.txt", "data.tokenizer=char", "data.length=16")

Build = Callable[[Path], None]


def write_inputs(folder: Path) -> None:
    (folder / "text.txt").write_text(LINES)
    (folder / "pairs.tsv").write_text("".join(f"to be {number}\t{number} be to\n" for number in range(60)))
    (folder / "two.yaml").write_text(
        "title: Two\nscore: [loss]\nrun:\n  recipe: transformer-lm\n  model: {dim: 16, depth: 1, heads: 2}\n"
        "  data: {path: text.txt, tokenizer: char, length: 16}\n  batch: {tokens: 64}\n  limits: {steps: 2}\n"
        "  evaluate: {every: null, batches: 1}\ncases:\n  narrow: {}\n  wide: {model: {dim: 32}}\n"
    )


def succeed(*arguments: str) -> None:
    assert run(arguments) == 0, arguments


def transformers_model(model_type: str, folder: Path) -> None:
    """A tiny model of `transformers` that this library can import, without a tokenizer."""
    import torch
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "gpt2": {
            "vocab_size": 320,
            "n_positions": 32,
            "n_embd": 16,
            "n_layer": 1,
            "n_head": 2,
            **dict.fromkeys(("bos_token_id", "eos_token_id"), 0),
        },
        "bert": {
            **{"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
            **{"intermediate_size": 32, "max_position_embeddings": 32},
        },
        "t5": {
            "vocab_size": 128,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 32,
            "num_layers": 1,
            "num_heads": 2,
        },
        "marian": {
            **{"vocab_size": 60, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2},
            **{"decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "pad_token_id": 2},
            **{"decoder_start_token_id": 2, "eos_token_id": 0, "max_position_embeddings": 32},
        },
    }[model_type]
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    auto = {"bert": "AutoModelForMaskedLM", "gpt2": "AutoModelForCausalLM"}.get(model_type, "AutoModelForSeq2SeqLM")
    getattr(transformers, auto).from_config(config).save_pretrained(folder)


def byte_pairs(folder: Path) -> Any:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    inner.train_from_iterator([LINES], trainer)
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return inner


def pieces(folder: Path, *names: str, **options: int) -> None:
    """A model of sentencepiece under some names."""
    import sentencepiece

    folder.mkdir(exist_ok=True)
    (folder / "lines").write_text(LINES)
    sentencepiece.SentencePieceTrainer.train(
        **{"input": str(folder / "lines"), "model_prefix": str(folder / "m"), "vocab_size": 60, "minloglevel": 2},
        **{"hard_vocab_limit": False, **options},
    )
    (folder / "lines").unlink()
    for name in names:
        shutil.copy(folder / "m.model", folder / name)
    for left in folder.glob("m.*"):
        left.unlink()


def merges(folder: Path) -> None:
    transformers_model("gpt2", folder)
    byte_pairs(folder).model.save(str(folder))
    # a class that is not in the library, so that only the folder's code could read it
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>", "tokenizer_class": "Planted"}')


def known_merges(folder: Path) -> None:
    transformers_model("gpt2", folder)
    byte_pairs(folder).model.save(str(folder))


def fast(folder: Path) -> None:
    transformers_model("gpt2", folder)
    byte_pairs(folder).save(str(folder / "tokenizer.json"))


def word_pieces(folder: Path) -> None:
    transformers_model("bert", folder)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "vocab.txt").write_text("\n".join([*special, *sorted(set(LINES.split())), *"abcdefghij"]) + "\n")


def sentence_pieces(folder: Path) -> None:
    transformers_model("t5", folder)
    pieces(folder, "spiece.model", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)


def marian(folder: Path) -> None:
    transformers_model("marian", folder)
    pieces(folder, "source.spm", "target.spm", pad_id=-1, eos_id=0, unk_id=1, bos_id=-1)
    vocabulary = {"</s>": 0, "<unk>": 1, "<pad>": 2, "▁to": 3, "▁be": 4, "▁": 5, "t": 6, "o": 7}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))


def adapter(folder: Path) -> None:
    import peft
    import transformers

    fast(folder / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    settings = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.get_peft_model(model, settings).save_pretrained(folder)


def language_run(folder: Path) -> None:
    succeed("train", "transformer-lm", *SMALL, *TEXT, f"out={folder}")


def translation_run(folder: Path) -> None:
    settings = ("data.path=pairs.tsv", "data.tokenizer=char", "data.valid=0.2")
    succeed("train", "transformer", *SMALL, *settings, f"out={folder}")


def saved_model(folder: Path) -> None:
    language_run(folder.with_name("made"))
    shutil.copytree(folder.with_name("made") / "model", folder)
    shutil.rmtree(folder.with_name("made"))


def datastore(folder: Path) -> None:
    language_run(Path("trained"))
    succeed("datastore", "build", "trained", "--out", str(folder))


def comparison(folder: Path) -> None:
    succeed("compare", "two.yaml", "--out", str(folder))


def saved_records(folder: Path) -> None:
    import datasets

    records = datasets.Dataset.from_dict({"text": LINES.splitlines(), "label": ["a", "b"] * 60})
    records.save_to_disk(folder)


def tables(folder: Path) -> None:
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "to be", "label": "a"}\n' * 40)
    (folder / "dataset_infos.json").write_text("{}")


def tokenizer_alone(folder: Path) -> None:
    byte_pairs(folder).model.save(str(folder))


KINDS: dict[str, Build] = {
    **{"merges": merges, "known-merges": known_merges, "fast": fast, "word-pieces": word_pieces},
    **{"sentence-pieces": sentence_pieces, "marian": marian, "adapter": adapter, "run": language_run},
    **{"translation": translation_run, "saved": saved_model, "datastore": datastore, "comparison": comparison},
    **{"records": saved_records, "tables": tables, "tokenizer": tokenizer_alone},
}


def commands(folder: str) -> list[list[str]]:
    """Every verb, with the folder wherever it can stand."""
    lm = ("train", "transformer-lm", *SMALL, "data.length=16")
    return [
        ["mf.load", folder],
        *(["generate", folder, "to be", "--max-new", "2"], ["translate", folder, "to be"]),
        *(["caption", folder, "picture.png"], ["transcribe", folder, "sound.wav"], ["predict", folder, "text.txt"]),
        *(["play", folder, "--out", "play.gif"], ["record", folder, "--out", "record.npz"]),
        *(
            ["view", folder, "to be", "--out", "view.html"],
            ["attention", folder, "to be"],
            ["spans", folder],
        ),
        *(["heads", folder], ["evaluate", folder]),
        *(["evaluate", folder, "--data", "text.txt"], ["check", folder, "--only", "causal"]),
        *(["calibrate", folder, "--tolerance", "0.1"], ["calibrate", folder, "--sweep"]),
        ["calibrate", folder, "--text", "to be"],
        *(
            ["prune", folder, "--out", "pruned", "--how", "importance", "--keep", "1"],
            ["import", folder, "--out", "imported"],
        ),
        *(["import", folder, "--base", f"{folder}/base", "--out", "merged"], ["export", folder, "--out", "exported"]),
        *(["convert", folder, "--out", "converted"], ["bench", folder]),
        *(["show", folder], ["plan", f"{folder}/run.yaml"], ["baselines", f"{folder}/run.yaml"]),
        *(["plot", folder, "--out", "plot.png"], ["doctor", folder], ["list", folder], ["runs", "show", folder]),
        *(["regress", "--out", f"{folder}/regress.png"], ["advise", "--length", "16", "--results", folder]),
        *(["compare", f"{folder}/comparison.yaml", "--dry-run"], ["compare", "two.yaml", "--out", folder]),
        *(["train", f"{folder}/run.yaml", "--dry-run"], ["datastore", "build", folder, "--out", "store"]),
        *(["datastore", "look", "trained", folder, "to be"], ["datastore", "index", folder]),
        *(["datastore", "tune", "trained", folder], ["datastore", "evaluate", "trained", folder]),
        *(
            [*lm, f"data.path=hf:{folder}", "data.column=text", "out=again-1"],
            [*lm, f"data.path={folder}", "out=again-2"],
        ),
        [*lm, "data.path=text.txt", f"data.tokenizer_of={folder}", "out=again-3"],
        ["train", "transformer-lm", *TEXT, f"init_from={folder}", "limits.steps=1", "out=again-4"],
    ]


def test_every_verb_is_tried() -> None:
    assert {command[0] for command in commands("folder")} == {*COMMANDS, "mf.load"}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder of a kind with what lies beside it, made when it is first needed."""
    root = tmp_path_factory.mktemp("originals")

    def make(kind: str) -> Path:
        place = root / kind
        if not place.exists():
            place.mkdir()
            before = Path.cwd()
            os.chdir(place)
            try:
                write_inputs(place)
                KINDS[kind](Path("subject"))
            finally:
                os.chdir(before)
        return place

    return make


def carry_out(place: Path, listed: list[list[str]]) -> list[dict[str, Any]]:
    """The outcomes of commands in a folder, with answers waiting in standard input."""
    environment = {
        **os.environ,
        **{"VERBS": json.dumps(listed), "HF_HOME": str(place / "cache"), "OMP_NUM_THREADS": "1"},
        # what a proxy would be asked is refused at once
        **{"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"},
    }
    done = subprocess.run(
        [sys.executable, "-P", str(RUNNER), str(SECONDS)],
        **{"input": "yes\ny\n1\n" * 20, "capture_output": True, "text": True, "check": False},
        cwd=place,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    outcomes: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return outcomes


def judge(outcomes: list[dict[str, Any]], fired: Path) -> None:
    assert not fired.exists(), fired.read_text()
    for outcome in outcomes:
        assert outcome["code"] in (0, 1, 2), outcome
        assert outcome["code"] != 1 or outcome["command"].startswith(("check", "doctor", "compare")), outcome
        assert outcome["read"] == 0, outcome


READABLE = {
    *("known-merges", "fast", "word-pieces", "sentence-pieces", "marian", "run", "translation", "saved"),
}
"""The kinds of folders whose models can be loaded although there is code beside them, which nobody needs."""


@pytest.mark.thinned(15)
@pytest.mark.oracle
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_planted_in_a_folder_runs(kind: str, originals: Callable[[str], Path], tmp_path: Path) -> None:
    place, fired = tmp_path / "place", tmp_path / "fired"
    shutil.copytree(originals(kind), place)
    before = {file: file.read_bytes() for file in (place / "subject").rglob("*") if file.is_file()}
    plant_fields(place / "subject")
    sign_again(place / "subject", before)
    plant_beside(place / "subject", fired)
    outcomes = carry_out(place, commands("subject"))
    judge(outcomes, fired)
    assert (outcomes[0]["code"] == 0) == (kind in READABLE), outcomes[0]
    if kind == "merges":
        assert "auto_map names Python code of the folder" in outcomes[0]["said"][0]


PARTS = {
    **dict.fromkeys(KINDS, 1),
    **{"run": 12, "translation": 12, "saved": 5, "comparison": 18, "datastore": 2},
}
"""Into how many cases the places of a folder are divided: about 20 for each, with six commands at every place."""
del PARTS["tables"]  # whose JSON has no text


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.oracle
@pytest.mark.parametrize(("kind", "part"), [(kind, part) for kind in PARTS for part in range(PARTS[kind])])
def test_no_text_in_a_file_is_taken_for_the_name_of_code(
    kind: str, part: int, originals: Callable[[str], Path], tmp_path: Path
) -> None:
    """Each text of each JSON file, and each value of each run file, becomes the name of a module that is there."""
    place, fired = tmp_path / "place", tmp_path / "fired"
    shutil.copytree(originals(kind), place)
    subject = place / "subject"
    references = ["planted.Planted", "planted", "planted.py", "planted:Planted", f"{subject}/planted.py"]
    places = [*text_places(subject)]
    places = places[:: max(1, len(places) // 50)]
    tag = f"!!python/object/apply:os.system ['touch {fired}']"
    edits: list[tuple[Path, Callable[[Path], None]]] = [
        (file, partial(replace_text, place=keys, text=references[number % len(references)]))
        for number, (file, keys) in enumerate(places)
    ] + [(file, partial(replace_line, number=number, tag=tag)) for file, number in yaml_places(subject)]
    assert edits
    listed = []
    for number, (file, edit) in enumerate(edits[part :: PARTS[kind]]):
        copy = place / f"copy-{number}"
        shutil.copytree(subject, copy)
        changed = copy / file.relative_to(subject)
        before = {changed: changed.read_bytes()}
        edit(changed)
        sign_again(copy, before)
        plant_beside(copy, fired)
        name = copy.name
        listed += [["mf.load", name], ["generate", name, "to be", "--max-new", "2"], ["evaluate", name]]
        listed += [["doctor", name], ["show", name], ["plot", name, "--out", f"{name}.png"]]
        listed += [["datastore", "look", "trained", name, "to be"]] if kind == "datastore" else []
    judge(carry_out(place, listed), fired)
