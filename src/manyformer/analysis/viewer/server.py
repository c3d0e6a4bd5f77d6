"""A server for one person on one machine: the page, and views of other texts on demand.

A view may have some heads switched off, and says what that changes in the model's answer."""

import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Annotated, Any, NamedTuple, final

import torch
from annotated_types import Ge, Len
from jaxtyping import Float
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from manyformer.analysis.figures.token_work import full_token_labels, passes_over_text
from manyformer.analysis.viewer.model_view import HeadLabels, view_text
from manyformer.analysis.viewer.page import render_live_page
from manyformer.base.errors import UserError
from manyformer.base.files.json_text import json_text
from manyformer.inference.generate import translate
from manyformer.inference.generate.generate import read_write_tokenizers
from manyformer.inference.generate.protocol import TokenizerProtocol, TranslatesText
from manyformer.models import Model
from manyformer.models.model import eval_mode
from manyformer.nn.attention.head_gates import attention_heads, gated_heads
from manyformer.nn.core import no_watch
from manyformer.recipes.parts.registry import task_of

ADDRESS = "127.0.0.1"

STALLED_SECONDS = 60
"""After so long without a byte a connection is closed."""

LINGER_SECONDS = 2.0
"""How long the rest of a request is read that was answered before its end."""

HEADERS = {
    "Cache-Control": "no-store",
    # no page of another site may show this one in a frame, and lead clicks to it
    "Content-Security-Policy": "frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
"""What every answer says besides its type and length."""

MAX_REQUEST_BYTES = 1 << 20
"""The largest request; a page sends one text."""

LISTED_TOKENS = 5
"""The number of next tokens that are shown."""

HeadNumbers = dict[str, tuple[Annotated[int, Ge(0)], ...]]


class ViewRequest(BaseModel):
    """What the page asks for: a text, the target of an encoder-decoder, and the heads of each run to switch off."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    text: Annotated[str, Len(1)]
    answer: str | None = None
    off: tuple[HeadNumbers, ...] = ()


class ServedModel(NamedTuple):
    """A model, its name, and the labels of its heads if they are known."""

    name: str
    model: Model
    labels: HeadLabels | None = None


def live_page_data(models: Sequence[ServedModel], request: ViewRequest) -> dict[str, Any]:
    """The data of a page with all `models`, which switches off the heads of the request.

    Raises UserError for heads that a model does not have, and for a text that it cannot read."""
    switched_off = request.off or ({},) * len(models)
    if len(switched_off) != len(models):
        raise UserError(f"heads are given for {len(switched_off)} runs, but there are {len(models)}")
    runs = [_live_view(served, request, off) for served, off in zip(models, switched_off)]
    takes_answer = any(task_of(served.model).takes_source for served in models)
    return {"text": request.text, "answer": request.answer, "takesAnswer": takes_answer, "runs": runs}


def _live_view(served: ServedModel, request: ViewRequest, off: HeadNumbers) -> dict[str, Any]:
    model = served.model
    gates = _head_gates(model, off)
    with torch.no_grad(), eval_mode(model):
        whole = None
        if gates:
            whole = _outcome(model, request.text, request.answer)
        with gated_heads(model, gates):
            outcome = _outcome(model, request.text, request.answer)
            if outcome is None or outcome.translation is None:
                answer = request.answer
            else:
                answer = outcome.translation
            view = view_text(model, request.text, answer, name=served.name, labels=served.labels)
    return {**view.as_json(), "outcome": outcome and outcome.as_json(whole)}


def _head_gates(model: Model, off: HeadNumbers) -> dict[str, Tensor]:
    """Gates that are 0 for the heads that are off. Raises UserError for a part or head that the model does not have."""
    layers = attention_heads(model)
    gates = dict[str, Tensor]()
    for part, heads in off.items():
        if part not in layers or max(heads, default=0) >= layers[part].heads:
            raise UserError(f"the model has no heads {', '.join(map(str, heads))} of '{part}' that can be switched off")
        gates[part] = torch.ones(layers[part].heads, device=model.device)
        gates[part][list(heads)] = 0.0
    return gates


def _outcome(model: Model, text: str, answer: str | None) -> "_Outcome | None":
    """The translation of the text, or the probabilities of the next token; None for a given answer and other tasks."""
    if isinstance(model, TranslatesText):
        if answer is None:
            return _Outcome(translation=translate(model, [text], tokenizer=model.tokenizer)[0])
        return None
    if task_of(model).generates != "continuation":
        return None
    output: Any = passes_over_text(model, text)[-1].run(no_watch)
    return _Outcome(output.logits[0, -1].float().softmax(-1), read_write_tokenizers(model.tokenizer).write)


class _Outcome(NamedTuple):
    """What a model makes of a text: a translation, or the probability of each token to be the next one."""

    probabilities: Float[Tensor, " v"] | None = None
    tokenizer: TokenizerProtocol | None = None
    translation: str | None = None

    def as_json(self, whole: "_Outcome | None") -> dict[str, Any]:
        """The outcome as the page reads it, with that of the `whole` model, without heads switched off."""
        if self.probabilities is None or self.tokenizer is None:
            return {"title": "Translation", "text": self.translation, "before": whole and whole.translation}
        tokens = self.probabilities.topk(min(LISTED_TOKENS, len(self.probabilities))).indices
        earlier = whole and whole.probabilities
        columns = (
            full_token_labels(tokens.tolist(), self.tokenizer),
            self.probabilities[tokens].tolist(),
            [None] * len(tokens) if earlier is None else earlier[tokens].tolist(),
        )
        return {"title": "Next token", "tokens": list(zip(*columns))}


@final
class ViewServer(ThreadingHTTPServer):
    """Serves the page of `models` on `port` of 127.0.0.1, or on a free port for 0; `serve_forever` answers.

    Requests that name another host are refused, because a page of another site could have sent them (DNS rebinding),
    and so are those with more than 1 MB. Raises UserError for a port that is in use, and for a text that the models
    cannot read.
    """

    daemon_threads = True
    # Python's default of 5 makes the system drop the others of many requests at once, which come again after seconds
    request_queue_size = 128

    def __init__(self, models: Sequence[ServedModel], text: str, answer: str | None = None, *, port: int = 0) -> None:
        self.models = models
        self._lock = Lock()
        # rendered before the port is taken: a text that cannot be read fails without a server left behind
        self.page = render_live_page(self.page_data(ViewRequest(text=text, answer=answer))).encode()
        try:
            super().__init__((ADDRESS, port), _ViewHandler)
        except OSError as error:
            raise UserError(f"port {port} of {ADDRESS} cannot be used: {error.strerror}; give another --port") from None

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Pass over a browser that has left before its answer, which is no error of the server; print any other."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection after its answer, and after what else the client sends for a moment.

        A connection that is closed with unread bytes is reset, which takes an answer away that has not been read yet.
        """
        end = time.monotonic() + LINGER_SECONDS
        with suppress(OSError):
            # the client sees the end of the answer, and may still send
            request.shutdown(socket.SHUT_WR)
            request.settimeout(LINGER_SECONDS)
            while request.recv(1 << 16) and time.monotonic() < end:
                pass
        self.close_request(request)

    def page_data(self, request: ViewRequest) -> dict[str, Any]:
        """The data for one request; one at a time, because heads are switched off in the models themselves."""
        with self._lock:
            return live_page_data(self.models, request)


class _ViewHandler(BaseHTTPRequestHandler):
    server: ViewServer
    timeout = STALLED_SECONDS

    def do_GET(self) -> None:
        if not self._is_own_host():
            return
        if self.path == "/":
            self._answer(200, self.server.page, "text/html; charset=utf-8")
        else:
            self._refuse(404, "there is only one page here: /")

    def do_POST(self) -> None:
        if not self._is_own_host():
            return
        # without a length, or in chunks, the body would be read until the client tires
        length = self.headers.get("Content-Length", "")
        if self.path != "/view" or self.headers.get_content_type() != "application/json":
            self._refuse(404, "views are asked for by JSON posted to /view")
        elif not length.isdecimal() or int(length) > MAX_REQUEST_BYTES:
            self._refuse(413, f"a request must state its length, which may be {MAX_REQUEST_BYTES:,} bytes")
        else:
            self._answer_view(self.rfile.read(int(length)))

    def _answer_view(self, body: bytes) -> None:
        try:
            data = self.server.page_data(ViewRequest.model_validate_json(body))
        except ValidationError as error:
            problem = error.errors()[0]
            self._refuse(400, f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}")
        except UserError as error:
            self._refuse(400, str(error))
        except ValueError as error:
            # a possible request, of a text that the model cannot read: one that is too long for it, for example
            self._refuse(422, str(error))
        except Exception as error:
            # whatever a model does, the page says it, and the server goes on
            self._refuse(500, f"the model failed: {type(error).__name__}: {error}")
        else:
            self._answer(200, json_text(data, ensure_ascii=True).encode(), "application/json")

    def _is_own_host(self) -> bool:
        """Whether the request names this server, and comes from its own page if it says where it comes from."""
        names = {f"{host}:{self.server.server_port}" for host in (ADDRESS, "localhost")}
        # a simple request of another site needs no permission of this one, but names where it comes from
        origin = self.headers.get("Origin")
        is_own = self.headers.get("Host") in names and origin in {None, *(f"http://{name}" for name in names)}
        if not is_own:
            self._refuse(403, "this server answers its own page alone")
        return is_own

    def _refuse(self, status: int, sentence: str) -> None:
        # the rest of the request is not read as another one
        self.close_connection = True
        self._answer(status, json_text({"error": sentence}, ensure_ascii=True).encode(), "application/json")

    def _answer(self, status: int, content: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: they contain the texts."""
