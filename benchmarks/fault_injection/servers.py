"""The page that `view --serve` serves, asked by whoever has found its port."""

import json
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from fault_injection import scenarios
from fault_injection.forked_commands import RunningCommand, Surroundings
from fault_injection.outcomes import NotRun, Outcome, Trial
from fault_injection.workshop import Workshop

FAMILY = "server"
COMMAND = ("view", "run", "to be", "--serve", "--port", "0")
REFUSED = range(400, 500)
MANY = 32


@dataclass(frozen=True)
class Answer:
    """What came back: the number of the status, 0 if nothing did, and everything."""

    status: int
    text: str


def ask(port: int, request: bytes, seconds: float, *, close: bool = True) -> Answer:
    """Send bytes to the server and read until it closes the connection."""
    parts: list[bytes] = []
    end = time.monotonic() + seconds
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
            connection.sendall(request)
            if close:
                connection.shutdown(socket.SHUT_WR)
            while time.monotonic() < end and (part := connection.recv(1 << 16)):
                parts.append(part)
                if _is_complete(b"".join(parts)):
                    break
    except OSError:
        pass
    text = b"".join(parts).decode("latin-1")
    status = re.match(r"HTTP/1\.[01] (\d{3})", text)
    return Answer(int(status[1]) if status else 0, text)


def _is_complete(answer: bytes) -> bool:
    head, separator, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    return bool(separator and length and len(body) >= int(length[1]))


def post(port: int, body: bytes, *, host: str | None = None, extra: str = "", length: str | None = None) -> bytes:
    """A request for a view."""
    host = f"127.0.0.1:{port}" if host is None else host
    length = str(len(body)) if length is None else length
    head = f"POST /view HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n"
    return f"{head}Connection: close\r\n{extra}\r\n".encode() + body


def get(port: int, *, host: str | None = None, path: str = "/", method: str = "GET", extra: str = "") -> bytes:
    """A request for the page."""
    host = f"127.0.0.1:{port}" if host is None else host
    return f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{extra}\r\n".encode()


def view(text: object, **fields: object) -> bytes:
    """The JSON of a request."""
    return json.dumps({"text": text, **fields}).encode()


REQUESTS: dict[str, tuple[Callable[[int], bytes], Callable[[int], bool]]] = {
    "the page": (get, lambda status: status == 200),
    "a view": (lambda port: post(port, view("to be")), lambda status: status == 200),
    "a text longer than the model": (lambda port: post(port, view("to be " * 100)), lambda status: status == 422),
    "a text of a million letters": (lambda port: post(port, view("x" * 1_000_000)), lambda status: status in REFUSED),
    "an empty text": (lambda port: post(port, view("")), lambda status: status == 400),
    "a text that is a number": (lambda port: post(port, view(5)), lambda status: status == 400),
    "a head that there is not": (lambda port: post(port, view("to be", off=[[0, 99]])), lambda status: status == 400),
    "an unknown field": (lambda port: post(port, view("to be", more=1)), lambda status: status == 400),
    "no JSON": (lambda port: post(port, b"{" * 100), lambda status: status == 400),
    "JSON nested deep": (lambda port: post(port, b"[" * 100_000), lambda status: status == 400),
    "half a surrogate": (lambda port: post(port, b'{"text": "\\ud800"}'), lambda status: status in (200, *REFUSED)),
    "control characters": (lambda port: post(port, view("\x00\x1b[31m")), lambda status: status in (200, *REFUSED)),
    "a foreign host": (lambda port: get(port, host="evil.example"), lambda status: status == 403),
    "no host": (lambda port: b"GET / HTTP/1.0\r\n\r\n", lambda status: status == 403),
    "a foreign origin": (
        lambda port: post(port, view("to be"), extra="Origin: http://evil.example\r\n"),
        lambda status: status == 403,
    ),
    "an origin that is null": (
        lambda port: post(port, view("to be"), extra="Origin: null\r\n"),
        lambda status: status == 403,
    ),
    "another path": (lambda port: get(port, path="/../../etc/passwd"), lambda status: status in REFUSED),
    "a path of 100,000 letters": (lambda port: get(port, path="/" + "x" * 100_000), lambda status: status in REFUSED),
    "another method": (lambda port: get(port, method="DELETE"), lambda status: status in (*REFUSED, 501)),
    "a method that is none": (lambda port: get(port, method="\x01\x02"), lambda status: status in (*REFUSED, 501)),
    "a thousand headers": (
        lambda port: get(port, extra="".join(f"X-{n}: y\r\n" for n in range(1000))),
        lambda status: status in (200, *REFUSED),
    ),
    "a length that is no number": (lambda port: post(port, b"{}", length="ten"), lambda status: status in REFUSED),
    "a length below zero": (lambda port: post(port, b"{}", length="-5"), lambda status: status in REFUSED),
    "a length of 10^18": (lambda port: post(port, b"{}", length=str(10**18)), lambda status: status in REFUSED),
    "a length that is too long": (lambda port: post(port, b"{}", length="500"), lambda status: status in (0, *REFUSED)),
    "no end of the headers": (lambda port: b"GET / HTTP/1.1\r\nHost: ", lambda status: status in (0, *REFUSED)),
    "bytes that are no request": (lambda port: bytes(range(256)), lambda status: status in (0, *REFUSED)),
}
"""Requests, and the status that is right."""
TOGETHER = ("many at once", "many that never end", "no frame of another page")


def carry_out(workshop: Workshop, number: int) -> Trial | NotRun:
    """A server, one odd request and then an ordinary one, which must still be answered."""
    deeds = [*REQUESTS, *TOGETHER]
    workshop.chance(FAMILY).shuffle(deeds)
    deed = deeds[number % len(deeds)]
    workshop.set_up(scenarios.LANGUAGE, finished=True)
    began = time.monotonic()
    running = RunningCommand(COMMAND, workshop.here, Surroundings(environment={"PYTHONUNBUFFERED": "1"}))
    try:
        port = _port_of(running, workshop.timeout)
        outcome, detail = _ask_for(deed, port, workshop.timeout) if port else ("hung", "the server does not begin")
    finally:
        running.send_quietly()
        result = running.wait(workshop.timeout)
    if "Traceback" in result.errors and outcome in ("harmless", "named"):
        outcome, detail = "crashed", result.errors.strip().splitlines()[-1][:300]
    if result.code not in (0, 130, -2) and outcome in ("harmless", "named"):
        outcome, detail = "crashed", f"exit code {result.code} after Ctrl-C"
    return Trial(FAMILY, number, deed, outcome, str(result), detail, time.monotonic() - began)


def _port_of(running: RunningCommand, seconds: float) -> int | None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and running.ended(0) is None:
        if match := re.search(r"http://127\.0\.0\.1:(\d+)/", running.said()):
            return int(match[1])
        time.sleep(0.05)
    return None


def _ask_for(deed: str, port: int, seconds: float) -> tuple[Outcome, str]:
    """The outcome of the odd request, and of an ordinary one after it."""
    if deed == "many at once":
        answers: list[Answer] = []
        threads = [
            threading.Thread(target=lambda: answers.append(ask(port, post(port, view("to be")), seconds)))
            for _ in range(MANY)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if missing := sum(answer.status != 200 for answer in answers):
            return "hung", f"{missing} of {MANY} requests at once have no answer after {seconds:.0f} s"
    elif deed == "many that never end":
        connections = [socket.create_connection(("127.0.0.1", port), timeout=seconds) for _ in range(MANY)]
        for connection in connections:
            connection.sendall(b"POST /view HTTP/1.1\r\nHost: ")
        answer = ask(port, get(port), seconds)
        for connection in connections:
            connection.close()
        if answer.status != 200:
            return "hung", f"no answer beside {MANY} connections that never end"
    elif deed == "no frame of another page":
        head = ask(port, get(port), seconds).text.partition("\r\n\r\n")[0].lower()
        if "x-frame-options" not in head and "frame-ancestors" not in head:
            return "silent", "any page may show this one in a frame: no X-Frame-Options, no frame-ancestors"
    else:
        request, is_right = REQUESTS[deed]
        answer = ask(port, request(port), seconds)
        if not is_right(answer.status):
            first = answer.text.partition("\r\n")[0] or "no answer"
            return ("hung" if answer.status == 0 else "silent"), f"{first}: {answer.text[-200:]!r}"
        if "Traceback" in answer.text:
            return "crashed", answer.text[-200:]
    last = ask(port, post(port, view("to be")), seconds)
    return ("harmless", "") if last.status == 200 else ("hung", f"afterwards a view is answered by {last.status}")
