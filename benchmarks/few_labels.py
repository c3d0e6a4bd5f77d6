"""Training files with few examples of each label, and the accuracy of a bag of words on them: the floor of fine-tuning.

    python benchmarks/few_labels.py train.tsv val.tsv --examples 5 --examples 20

writes train-5.tsv and train-20.tsv beside train.tsv (a header, then text and label), examples drawn with a fixed seed,
and train-texts.jsonl, all texts without labels; it prints for each, and for all of train.tsv, the accuracy of naive
Bayes on the presence of words and pairs of words.
"""

import argparse
import json
import random
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np

Rows = list[tuple[str, str]]


def read_rows(file: Path) -> tuple[str, Rows]:
    """The header of a file and its rows of text and label."""
    header, *lines = file.read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines]
    return header, [(row[0], row[1]) for row in rows]


def draw_examples(rows: Rows, examples: int, seed: int) -> Rows:
    """So many rows of each label, in the order of `rows`."""
    numbers = defaultdict(list)
    for number, (_, label) in enumerate(rows):
        numbers[label].append(number)
    draw = random.Random(seed)
    return [rows[n] for n in sorted(n for group in numbers.values() for n in draw.sample(group, examples))]


def features(text: str) -> set[str]:
    """The words of a text and its pairs of adjacent words."""
    words = text.lower().split()
    return {*words, *map(" ".join, pairwise(words))}


def naive_bayes_accuracy(train: Rows, held_out: Rows) -> float:
    """The share of held-out texts whose label is most probable, with counts of one more than in training."""
    labels = sorted({label for _, label in train})
    columns = {word: n for n, word in enumerate(sorted({word for text, _ in train for word in features(text)}))}
    counts = np.ones((len(labels), len(columns)))
    for text, label in train:
        counts[labels.index(label), [columns[word] for word in features(text)]] += 1
    logs = np.log(counts / counts.sum(axis=1, keepdims=True))
    correct = 0
    for text, label in held_out:
        present = [columns[word] for word in features(text) if word in columns]
        correct += labels[int(logs[:, present].sum(axis=1).argmax())] == label
    return correct / len(held_out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path)
    parser.add_argument("held_out", type=Path)
    parser.add_argument("--examples", type=int, action="append")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    header, rows = read_rows(arguments.train)
    held_out = read_rows(arguments.held_out)[1]
    texts = arguments.train.with_name(f"{arguments.train.stem}-texts.jsonl")
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text, _ in rows), encoding="utf-8")
    for examples in arguments.examples or (5, 20):
        drawn = draw_examples(rows, examples, arguments.seed)
        file = arguments.train.with_name(f"{arguments.train.stem}-{examples}.tsv")
        file.write_text("\n".join([header, *map("\t".join, drawn)]) + "\n", encoding="utf-8")
        print(f"{file}: {len(drawn):,} examples, naive Bayes {naive_bayes_accuracy(drawn, held_out):.1%}")
    print(f"{arguments.train}: {len(rows):,} examples, naive Bayes {naive_bayes_accuracy(rows, held_out):.1%}")


if __name__ == "__main__":
    main()
