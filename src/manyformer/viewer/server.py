"""A server for one person on one machine: the page, and views of other texts on demand."""

import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any, final

from pydantic import ValidationError

from manyformer.errors import UserError
from manyformer.files.json_text import json_text
from manyformer.viewer.live_view import ServedModel, ViewRequest, live_page_data
from manyformer.viewer.page import render_live_page

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
