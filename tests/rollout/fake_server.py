"""A small HTTP server that does what no healthy SGLang server does: 500s, stalls, short answers, broken connections.

Every path has a list of behaviours, taken one a request; the last one stays. It speaks the real server's JSON (checked against
the real one in test_real_server) and counts what it was asked.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from megatron_gvpo.rollout.server import Endpoint

Answer = tuple[int, Any]
Behaviour = Callable[[dict[str, Any]], Answer]


class Hang(Exception):
    """Answer nothing until the client gives up."""


class Break(Exception):
    """Close the connection without an answer, as a process that dies does."""


@dataclass
class FakeServer:
    behaviours: dict[str, list[Behaviour]] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    version: str = "0"
    endpoint: Endpoint = field(default_factory=lambda: Endpoint(""))
    closing: threading.Event = field(default_factory=threading.Event)

    def count(self, path: str) -> int:
        return sum(1 for asked, _ in self.asked if asked == path)

    def on(self, path: str, *behaviours: Behaviour) -> FakeServer:
        self.behaviours[path] = list(behaviours)
        return self

    def answer(self, path: str, body: dict[str, Any]) -> Answer:
        self.asked.append((path, body))
        planned = self.behaviours.get(path)
        if planned:
            return (planned.pop(0) if len(planned) > 1 else planned[0])(body)
        return self.well_behaved(path, body)

    def well_behaved(self, path: str, body: dict[str, Any]) -> Answer:
        if path == "/model_info":
            return 200, {"model_path": "/models/tiny", "weight_version": self.version, "is_generation": True}
        if path == "/server_info":
            return 200, {"version": "fake", "max_req_input_len": 58, "tp_size": 1, "pp_size": 1, "dp_size": 1}
        if path == "/generate":
            return 200, generated(body) if body["sampling_params"].get("max_new_tokens") else scored(body)
        if path == "/update_weight_version":
            self.version = body["new_version"]
        return 200, {"success": True, "message": "done"}


def generated(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Answers in the real server's form: responses of two tokens, the second one the stop token."""
    meta = {
        "finish_reason": {"type": "stop", "matched": 1},
        "output_token_logprobs": [[-1.5, 7, None], [-0.5, 1, None]],
        "weight_version": "0",
        "weight_versions": [{"version": "0", "start": 0, "end": 2}],
        "cached_tokens": 0,
    }
    return [{"output_ids": [7, 1], "meta_info": dict(meta)} for _ in range(body["sampling_params"]["n"])]


def scored(body: dict[str, Any], short_by: int = 0) -> list[dict[str, Any]]:
    """Scores of -0.25 for every position asked for, the first one without, `short_by` positions missing at the end."""
    answers = []
    for ids, start in zip(body["input_ids"], body["logprob_start_len"], strict=True):
        entries: list[list[Any]] = [[None, ids[start], None], *([-0.25, token, None] for token in ids[start + 1 :])]
        meta = {"input_token_logprobs": entries[: len(entries) - short_by], "finish_reason": {"type": "length", "length": 0}}
        answers.append({"output_ids": [], "meta_info": meta})
    return answers


def status(code: int, message: str = "no") -> Behaviour:
    return lambda body: (code, {"error": {"message": message}})


def hang(body: dict[str, Any]) -> Answer:
    raise Hang


def broken(body: dict[str, Any]) -> Answer:
    raise Break


def after(seconds: float, behaviour: Behaviour) -> Behaviour:
    def late(body: dict[str, Any]) -> Answer:
        time.sleep(seconds)
        return behaviour(body)

    return late


@contextmanager
def fake_servers(count: int) -> Iterator[Sequence[FakeServer]]:
    """`count` well-behaved fake servers on free loopback ports, closed on the way out."""
    with _stack() as running:
        for index in range(count):
            running.append(_start(index))
        yield [fake for fake, _ in running]


@contextmanager
def _stack() -> Iterator[list[tuple[FakeServer, ThreadingHTTPServer]]]:
    running: list[tuple[FakeServer, ThreadingHTTPServer]] = []
    try:
        yield running
    finally:
        for fake, server in running:
            fake.closing.set()
            server.shutdown()
            server.server_close()


def _start(index: int) -> tuple[FakeServer, ThreadingHTTPServer]:
    fake = FakeServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            self._reply(self.path.partition("?")[0], {})

        def do_POST(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            self._reply(self.path.partition("?")[0], json.loads(self.rfile.read(length) or b"{}"))

        def _reply(self, path: str, body: dict[str, Any]) -> None:
            try:
                code, answer = fake.answer(path, body)
            except Hang:
                fake.closing.wait(60.0)
                self.close_connection = True
                return
            except Break:
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return
            payload = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    fake.endpoint = Endpoint(f"http://127.0.0.1:{server.server_address[1]}", "key", f"fake{index}")
    return fake, server
