"""While a library works it cannot ask, and reaches no network that nobody asked for; afterwards all is as before."""

import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from manyformer.base.errors import UserError
from manyformer.base.libraries import library_call
from manyformer.data.text.pair_tables import HubDataset

ASK = """
import os, subprocess, sys
from manyformer.base.libraries import library_call
with library_call():
    try:
        answer = input("run the code? ")
    except EOFError:
        answer = None
    rest = os.read(0, 10)
    child = subprocess.run([sys.executable, "-c", "import sys; print(sys.stdin.read())"], stdout=subprocess.PIPE)
print([answer, rest, child.stdout.strip(), sys.stdin.read()])
"""


def test_a_question_finds_no_answer_and_takes_nothing_of_the_users_data() -> None:
    done = subprocess.run([sys.executable, "-c", ASK], input=b"yes\nto be\n", capture_output=True, check=True)
    assert done.stdout.decode().endswith("[None, b'', b'', 'yes\\nto be\\n']\n"), done.stderr


def test_a_closed_standard_input_stays_closed() -> None:
    code = "import os; os.close(0)" + ASK.replace("rest = os.read(0, 10)", "rest = b''").partition("    child")[0]
    code += "\nprint(answer)\ntry: os.fstat(0)\nexcept OSError: print('closed')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, stdin=subprocess.DEVNULL)
    assert done.stdout.decode().split() == ["run", "the", "code?", "None", "closed"]


def test_switches_of_the_network_and_standard_input_come_back() -> None:
    import datasets
    from huggingface_hub import constants, is_offline_mode

    before, stdin, environment = is_offline_mode(), sys.stdin, dict(os.environ)
    with suppress(KeyError), library_call():
        with library_call():
            assert is_offline_mode()
        assert is_offline_mode()
        assert datasets.config.HF_HUB_OFFLINE
        raise KeyError
    assert (is_offline_mode(), sys.stdin, dict(os.environ)) == (before, stdin, environment)
    with library_call(online=True):
        assert constants.HF_HUB_OFFLINE is before


def test_calls_of_several_threads_end_in_any_order() -> None:
    from huggingface_hub import is_offline_mode

    before, stdin = is_offline_mode(), sys.stdin
    entered, leave = threading.Event(), threading.Event()

    def work() -> None:
        with library_call():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=work)
    with library_call():
        thread.start()
        entered.wait()
    assert is_offline_mode()
    leave.set()
    thread.join()
    assert (is_offline_mode(), sys.stdin) == (before, stdin)


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The addresses that are looked up or connected to, none of which is reached."""
    asked: list[Any] = []

    def refuse(*arguments: Any, **_: Any) -> Any:
        asked.append(arguments)
        raise OSError("there is no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return asked


def test_a_folder_of_data_runs_no_script_and_reaches_no_network(
    tmp_path: Path, connections: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    fired = tmp_path / "fired"
    code = f"open({str(fired)!r}, 'w')\n"
    scripts, addresses, pickles = (tmp_path / name for name in ("scripts", "addresses", "pickles"))
    for folder in (scripts, addresses, pickles):
        folder.mkdir()
        (folder / f"{folder.name}.py").write_text(code)
    (scripts / "loading.py").write_text(code)
    head = "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: "
    (addresses / "README.md").write_text(f"{head}https://127.0.0.1:9/planted.csv\n---\n")
    (pickles / "train.pkl").write_bytes(b"cos\nsystem\n(S'touch " + str(fired).encode() + b"'\ntR.")
    for folder in (scripts, addresses, pickles):
        with pytest.raises(UserError, match="this data set cannot be loaded"):
            HubDataset(f"hf:{folder}")
    assert not fired.exists()
    assert not connections


def test_pictures_of_a_data_set_are_not_fetched_from_the_addresses_that_it_names(
    tmp_path: Path, connections: list[Any]
) -> None:
    import datasets

    picture = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    features = datasets.Features({"text": datasets.Value("string"), "picture": picture})
    records = {"text": ["to be"], "picture": [{"path": "http://127.0.0.1:9/planted.png", "bytes": None}]}
    datasets.Dataset.from_dict(records, features=features).save_to_disk(tmp_path / "saved")
    # what decodes pictures would ask for the address when it is written
    description = tmp_path / "saved" / "dataset_info.json"
    content = json.loads(description.read_text())
    content["features"]["picture"] = {"_type": "Image"}
    description.write_text(json.dumps(content))
    assert isinstance(datasets.load_from_disk(tmp_path / "saved").features["picture"], datasets.Image)
    assert [row.cells for row in HubDataset(f"hf:{tmp_path / 'saved'}").rows(["text"])] == [("to be",)]
    assert not connections


def test_only_names_of_the_hub_may_reach_it(tmp_path: Path, connections: list[Any]) -> None:
    """A folder that is missing is a mistake, not a request."""
    for name in (str(tmp_path / "nowhere"), "./nowhere", "data/of/mine"):
        with pytest.raises(UserError, match="this data set cannot be loaded"):
            HubDataset(f"hf:{name}")
    assert not connections
