"""Tiny runs, datastores, comparisons and models, a second each, that faults are done to."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import save_file

import manyformer as mf
from fault_injection.forked_commands import LOAD

Command = tuple[str, ...]

WORDS = ["to", "be", "or", "not", "that", "is", "the", "question"]
TRAIN = ("limits.steps=12", "evaluate.every=5", "evaluate.batches=2", "save.every=3", "save.average_last=2")
SMALL = ("dim=16", "depth=2", "heads=2", "batch.tokens=128", "log.every=2", "out=run", *TRAIN)
MORE = ("limits.steps=18",)
TEXT = ("data.path=text.txt", "data.tokenizer=char", "data.length=16")


def write_text(folder: Path) -> None:
    """Thirty paragraphs of random words."""
    words = random.Random(0).choices(WORDS, k=3000)
    paragraphs = [" ".join(words[start : start + 100]) for start in range(0, len(words), 100)]
    (folder / "text.txt").write_text("\n\n".join(paragraphs))


def write_two_texts(folder: Path) -> None:
    """The text, and thirty other documents of the same words."""
    write_text(folder)
    words = random.Random(1).choices(WORDS, k=600)
    documents = [" ".join(words[start : start + 20]) for start in range(0, len(words), 20)]
    (folder / "other.jsonl").write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))


def sentences() -> list[list[str]]:
    """Three hundred sentences of two to six words."""
    chance = random.Random(0)
    return [chance.choices(WORDS, k=chance.randint(2, 6)) for _ in range(300)]


def write_pairs(folder: Path) -> None:
    """Sentences and their words in reverse."""
    lines = [f"{' '.join(words)}\t{' '.join(reversed(words))}\n" for words in sentences()]
    (folder / "pairs.tsv").write_text("".join(lines))


def write_labels(folder: Path) -> None:
    """Sentences and whether they ask."""
    lines = [f"{' '.join(words)}\t{'asks' if 'question' in words else 'tells'}\n" for words in sentences()]
    (folder / "labels.tsv").write_text("".join(lines))


def write_images(folder: Path) -> None:
    """Noisy images of four by four pixels whose brightness is their class."""
    chance = np.random.default_rng(0)
    labels = chance.integers(0, 3, 200)
    images = (labels[:, None, None] * 60 + chance.integers(0, 60, (200, 8, 8))).astype(np.uint8)
    np.savez(folder / "images.npz", x_train=images, y_train=labels.astype(np.uint8))


def write_comparison(folder: Path) -> None:
    """Two language models of the same text."""
    write_text(folder)
    (folder / "two.yaml").write_text(
        "title: Two widths\n"
        "score: [loss]\n"
        "run:\n"
        "  recipe: transformer-lm\n"
        "  model: {dim: 16, depth: 1, heads: 2, dropout: 0.1}\n"
        "  data: {path: text.txt, tokenizer: char, length: 16}\n"
        "  batch: {tokens: 128}\n"
        "  limits: {steps: 6}\n"
        "  save: {every: 3}\n"
        "  evaluate: {every: null, batches: 2}\n"
        "cases:\n"
        "  narrow: {}\n"
        "  wide: {model: {dim: 32}}\n"
        "claims:\n"
        "  - wide < narrow + 1\n"
    )


@dataclass(frozen=True)
class Scenario:
    """A command that takes a second: what it needs, what it writes, and what is done with that."""

    name: str
    write_inputs: Callable[[Path], None]
    command: Command
    """What is killed or meets a full disk; given again, it goes on."""
    written: str
    """The folder that the command writes."""
    uses: tuple[Command, ...] = ()
    """What is done with the folder afterwards, from the least that it changes to the most."""
    preparation: tuple[Command, ...] = ()
    """The commands before it."""


def training(name: str, recipe: str, write_inputs: Callable[[Path], None], *settings: str, use: Command) -> Scenario:
    """The training of a recipe, and all that can be done with its run."""
    command = ("train", recipe, *SMALL, *settings)
    uses = (("evaluate", "run", "--json"), use, (LOAD, "run"), (*command, *MORE))
    return Scenario(name, write_inputs, command, "run", uses)


GENERATE = ("generate", "run", "to be ", "--seed", "1", "--max-new", "8", "--json")
LANGUAGE = training("language", "transformer-lm", write_text, *TEXT, "dropout=0.2", use=GENERATE)
MEMORY = training(
    "memory", "transformer-xl", write_text, *TEXT, "data.packing=contiguous", "memory_length=16", use=GENERATE
)
HASHES = training(
    "hashes",
    "reformer",
    write_text,
    *TEXT,
    "data.length=32",
    "dropout=0.1",
    "num_buckets=8",
    "chunk_length=8",
    use=GENERATE,
)
TRANSLATION = training(
    "translation",
    "transformer",
    write_pairs,
    "data.path=pairs.tsv",
    "data.tokenizer=bpe",
    "data.vocab=280",
    use=("translate", "run", "to be", "--json"),
)
LABELS = training(
    "labels",
    "transformer-classifier",
    write_labels,
    "data.path=labels.tsv",
    "data.tokenizer=char",
    use=("predict", "run", "labels.tsv", "--json"),
)
IMAGES = training("images", "vit", write_images, "data.path=images.npz", "patch=4", use=("evaluate", "run"))
PROCESSES = training("processes", "transformer-lm", write_text, *TEXT, "dropout=0.2", "devices=2", use=GENERATE)

DATASTORE = Scenario(
    "datastore",
    write_text,
    ("datastore", "build", "run", "--out", "store"),
    "store",
    (
        ("datastore", "evaluate", "run", "store", "--neighbours", "8", "--json"),
        ("datastore", "look", "run", "store", "to be", "--json"),
        (*GENERATE, "--datastore", "store"),
        ("datastore", "build", "run", "--out", "store"),
    ),
    preparation=(LANGUAGE.command,),
)
COMPARISON = Scenario(
    "comparison",
    write_comparison,
    ("compare", "two.yaml", "--out", "comparison", "--json"),
    "comparison",
    (("compare", "two.yaml", "--out", "comparison", "--seeds", "2", "--json"),),
)


def rewriting(name: str, *command: str, uses: tuple[Command, ...] = ()) -> Scenario:
    """A command that makes another folder of a trained language model, which is loaded and put to other uses."""
    written = command[-1]
    return Scenario(name, write_text, command, written, ((LOAD, written), *uses), preparation=(LANGUAGE.command,))


EXPORT = rewriting(
    *("export", "convert", "run", "--to", "collaborative", "shared_dim=8", "--out", "exported"),
    uses=(("generate", "exported", "to be ", "--seed", "1", "--max-new", "8", "--json"),),
)


def write_trees(folder: Path) -> None:
    """Three hundred sentences of four words, whose relations are those of the words."""
    chance = random.Random(0)
    blocks = []
    for _ in range(300):
        words = chance.choices(WORDS, k=4)
        rows = [
            f"{place}\t{word}\t_\tX\t_\t_\t{place - 1}\t{'root' if place == 1 else f'is-{word}'}\t_\t_\n"
            for place, word in enumerate(words, 1)
        ]
        blocks.append("".join(rows) + "\n")
    (folder / "trees.conllu").write_text("".join(blocks))


def write_pictures(folder: Path) -> None:
    """Dark and bright pictures of eight by eight pixels, a folder for each."""
    chance = np.random.default_rng(0)
    for number in range(60):
        label = ("dark", "bright")[number % 2]
        pixels = chance.integers(0, 100, (8, 8, 3)) + 150 * (number % 2)
        place = folder / "pictures" / label / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(place)


def write_captions(folder: Path) -> None:
    """Dark and bright images and what they are called."""
    bright = np.arange(60) % 2
    images = (bright[:, None, None] * 155 + np.arange(64).reshape(8, 8)).astype(np.uint8)
    texts = np.array(["a dark image", "bright"])[bright]
    np.savez(folder / "captions.npz", images=images, texts=texts, test=np.arange(8))


RATE = 8000


def write_sounds(folder: Path) -> None:
    """Low and high tones, a folder for each."""
    for number in range(40):
        label = ("low", "high")[number % 2]
        place = folder / "sounds" / label / f"{number}.wav"
        place.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(place, tone(1500 if number % 2 else 300, 0.2 + 0.005 * number), RATE)


def tone(frequency: float, seconds: float) -> NDArray[np.float32]:
    """A sine of half the full scale."""
    times = np.arange(round(seconds * RATE)) / RATE
    return (0.5 * np.sin(2 * np.pi * frequency * times)).astype(np.float32)


FOREIGN_VOCAB = 300


def write_foreign(folder: Path) -> None:
    """A Llama and a BERT as transformers writes them, and an adapter of peft for the Llama."""
    from manyformer.conversion.hugging_face import export_model

    torch.manual_seed(0)
    llama = mf.build("llama", vocab=FOREIGN_VOCAB, dim=16, depth=1, heads=2)
    export_model(llama, folder / "llama")
    bert = mf.build(
        "bert", vocab=FOREIGN_VOCAB, dim=16, depth=1, heads=2, max_length=64, head="classification", classes=2
    )
    export_model(bert, folder / "bert")
    write_merges(folder / "llama")
    write_word_pieces(folder / "bert")
    write_adapter(folder / "adapter")
    write_text(folder)


def write_merges(folder: Path) -> None:
    """The tokenizer of a GPT-2 in the files of old versions: a table of all bytes and one merge."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    signs = {**{byte: chr(byte) for byte in printable}, **{byte: chr(256 + n) for n, byte in enumerate(others)}}
    pieces = [signs[byte] for byte in range(256)] + ["to", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({piece: number for number, piece in enumerate(pieces)}))
    (folder / "merges.txt").write_text("#version: 0.2\nt o\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))


def write_word_pieces(folder: Path) -> None:
    """The tokenizer of a BERT in the file of old versions."""
    letters = [chr(code) for code in range(97, 123)]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *letters, *(f"##{letter}" for letter in letters)]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))


ADAPTED = "model.layers.0.self_attn.q_proj"


def write_adapter(folder: Path) -> None:
    """An adapter of rank 4 for the queries of the Llama."""
    folder.mkdir()
    pairs = {"lora_A": torch.randn(4, 16), "lora_B": torch.randn(16, 4)}
    tensors = {f"base_model.model.{ADAPTED}.{part}.weight": tensor for part, tensor in pairs.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "llama", "r": 4},
        **{"lora_alpha": 8, "lora_dropout": 0.0, "bias": "none", "target_modules": ["q_proj"], "use_rslora": False},
        **{"use_dora": False, "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True},
        **{"alpha_pattern": {}, "rank_pattern": {}, "modules_to_save": None},
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


TREES = training(
    "trees",
    "structural",
    write_trees,
    *("data.path=trees.conllu", "data.valid=trees.conllu", "data.test=trees.conllu", "data.tokenizer=word"),
    use=("predict", "run", "trees.conllu", "--json"),
)
PICTURES = training(
    "pictures",
    "vit",
    write_pictures,
    *("data.path=pictures", "patch=4", "batch.tokens=768"),
    use=("predict", "run", "pictures", "--json"),
)
CAPTIONS = training(
    "captions",
    "captioner",
    write_captions,
    *("data.path=captions.npz", "patch=4", "batch.tokens=600", "data.tokenizer=word"),
    use=("caption", "run", "captions.npz", "--max-new", "3", "--json"),
)
SOUND = ("data.path=sounds", "data.mels=8", f"data.sample_rate={RATE}", "channels=2", "batch.tokens=512")
SOUNDS = training(
    "sounds",
    "audio-transformer-classifier",
    write_sounds,
    *SOUND,
    use=("predict", "run", "sounds/low/0.wav", "--json"),
)
SPEECH = training(
    "speech",
    "conformer",
    write_sounds,
    *(*SOUND, "kernel_size=3", "data.tokenizer=word"),
    use=("transcribe", "run", "sounds/low/0.wav", "--json"),
)
EXITS = training("exits", "depth-adaptive-lm", write_two_texts, *TEXT, "data.length=64", use=GENERATE)
SPANS = training("spans", "adaptive-span", write_text, *TEXT, use=GENERATE)
POLICY = Scenario(
    "policy",
    lambda folder: None,
    ("train", "gtrxl", "data.environment=CartPole-v1", "dim=16", "depth=1", "heads=2", "limits.steps=2", "out=run"),
    "run",
    (("record", "run", "--out", "episodes.npz", "--episodes", "1"),),
)
FOREIGN = Scenario(
    "foreign",
    write_foreign,
    ("import", "llama", "--out", "imported"),
    "imported",
    (
        ("generate", "llama", "to be", "--seed", "1", "--max-new", "4", "--json"),
        ("import", "llama", "--out", "again", "--json"),
        ("predict", "bert", "text.txt", "--json"),
        (LOAD, "imported"),
    ),
)
PRUNING = rewriting("pruning", "prune", "run", "--keep", "3", "--how", "importance", "--out", "pruned")
TO_HUGGING_FACE = rewriting("to-hugging-face", "export", "run", "--out", "exported")
