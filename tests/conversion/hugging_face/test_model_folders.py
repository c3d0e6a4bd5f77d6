"""Folders that `transformers` wrote, where commands and functions take a run or a saved model: the same results."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_encoders import CASES, SIZES, THREE_LABELS
from tiny_foreign_models import saved
from tiny_models import save_tiny

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.cli import run
from manyformer.inference.evaluate import evaluate, predict
from manyformer.inference.evaluate.predict import PredictedInput

pytestmark = pytest.mark.oracle

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the cat sat on mat . a dog ran over hill , and slept who ? ##s un ##able"
TEXTS = ["the cats sat on the mat .", "a dog ran", "unable"]
CONLLU = (
    "\n".join(f"{n}\t{word}\t_\t_\t_\t_\t0\troot\t_\t_" for n, word in enumerate(("the", "cats", "ran"), 1)) + "\n\n"
)


def save_reader(name: str, folder: Path) -> tuple[Any, Any]:
    """A model and the tokenizer of `transformers`, both saved in a folder."""
    import transformers

    model = save_tiny(folder, name, {**CASES[name], "vocab_size": len(WORDS.split())})
    (folder / "vocab.txt").write_text(WORDS.replace(" ", "\n") + "\n")
    return model, transformers.BertTokenizer(str(folder / "vocab.txt"))


def predicted(folder: Path, file: Path, content: str, **options: Any) -> list[PredictedInput]:
    file.write_text(content)
    return list(predict(folder, str(file), **options))


def test_labels_of_texts(tmp_path: Path) -> None:
    reference, tokenizer = save_reader("BertForSequenceClassification", tmp_path / "bert")
    items = predicted(tmp_path / "bert", tmp_path / "texts.txt", "\n".join(TEXTS) + "\n", top=3)
    with torch.no_grad():
        expected = reference(**tokenizer(TEXTS, padding=True, return_tensors="pt")).logits.softmax(-1)
    names = THREE_LABELS["id2label"]
    for item, row in zip(items, expected, strict=True):
        best = row.argsort(descending=True).tolist()
        assert [label.label for label in item.prediction[0]] == [names[number] for number in best]
        probabilities = [label.probability for label in item.prediction[0]]
        assert probabilities == pytest.approx(row[best].tolist(), abs=1e-5)


def test_scores_of_a_file(tmp_path: Path) -> None:
    reference, tokenizer = save_reader("BertForSequenceClassification", tmp_path / "bert")
    with torch.no_grad():
        best = reference(**tokenizer(TEXTS, padding=True, return_tensors="pt")).logits.argmax(-1).tolist()
    labels = [THREE_LABELS["id2label"][number] for number in best]
    labels[0] = "no" if labels[0] == "yes" else "yes"
    (tmp_path / "rows.tsv").write_text("".join(f"{text}\t{label}\n" for text, label in zip(TEXTS, labels)))
    scores = evaluate(tmp_path / "bert", data=str(tmp_path / "rows.tsv"))
    assert scores["accuracy"].value == pytest.approx(200 / 3)
    with pytest.raises(UserError, match="holds a model without the data of a run: give a file"):
        evaluate(tmp_path / "bert")


def test_labels_of_words(tmp_path: Path) -> None:
    reference, tokenizer = save_reader("BertForTokenClassification", tmp_path / "bert")
    (item,) = predicted(tmp_path / "bert", tmp_path / "words.conllu", CONLLU)
    encoding = tokenizer([["the", "cats", "ran"]], is_split_into_words=True, return_tensors="pt")
    with torch.no_grad():
        numbers = reference(**encoding).logits[0].argmax(-1).tolist()
    starts = [encoding.word_ids().index(word) for word in range(3)]
    assert starts == [1, 2, 4]
    names = THREE_LABELS["id2label"]
    assert [labels[0].label for labels in item.prediction] == [names[numbers[start]] for start in starts]


def test_answers_to_questions(tmp_path: Path) -> None:
    reference, tokenizer = save_reader("BertForQuestionAnswering", tmp_path / "bert")
    document, question = "the cats sat on the mat . a dog ran over the hill .", "who slept ?"
    (item,) = predicted(tmp_path / "bert", tmp_path / "questions.tsv", f"{document}\t{question}\n", top=4)
    encoding = tokenizer(question, document, return_tensors="pt")
    with torch.no_grad():
        output = reference(**encoding)
    begin, end = output.start_logits[0], output.end_logits[0]
    inside = [column for column, part in enumerate(encoding["token_type_ids"][0].tolist()) if part][:-1]
    spans = {(i, j): float(begin[i] + end[j]) for i in inside for j in inside if i <= j}
    total = math.log(sum(map(math.exp, [*spans.values(), float(begin[0] + end[0])])))
    texts: dict[str, float] = {"(no answer)": math.exp(float(begin[0] + end[0]) - total)}
    for (i, j), score in spans.items():
        text = tokenizer.decode(encoding["input_ids"][0, i : j + 1])
        texts[text] = max(texts.get(text, 0.0), math.exp(score - total))
    best = sorted(texts.items(), key=lambda pair: -pair[1])[:4]
    assert [label.probability for label in item.prediction[0]] == pytest.approx([value for _, value in best], abs=1e-5)
    words = [label.label.replace(" ", "") for label in item.prediction[0]]
    assert words == [text.replace(" ", "") for text, _ in best]


def test_labels_of_images(tmp_path: Path) -> None:
    import transformers
    from PIL import Image

    torch.manual_seed(0)
    sizes = {name: SIZES[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    config = transformers.ViTConfig(image_size=16, patch_size=8, intermediate_size=48, **sizes, **THREE_LABELS)
    reference = transformers.ViTForImageClassification(config).eval()
    reference.save_pretrained(tmp_path / "vit")
    processor = transformers.ViTImageProcessor(size={"height": 16, "width": 16})
    processor.save_pretrained(tmp_path / "vit")
    pixels = np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    (item,) = predict(tmp_path / "vit", str(tmp_path / "photo.png"), top=3)
    with torch.no_grad():
        expected = reference(**processor(Image.fromarray(pixels), return_tensors="pt")).logits.softmax(-1)[0]
    assert [label.probability for label in item.prediction[0]] == pytest.approx(
        expected.sort(descending=True)[0].tolist(), abs=1e-5
    )


def test_an_imported_model_is_a_folder_too(tmp_path: Path) -> None:
    save_reader("BertForSequenceClassification", tmp_path / "bert")
    assert run(["import", str(tmp_path / "bert"), "--out", str(tmp_path / "model")]) == 0
    first, second = (
        predicted(tmp_path / name, tmp_path / "texts.txt", "\n".join(TEXTS), top=2) for name in ("bert", "model")
    )
    assert [item.prediction for item in first] == [item.prediction for item in second]


def test_a_folder_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference = saved("gpt2", tmp_path)
    assert run(["show", str(tmp_path), "--json"]) == 0
    page = json.loads(capsys.readouterr().out)
    assert page["name"] == "transformer-lm"
    assert page["parameters"] == sum(weight.numel() for weight in reference.parameters())


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["predict", "FOLDER", "texts.txt"], "has no tokenizer"),
        (["generate", "FOLDER", "a"], "was saved without a tokenizer"),
        (["heads", "FOLDER"], "holds a model, and this needs a run with its data"),
    ],
)
def test_what_a_folder_cannot_serve(
    command: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved("gpt2", tmp_path / "gpt2")
    assert run([word.replace("FOLDER", str(tmp_path / "gpt2")) for word in command]) == 2
    assert sentence in capsys.readouterr().err


def test_a_loaded_folder_is_the_model(tmp_path: Path) -> None:
    reference, tokens = saved("gpt2", tmp_path), torch.randint(0, 60, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(mf.load(tmp_path)(tokens).logits, reference(tokens).logits, atol=1e-4, rtol=0)
