"""The service of examples/service: clients at once are streamed what the library writes for each alone."""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import torch

import manyformer as mf
from manyformer.conversion.hugging_face.model_import import save_imported
from manyformer.data.tokenizers.native_tokenizers import ByteTokenizer
from perturbing import perturb

SCRIPT = Path(__file__).parents[2] / "examples/service/serve.py"
CLIENTS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that writes bytes."""
    torch.manual_seed(0)
    tokenizer = ByteTokenizer()
    model: Any = mf.build("transformer-lm", vocab=tokenizer.vocab, dim=32, depth=2, heads=4, max_length=256)
    perturb(model, 0.3)
    folder = tmp_path_factory.mktemp("service") / "model"
    model.tokenizer = tokenizer
    save_imported(model, folder)
    return folder


@pytest.fixture(scope="module")
def port(folder: Path) -> Iterator[int]:
    """The port of the service, which is started as its users start it."""
    command = [sys.executable, str(SCRIPT), str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline().rsplit(":", 1)[1])
        process.terminate()


def ask(port: int, path: str, request: Any) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, request if isinstance(request, bytes) else json.dumps(request))
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


def pieces(body: bytes) -> list[dict[str, Any]]:
    events = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def test_clients_at_once_are_streamed_what_the_library_writes(folder: Path, port: int) -> None:
    requests = [
        {"prompts": ["To be, "[:number]], "max_new": 12 + number, "seed": number} for number in range(1, CLIENTS)
    ] + [{"prompts": ["To", "or not"], "max_new": 9}]
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(lambda request: ask(port, "/stream", request), requests))
    model = mf.load(folder)
    for request, (status, body) in zip(requests, answers, strict=True):
        assert status == 200
        prompts, options = request["prompts"], {name: request[name] for name in request.keys() - {"prompts"}}
        written = ["" for _ in prompts]
        for piece in pieces(body):
            written[piece["prompt"]] += piece["text"]
        assert written == mf.generate(model, prompts, **options).texts
        assert len(pieces(body)) > len(prompts)


def test_several_prompts_are_answered_in_one_batch(folder: Path, port: int) -> None:
    request = {"prompts": ["To be", "or", "not"], "max_new": 8, "temperature": 0.8, "seed": 3}
    status, body = ask(port, "/answers", request)
    expected = mf.generate(mf.load(folder), request["prompts"], max_new=8, temperature=0.8, seed=3)
    assert (status, json.loads(body)) == (200, {"texts": expected.texts, "seeds": list(expected.seeds)})


def test_a_client_that_goes_away_leaves_its_turn_to_others(port: int) -> None:
    for _ in range(6):
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", "/stream", json.dumps({"prompts": ["To"], "max_new": 200}))
        assert connection.getresponse().readline().startswith(b"data: ")
        connection.close()
    assert ask(port, "/answers", {"prompts": ["To"], "max_new": 2})[0] == 200


@pytest.mark.parametrize(
    ("path", "request_body", "message"),
    [
        ("/stream", {"prompts": ["a"], "top_q": 3}, "top_q"),
        ("/stream", {"prompts": ["a"], "max_new": 100_000}, "max_new"),
        ("/stream", {"prompts": ["a"], "max_new": 900}, "256"),
        ("/answers", {"prompts": ["a"], "greedy": True, "top_k": 3}, "greedy always takes the likeliest token"),
        ("/answers", {"prompts": []}, "prompts"),
        ("/answers", b"no JSON", "JSON"),
        ("/answers", b"", "states its length"),
        ("/secrets", {"prompts": ["a"]}, "there is no /secrets"),
    ],
)
def test_a_request_that_makes_no_sense_is_answered_with_a_sentence(
    port: int, path: str, request_body: Any, message: str
) -> None:
    status, body = ask(port, path, request_body)
    assert status == 400
    assert message in json.loads(body)["error"]
