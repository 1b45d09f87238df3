"""One SGLang server over HTTP: generate, score, and the calls that control it. Every wait has a limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter

from megatron_gvpo.rollout.errors import BadAnswer, ServerError, TimeLimit, Transient
from megatron_gvpo.rollout.server import Endpoint
from megatron_gvpo.rollout.wire import (
    Limits,
    Malformed,
    Response,
    Sampling,
    generate_body,
    read_responses,
    read_scores,
    score_body,
)

T = TypeVar("T")

_MAY_PASS = frozenset({429, 500, 502, 503, 504})
_PROBE_S = 30.0
_HEALTH_S = 10.0
# SGLang refuses prompts of max_req_input_len tokens, and cuts a response so that prompt + response <= that + 4.
_SPARE_ABOVE_INPUT = 4


@dataclass(frozen=True)
class ServerFacts:
    """What a server says about itself, asked for and not assumed from its version."""

    version: str
    model_path: str
    weight_version: str
    max_prompt: int
    max_total: int
    tensor: int
    pipeline: int
    data: int


class ServerClient:
    """An async client of one server. Use as an async context manager, and call `probe()` before anything else.

    vocab_size: the model's. max_length: tokens of prompt and response together that the run uses; the server's own limits are
    kept to as well. timeout_s: seconds for one request. retries: further tries of a request whose failure may pass.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        vocab_size: int,
        max_length: int,
        timeout_s: float = 600.0,
        retries: int = 3,
        connections: int = 256,
    ) -> None:
        self.endpoint = endpoint
        self.name = str(endpoint)
        self.timeout_s = timeout_s
        self.bytes_received = 0  # bodies of all answers
        self._vocab_size = vocab_size
        self._max_length = max_length
        self._retries = retries
        self._facts: ServerFacts | None = None
        self._limits: Limits | None = None
        headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
        self._http = httpx.AsyncClient(
            base_url=endpoint.url,
            headers=headers,
            # The whole request has one limit, in `_once`; a server that computes sends nothing for long.
            timeout=httpx.Timeout(None, connect=min(10.0, timeout_s)),
            # The server closes a connection that idles for 5 s: one that idles for less is never closed under our hands.
            limits=httpx.Limits(max_connections=connections + 8, keepalive_expiry=2.0),
            trust_env=False,  # a proxy of the environment must not see loopback or cluster traffic
        )

    @property
    def facts(self) -> ServerFacts:
        if self._facts is None:
            raise ServerError(self.name, "was not probed yet")
        return self._facts

    @property
    def limits(self) -> Limits:
        if self._limits is None:
            raise ServerError(self.name, "was not probed yet")
        return self._limits

    async def __aenter__(self) -> ServerClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def probe(self) -> ServerFacts:
        """Ask the server what it is. ServerError when it is down, refuses the key, or is no SGLang server."""
        model = await self._info("/model_info", "/get_model_info")
        server = await self._info("/server_info", "/get_server_info")
        try:
            max_input = int(server["max_req_input_len"])
            self._facts = ServerFacts(
                version=str(server.get("version", "")),
                model_path=str(model["model_path"]),
                weight_version=str(model.get("weight_version", "")),
                max_prompt=max_input - 1,
                max_total=max_input + _SPARE_ABOVE_INPUT,
                tensor=int(server.get("tp_size") or 1),
                pipeline=int(server.get("pp_size") or 1),
                # With attention data parallelism the replicas share the tensor-parallel ranks.
                data=1 if server.get("enable_dp_attention") else int(server.get("dp_size") or 1),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BadAnswer(self.name, f"does not look like an SGLang server ({type(error).__name__}: {error})") from error
        max_total = min(self._facts.max_total, self._max_length)
        self._limits = Limits(self._vocab_size, min(self._facts.max_prompt, max_total - 1), max_total)
        return self._facts

    async def _info(self, path: str, old_path: str) -> dict[str, Any]:
        """GET a description; older servers have it under another path."""
        status, body = await self._retried("GET", path, None, _PROBE_S, True)
        if status == 404:
            _, body = self._checked(*await self._retried("GET", old_path, None, _PROBE_S, True), old_path)
        else:
            self._checked(status, body, path)
        if not isinstance(body, dict):
            raise BadAnswer(self.name, f"{path} gave no JSON object: not an SGLang server?")
        return body

    async def generate(self, prompt_ids: Sequence[int], count: int, sampling: Sampling, label: str = "prompt") -> list[Response]:
        """`count` responses to one prompt, all in one request, so that the prompt is computed once.

        RequestRefused before anything is sent; TimeLimit past `timeout_s` (not tried again: a response that needs longer would
        need longer again, and dropping the long ones would bias the samples); BadAnswer; Transient when the tries are used up.
        """
        body = generate_body(prompt_ids, count, sampling, self.limits, label)
        answer = await self._call("POST", "/generate", body, label=label)
        return self._read(label, read_responses, answer, count)

    async def score(self, sequences: Sequence[Sequence[int]], starts: Sequence[int], labels: Sequence[str]) -> list[list[float]]:
        """Log-probs at temperature 1 of given tokens: of `sequences[i]`, those from place `starts[i]` (>= 1) on.

        One request. Scores are the same however often they are computed, so a time limit is tried again like a broken
        connection. A BadAnswer names the sample: fewer positions than asked for are never shifted into place.
        """
        body = score_body(sequences, starts, self.limits, labels)
        return await self.ask_scores(body, labels[0], read_scores, sequences, starts, self.limits, labels)

    async def ask_scores(self, body: dict[str, Any], label: str, reader: Callable[..., T], *args: Any) -> T:
        """POST a scoring request and read its answer by `reader(answer, *args)`, whose Malformed becomes a BadAnswer."""
        answer = await self._call("POST", "/generate", body, label=label, retry_time_limit=True)
        return self._read("scores", reader, answer, *args)

    def _read(self, label: str, reader: Callable[..., T], *args: Any) -> T:
        try:
            return reader(*args)
        except Malformed as error:
            raise BadAnswer(self.name, f"{label}: {error}") from error

    async def healthy(self) -> bool:
        """Whether the server generates a token within a few seconds (its HTTP side may answer while its model hangs)."""
        try:
            status, _ = await self._once("GET", "/health_generate", None, _HEALTH_S)
        except ServerError:
            return False
        return status == 200

    async def control(self, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None) -> Any:
        """POST a control call, once: what it changes on the server must not be done twice. BadAnswer unless it succeeded."""
        limit = timeout_s or self.timeout_s
        _, answer = self._checked(*await self._once("POST", path, body or {}, limit), path)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise BadAnswer(self.name, f"{path}: {_one_line(answer.get('message', answer))}")
        return answer

    async def control_if_there(self, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None) -> bool:
        """The same, for a call that not every server has: False, and nothing done, when this one does not know it."""
        status, answer = await self._once("POST", path, body or {}, timeout_s or self.timeout_s)
        if status in (404, 405):
            return False
        self._checked(status, answer, path)
        return True

    async def weight_version(self) -> str:
        """The version of the weights that the server holds, as it says."""
        return str((await self._info("/model_info", "/get_model_info")).get("weight_version", ""))

    async def _call(self, method: str, path: str, body: dict[str, Any], *, label: str, retry_time_limit: bool = False) -> Any:
        status, answer = await self._retried(method, path, body, self.timeout_s, retry_time_limit)
        return self._checked(status, answer, f"{path} ({label})")[1]

    async def _retried(
        self, method: str, path: str, body: dict[str, Any] | None, limit: float, retry_time_limit: bool
    ) -> tuple[int, Any]:
        kinds = (Transient, TimeLimit) if retry_time_limit else (Transient,)
        async for attempt in AsyncRetrying(
            stop=stop_after_attempt(self._retries + 1),
            wait=wait_exponential_jitter(initial=0.2, max=5.0, jitter=0.2),
            retry=retry_if_exception_type(kinds),
            reraise=True,
        ):
            with attempt:
                status, answer = await self._once(method, path, body, limit)
                if status in _MAY_PASS:
                    raise Transient(self.name, f"{path}: HTTP {status}: {_one_line(answer)}")
                return status, answer
        raise AssertionError("unreachable: reraise=True")

    async def _once(self, method: str, path: str, body: dict[str, Any] | None, limit: float) -> tuple[int, Any]:
        """One request, one limit over all of it; (status, decoded JSON or text)."""
        try:
            answer = await asyncio.wait_for(self._http.request(method, path, json=body), limit)
        except (asyncio.TimeoutError, httpx.PoolTimeout) as error:
            raise TimeLimit(self.name, f"{path}: no answer within {limit:g} s") from error
        except httpx.TransportError as error:
            what = "no connection" if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)) else "the connection broke"
            raise Transient(self.name, f"{path}: {what} ({type(error).__name__}: {_one_line(error)})") from error
        self.bytes_received += len(answer.content)
        try:
            return answer.status_code, answer.json()
        except ValueError:
            return answer.status_code, answer.text

    def _checked(self, status: int, answer: Any, path: str) -> tuple[int, Any]:
        if status == 200:
            return status, answer
        hint = ": wrong or missing api_key" if status in (401, 403) else ""
        raise BadAnswer(self.name, f"{path}: HTTP {status}{hint}: {_one_line(_message(answer))}")


def _message(answer: Any) -> Any:
    """The text inside the shapes that SGLang's errors come in."""
    if isinstance(answer, dict):
        error = answer.get("error", answer)
        if isinstance(error, dict):
            return error.get("message", error)
        return error
    return answer


def _one_line(text: object) -> str:
    return " ".join(str(text).split())[:300]
