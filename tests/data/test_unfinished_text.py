"""A preparation that is killed at any moment continues where it was, and its files are those of one that was not."""

import fcntl
import json
import os
import signal
from pathlib import Path

import pytest

from manyformer.config import TextData
from manyformer.data import open_data
from manyformer.data.storage.token_shards import ShardWriter, shard_paths
from manyformer.data.text import open_text, text_preparation
from manyformer.data.text.text_preparation import UnfinishedShards
from manyformer.data.tokenizers.native_tokenizers import BPETokenizer
from manyformer.data.tokenizers.tokenizer import Tokenizer

BLOCK = 3000


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:02}.txt").write_text("".join(f"{number} größe {k * 7919 % 1009:x}\n" for k in range(90)))
    return folder


def section(text: Path, tokenizer: str) -> TextData:
    vocab = 300 if tokenizer == "bpe" else None
    return TextData.model_validate({"path": str(text), "length": 16, "tokenizer": tokenizer, "vocab": vocab})


def prepare(data: TextData, cache: Path) -> tuple[dict[str, bytes], list[str]]:
    log: list[str] = []
    cache.mkdir(exist_ok=True)
    open_data(data, "next-token", batch_tokens=64, cache=cache, seed=0, log=log.append)
    names = sorted(path.name for path in cache.iterdir() if path.name != ".lock" and path.name != ".verified.json")
    return {name: (cache / name).read_bytes() for name in names}, log


def kill(data: TextData, cache: Path, block: int) -> None:
    """Prepare in a process that saves its progress at every block and is killed in the one with this number."""
    if not (child := os.fork()):
        Tokenizer.block_characters = BPETokenizer.block_characters = BLOCK
        text_preparation.SAVE_SECONDS = 0.0
        advance, numbers = UnfinishedShards.advance, iter(range(1, block + 1))

        def kill_in_block(shards: UnfinishedShards, count: int) -> None:
            if next(numbers) == block:
                # tokens beyond those of the last record are on disk
                for writer in shards.writers.values():
                    writer.sync()
                os.kill(os.getpid(), signal.SIGKILL)
            advance(shards, count)

        UnfinishedShards.advance = kill_in_block  # type: ignore[method-assign]
        try:
            prepare(data, cache)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("tokenizer", ["char", "bpe"])
def test_killed_twice_and_continued(
    tokenizer: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = section(text, tokenizer)
    kill(data, tmp_path / "killed", 4)
    kill(data, tmp_path / "killed", 3)
    encoded: list[int] = []
    add = ShardWriter.add

    def counting(self: ShardWriter, ids: object, *, starts_document: bool, text: str = "") -> None:
        encoded.append(len(text))
        add(self, ids, starts_document=starts_document, text=text)  # type: ignore[arg-type]

    monkeypatch.setattr(ShardWriter, "add", counting)
    files, log = prepare(data, tmp_path / "killed")
    assert any(line.startswith("continuing after ") for line in log)
    continued = sum(encoded)
    encoded.clear()
    undisturbed, _ = prepare(data, tmp_path / "undisturbed")
    assert files == undisturbed
    # five blocks were saved
    assert continued <= sum(encoded) - 5 * BLOCK


@pytest.mark.parametrize("file", ["train.tokens", ".progress/shards.json", ".progress/train.lengths"])
@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_damaged_progress_is_made_again(file: str, damage: str, text: Path, tmp_path: Path) -> None:
    data = section(text, "char")
    kill(data, tmp_path / "killed", 5)
    (path,) = (tmp_path / "killed").glob(f".unfinished-*/{file}")
    content = path.read_bytes()
    path.write_bytes(content[:20] if damage == "cut" else content[:40] + bytes([content[40] ^ 1]) + content[41:])
    assert prepare(data, tmp_path / "killed")[0] == prepare(data, tmp_path / "undisturbed")[0]


def test_other_text_does_not_continue(text: Path, tmp_path: Path) -> None:
    data = section(text, "char")
    kill(data, tmp_path / "killed", 5)
    (text / "00.txt").write_text("other text\n" * 100)
    files, log = prepare(data, tmp_path / "killed")
    assert not any(line.startswith("continuing") for line in log)
    assert files == prepare(data, tmp_path / "undisturbed")[0]


def test_an_interruption_keeps_and_a_mistake_removes_the_unfinished_folder(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = section(text, "char")
    for error, remaining in ((KeyboardInterrupt, 1), (ValueError, 0)):

        def stop(*_: object, error: type[BaseException] = error) -> None:
            raise error

        monkeypatch.setattr(open_text, "_add_pieces", stop)
        with pytest.raises(error):
            prepare(data, tmp_path / "run")
        assert len(list((tmp_path / "run").glob(".unfinished-*"))) == remaining


@pytest.mark.parametrize("is_locked", [False, True])
def test_what_a_kill_after_the_last_file_left_is_removed(is_locked: bool, text: Path, tmp_path: Path) -> None:
    """The folder of a preparation whose files are all in the cache, unless some process prepares data there."""
    data, cache = section(text, "char"), tmp_path / "cache"
    expected, _ = prepare(data, cache)
    record = json.loads((cache / "prepared.json").read_text())
    rest = cache / f".unfinished-{record['key'][:16]}" / ".progress"
    rest.mkdir(parents=True)
    (rest / "train.lengths").write_bytes(b"of the killed process")
    other = cache / ".unfinished-0123456789abcdef"
    other.mkdir()
    with (cache / ".lock").open("ab") as lock:
        if is_locked:
            fcntl.flock(lock, fcntl.LOCK_EX)
        open_data(data, "next-token", batch_tokens=64, cache=cache, seed=0, log=print)
    assert rest.is_dir() == is_locked
    # what is unfinished of other settings may still go on
    assert other.is_dir()
    assert {name: (cache / name).read_bytes() for name in expected} == expected


def test_a_continued_shard_has_the_facts_of_one_written_at_once(tmp_path: Path) -> None:
    pieces = [([1, 7], True), ([8, 2], False), ([], True), ([1, 300, 2], True)]
    for folder, stops in (("once", ()), ("continued", (1, 3))):
        (tmp_path / folder).mkdir()
        files = [path.open("w+b") for path in shard_paths(tmp_path / folder, "train")]
        writer = ShardWriter(*files, 400)
        for number, (ids, starts_document) in enumerate(pieces):
            if number in stops:
                facts = writer.facts()
                writer.add([9, 9], starts_document=True, text="lost")
                for file in files:
                    file.flush()
                writer = ShardWriter(*files, 400)
                writer.resume(facts)
            writer.add(ids, starts_document=starts_document, text="ab")
        (tmp_path / f"{folder}.facts").write_text(str(writer.close()))
        for file in files:
            file.close()
    assert (tmp_path / "once.facts").read_text() == (tmp_path / "continued.facts").read_text()
    for once, continued in zip(
        shard_paths(tmp_path / "once", "train"), shard_paths(tmp_path / "continued", "train"), strict=True
    ):
        assert once.read_bytes() == continued.read_bytes()
