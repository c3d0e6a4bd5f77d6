"""A small service with the standard library: one model, many clients, texts that are streamed as they are generated.

    python examples/service/serve.py runs/lm-stdlib --port 8000
    curl -N localhost:8000/stream -d '{"prompts": ["def "], "temperature": 0.8, "max_new": 40}'
    curl localhost:8000/answers -d '{"prompts": ["def ", "class "], "max_new": 20}'

`/stream` answers with server-sent events, a piece of text each, also for several prompts; `/answers` with all texts at
once. Each request is a thread, and threads share the model. It listens on this machine alone: put a server that knows
clients, such as nginx, before it.
"""

import argparse
import json
from collections.abc import Generator, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Semaphore
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.inference.generate import Decoding, StreamPiece, decoding_from_options, generate, stream

MAX_REQUEST_BYTES = 1 << 16
STALLED_SECONDS = 30
"""After so long without a byte from a client, or to it, the connection is closed."""


class TextRequest(BaseModel):
    """What a client sends; other names, and values out of range, are refused."""

    model_config = ConfigDict(extra="forbid")

    prompts: Annotated[list[str], Field(min_length=1, max_length=32)]
    max_new: Annotated[int, Field(ge=1, le=1000)] = 100
    greedy: bool | None = None
    temperature: Annotated[float | None, Field(ge=0)] = None
    top_k: Annotated[int | None, Field(ge=1)] = None
    top_p: float | None = None
    seed: Annotated[int | None, Field(ge=0, lt=1 << 63)] = None
    stop: Annotated[tuple[str, ...], Field(max_length=4)] = ()

    @property
    def decoding(self) -> Decoding:
        """The options as `mf.generate` takes them, which mean the same there and on the command line."""
        return decoding_from_options(**self.model_dump(exclude={"prompts"}))


class TextServer(ThreadingHTTPServer):
    """Answers requests with one model, at most `texts` of them at a time; the others wait."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, model: Any, port: int, texts: int = 4) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.model = model
        self.turns = Semaphore(texts)


class Handler(BaseHTTPRequestHandler):
    """One request, in a thread of its own."""

    server: TextServer
    timeout = STALLED_SECONDS

    def do_POST(self) -> None:
        try:
            request = self.read_request()
            with self.server.turns:
                if self.path == "/stream":
                    self.send_pieces(request)
                else:
                    self.send_answers(request)
        except (ValidationError, UserError) as error:
            self.send_json(400, {"error": str(error)})
        except (ConnectionError, TimeoutError):
            # the client has gone: nobody needs the rest of its text
            self.close_connection = True

    def read_request(self) -> TextRequest:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or len(length) > 6 or not 0 < int(length) <= MAX_REQUEST_BYTES:
            raise UserError(f"a request states its length, of 1 to {MAX_REQUEST_BYTES:,} bytes")
        if self.path not in ("/stream", "/answers"):
            raise UserError(f"there is no {self.path}: ask /stream or /answers")
        return TextRequest.model_validate_json(self.rfile.read(int(length)))

    def send_pieces(self, request: TextRequest) -> None:
        # what is wrong with a request is said here, before the answer begins
        pieces = stream(self.server.model, request.prompts, request.decoding)
        # closed also where the client has gone, so that the model stops
        with closing(as_events(pieces)) as events:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream; charset=utf-8")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            for event in events:
                self.wfile.write(event)
        self.wfile.write(b"data: [DONE]\n\n")

    def send_answers(self, request: TextRequest) -> None:
        # one batch: a step of the model is shared by all prompts
        result = generate(self.server.model, request.prompts, decoding=request.decoding)
        self.send_json(200, {"texts": result.texts, "seeds": result.seeds})

    def send_json(self, code: int, content: dict[str, Any]) -> None:
        body = json.dumps(content, ensure_ascii=False).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def as_events(pieces: Iterator[StreamPiece]) -> Generator[bytes]:
    """Each piece with text, or with the reason why its text ends, as a server-sent event."""
    for piece in pieces:
        if piece.text or piece.finish:
            event = {"prompt": piece.row, "text": piece.text, "finish": piece.finish}
            yield f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode()


def main() -> None:
    """Serve the model in a folder until Ctrl-C."""
    parser = argparse.ArgumentParser(description="Serve a trained language model.")
    parser.add_argument("folder", help="the folder of a run or a saved model")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--texts", type=int, default=4, help="requests that are answered at a time; the others wait")
    arguments = parser.parse_args()
    model = mf.load(arguments.folder).to(arguments.device)
    server = TextServer(model, arguments.port, arguments.texts)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


if __name__ == "__main__":
    main()
