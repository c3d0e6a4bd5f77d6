"""Questions about passages of a text, generated from the text itself, as tables of data of kind questions.

    python benchmarks/generated_questions.py novels.txt --out questions

A document is a passage of consecutive words. Its question is a word that occurs once in the passage, and the answer is
the word after it, so that nothing but the place of the question's word in the document tells the answer. The words of
questions are among the 1,000 most frequent of the text, and are anywhere in the passage. One question in ten has no
answer: its word does not occur. The first nine tenths of the text make train.jsonl, the rest valid.jsonl and
test.jsonl.
"""

import argparse
import gzip
import json
import random
import re
from collections import Counter
from pathlib import Path

FREQUENT_WORDS = 1000
UNANSWERED_SHARE = 0.1
SHARES = {"train": 0.9, "valid": 0.05, "test": 0.05}


def question_of(words: list[str], frequent: dict[str, int], rng: random.Random) -> tuple[str, str, int] | None:
    """A question about a passage, its answer, and the number of characters before it; None if no word qualifies."""
    counts = Counter(words)
    if rng.random() < UNANSWERED_SHARE:
        return rng.choice([word for word in frequent if word not in counts]), "", 0
    places = [place for place, word in enumerate(words[:-1]) if counts[word] == 1 and word in frequent]
    if not places:
        return None
    place = rng.choice(places)
    return words[place], words[place + 1], len(" ".join(words[: place + 1])) + 1


def write_questions(text: str, out: Path, *, passage: int, questions: int, seed: int) -> None:
    """Write the three tables into the folder `out`."""
    words, rng = re.findall(r"[A-Za-z]+(?:'[a-z]+)?[.,;:!?]*", text), random.Random(seed)
    ranked = Counter(word for word in words if word.isalpha()).most_common(FREQUENT_WORDS)
    frequent, first = dict(ranked), 0
    out.mkdir(parents=True, exist_ok=True)
    for name, share in SHARES.items():
        part = words[first : first + round(share * len(words))]
        first += len(part)
        with (out / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for start in range(0, len(part) - passage, passage):
                document = part[start : start + passage]
                for _ in range(questions):
                    if (made := question_of(document, frequent, rng)) is not None:
                        keys = ("document", "question", "answer", "start")
                        file.write(json.dumps(dict(zip(keys, (" ".join(document), *made)))) + "\n")


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
