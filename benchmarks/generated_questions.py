"""Questions about passages of a text, generated from the text itself, as tables of data of kind questions.

    python benchmarks/generated_questions.py novels.txt --out questions

A document is a passage of consecutive words. Its question is a gap: the four words before an answer and the four after
it, which is anywhere in the passage, so that only the place where these words occur tells the answer. One question in
ten has no answer: its words are of another passage. The first nine tenths of the text make train.jsonl, the rest
valid.jsonl and test.jsonl.
"""

import argparse
import gzip
import json
import random
import re
from pathlib import Path

SIDE = 4
"""The words of a question on each side of its gap."""
UNANSWERED_SHARE = 0.1
KEYS = ("document", "question", "answer", "start")
SHARES = {"train": 0.9, "valid": 0.05, "test": 0.05}


def gap_at(words: list[str], place: int) -> str:
    """The words on both sides of the one at `place`."""
    return " ".join(words[place - SIDE : place] + words[place + 1 : place + SIDE + 1])


def question_of(document: list[str], text: list[str], rng: random.Random) -> tuple[str, str, int]:
    """A question, its answer in the document, and the number of characters before the answer."""
    if rng.random() < UNANSWERED_SHARE:
        return gap_at(text, rng.randrange(SIDE, len(text) - SIDE)), "", 0
    place = rng.randrange(SIDE, len(document) - SIDE)
    return gap_at(document, place), document[place], len(" ".join(document[:place])) + 1


def write_questions(text: str, out: Path, *, passage: int, questions: int, seed: int) -> None:
    """Write the three tables into the folder `out`."""
    words, rng = re.findall(r"[A-Za-z]+(?:'[a-z]+)?[.,;:!?]*", text), random.Random(seed)
    out.mkdir(parents=True, exist_ok=True)
    first = 0
    for name, share in SHARES.items():
        part = words[first : first + round(share * len(words))]
        first += len(part)
        with (out / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for start in range(0, len(part) - passage, passage):
                document = part[start : start + passage]
                for _ in range(questions):
                    example = zip(KEYS, (" ".join(document), *question_of(document, part, rng)))
                    file.write(json.dumps(dict(example)) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, nargs="+", help="text files, also gzipped")
    parser.add_argument("--out", type=Path, default=Path("questions"))
    parser.add_argument("--words", type=int, default=256, help="words of a passage")
    parser.add_argument("--questions", type=int, default=4, help="questions about each passage")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    contents = [
        gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes() for path in arguments.text
    ]
    text = "\n".join(content.decode() for content in contents)
    write_questions(text, arguments.out, passage=arguments.words, questions=arguments.questions, seed=arguments.seed)


if __name__ == "__main__":
    main()
