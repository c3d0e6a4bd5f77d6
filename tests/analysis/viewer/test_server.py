"""The server of the page: whom it answers, and what switching a head off changes."""

import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from pages import served, trained

from manyformer.analysis.viewer.server import MAX_REQUEST_BYTES, ServedModel, ViewRequest, ViewServer, live_page_data
from manyformer.base.errors import UserError
from manyformer.nn.attention.head_gates import gated_heads

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[ViewServer]:
    torch.manual_seed(0)
    with served(ServedModel("run", trained("transformer-lm"))) as started:
        yield started


def ask(server: ViewServer, method: str, path: str, body: str = "", **headers: str) -> tuple[int, Any]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    with closing(http.client.HTTPConnection("127.0.0.1", server.server_port)) as connection:
        connection.request(method, path, body or None, {**(JSON if method == "POST" else {}), **named})
        response = connection.getresponse()
        content = response.read().decode()
    is_json = response.headers.get_content_type() == "application/json"
    return response.status, json.loads(content) if is_json else content


def test_the_page_may_ask_its_own_server_alone(server: ViewServer) -> None:
    status, page = ask(server, "GET", "/")
    assert status == 200
    assert "connect-src 'self'" in page
    assert server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Origin": "null"}])
@pytest.mark.parametrize(("method", "path"), [("GET", "/"), ("POST", "/view")])
def test_pages_of_other_sites_are_refused(server: ViewServer, method: str, path: str, headers: dict[str, str]) -> None:
    status, answer = ask(server, method, path, '{"text": "abc"}', **headers)
    assert (status, answer) == (403, {"error": "this server answers its own page alone"})


@pytest.mark.parametrize(
    ("path", "body", "status", "sentence"),
    [
        ("/other", "{}", 404, "JSON posted to /view"),
        ("/view", '{"text": ""}', 400, "text: "),
        ("/view", '{"text": "abc", "more": 1}', 400, "more: Extra inputs are not permitted"),
        ("/view", "not json", 400, "Invalid JSON"),
        ("/view", '{"text": "abc", "answer": "abc"}', 400, "only an encoder-decoder writes an answer"),
        ("/view", '{"text": "abc", "off": [{}, {}]}', 400, "heads are given for 2 runs, but there are 1"),
        ("/view", '{"text": "abc", "off": [{"body.0.attention": [2]}]}', 400, "has no heads 2 of 'body.0.attention'"),
        ("/view", '{"text": "abc", "off": [{"nobody": [0]}]}', 400, "has no heads 0 of 'nobody'"),
        ("/view", '{"text": "' + "a" * MAX_REQUEST_BYTES + '"}', 413, "which may be 1,048,576 bytes"),
    ],
)
def test_bad_requests_get_a_sentence(server: ViewServer, path: str, body: str, status: int, sentence: str) -> None:
    try:
        answer = ask(server, "POST", path, body)
    except (BrokenPipeError, ConnectionResetError):
        # it may close the connection before a body that is too long has been sent
        assert status == 413
        return
    assert answer[0] == status
    assert sentence in answer[1]["error"]


def test_a_form_of_another_site_cannot_ask(server: ViewServer) -> None:
    assert ask(server, "POST", "/view", '{"text": "abc"}', Content_Type="text/plain")[0] == 404


def test_heads_that_are_off_change_what_comes_next(server: ViewServer) -> None:
    model: Any = server.models[0].model
    request = json.dumps({"text": "abc", "off": [{"body.0.attention": [1]}]})
    status, data = ask(server, "POST", "/view", request)
    assert status == 200
    [run] = data["runs"]
    tokens = torch.tensor([[1, *model.tokenizer.encode("abc")]])
    with torch.no_grad():
        before = model(tokens).logits[0, -1].softmax(-1)
        with gated_heads(model, {"body.0.attention": torch.tensor([1.0, 0.0])}):
            gated = model(tokens).logits[0, -1].softmax(-1)
    order = gated.topk(5).indices
    listed = run["outcome"]["tokens"]
    assert [row[1] for row in listed] == pytest.approx(gated[order].tolist(), rel=1e-4)
    assert [row[2] for row in listed] == pytest.approx(before[order].tolist(), rel=1e-4)
    assert [layer["gated"] for layer in run["maps"]] == [True, True]
    # the model itself stays as it is
    assert ask(server, "POST", "/view", '{"text": "abc"}')[1]["runs"][0]["outcome"]["tokens"][0][2] is None


def test_a_translation_without_a_head_stands_beside_the_whole_one() -> None:
    models = [ServedModel("run", trained("transformer"), {"encoder.0.attention": ("positional -1", "")})]
    off = ({"encoder.0.attention": (0, 1)},)
    [run] = live_page_data(models, ViewRequest(text="abc", off=off))["runs"]
    assert run["outcome"]["title"] == "Translation"
    assert isinstance(run["outcome"]["before"], str)
    assert run["maps"][0]["labels"] == ["positional -1", ""]
    [run] = live_page_data(models, ViewRequest(text="abc", answer="ba", off=off))["runs"]
    assert run["outcome"] is None


def test_a_port_in_use_is_refused(server: ViewServer) -> None:
    with pytest.raises(UserError, match=f"port {server.server_port} of 127.0.0.1 cannot be used: .* another --port"):
        ViewServer(server.models, "abc", port=server.server_port)


def test_no_site_may_show_the_page_in_a_frame(server: ViewServer) -> None:
    for method, path in (("GET", "/"), ("GET", "/other")):
        with closing(http.client.HTTPConnection("127.0.0.1", server.server_port)) as connection:
            connection.request(method, path)
            headers = connection.getresponse().headers
        assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"


def test_a_text_that_is_longer_than_the_model_gets_a_sentence() -> None:
    model = trained("transformer-lm")
    model.max_length = 8
    with served(ServedModel("run", model)) as server:
        status, answer = ask(server, "POST", "/view", '{"text": "abcabcabcabc"}')
        assert status in (400, 422)
        assert "8" in answer["error"]
        assert ask(server, "POST", "/view", '{"text": "abc"}')[0] == 200


def test_the_server_goes_on_after_a_model_that_fails(
    server: ViewServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of order")

    with monkeypatch.context() as patch:
        patch.setattr("manyformer.analysis.viewer.server.live_page_data", fail)
        assert ask(server, "POST", "/view", '{"text": "abc"}') == (
            500,
            {"error": "the model failed: RuntimeError: out of order"},
        )
    assert "Traceback" not in capfd.readouterr().err
    assert ask(server, "POST", "/view", '{"text": "abc"}')[0] == 200


def test_many_requests_at_once_wait_in_the_queue_of_the_system(server: ViewServer) -> None:
    """A queue of five makes the system drop the others, which a browser sends again after seconds."""
    sockets = [socket.create_connection(("127.0.0.1", server.server_port), timeout=10) for _ in range(64)]
    request = f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n".encode()
    for connection in sockets:
        connection.sendall(request)
    heads = []
    for connection in sockets:
        with connection:
            heads.append(connection.recv(12))
    assert heads == [b"HTTP/1.0 200"] * 64
    assert server.request_queue_size >= 64


def test_a_browser_that_leaves_before_its_answer_is_no_error_of_the_server(
    server: ViewServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for left in (BrokenPipeError(), ConnectionResetError()):
        with monkeypatch.context() as patch:
            patch.setattr("manyformer.analysis.viewer.server._ViewHandler._answer", _raising(left))
            with pytest.raises((http.client.HTTPException, ConnectionError)):
                ask(server, "GET", "/")
    assert capfd.readouterr().err == ""
    assert ask(server, "GET", "/")[0] == 200


def test_an_answer_before_the_end_of_a_request_arrives(server: ViewServer) -> None:
    """A connection that is closed with unread bytes is reset, and a client that still writes never reads its answer."""
    head = f"POST /view HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as connection:
        connection.sendall(f"{head}Content-Length: {10**18}\r\n\r\n".encode())
        for _ in range(64):
            connection.sendall(bytes(1 << 17))
        assert connection.recv(12) == b"HTTP/1.0 413"


def test_a_client_that_never_ends_its_request_is_left(server: ViewServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyformer.analysis.viewer.server.LINGER_SECONDS", 0.1)
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as connection:
        connection.sendall(f"GET /none HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n".encode())
        while connection.recv(1 << 16):
            pass
        # the other end is closed, and says so as soon as it is written to
        with pytest.raises(ConnectionError):
            _write_for(connection, seconds=10)


def _write_for(connection: socket.socket, *, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        connection.sendall(b"more")
        time.sleep(0.02)


def _raising(error: OSError) -> Any:
    def answer(*_: object) -> None:
        raise error

    return answer
