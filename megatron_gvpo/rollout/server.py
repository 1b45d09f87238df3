"""Local SGLang servers: started for a run, watched until they answer, and gone with it whatever happens."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

import httpx

from megatron_gvpo.config.schema import ServersSection
from megatron_gvpo.rollout import guardian
from megatron_gvpo.rollout.endpoint import Endpoint
from megatron_gvpo.rollout.errors import StartError
from megatron_gvpo.rollout.registry import registered_servers
from megatron_gvpo.rollout.sglang_command import plan_server

LOOPBACK = "127.0.0.1"
_PORT_TRIES = 5
_PORT_TAKEN = ("address already in use", "EADDRINUSE", "Port is already in use")
_LOG_LINES_IN_ERROR = 12
# SIGTERM first, so that a GPU server gives its memory back in order; a CPU server has nothing to save, and its own
# shutdown takes up to 5 s to notice the signal.
_GRACE_S = {"cpu": 0.0, "cuda": 20.0}


def server_python(servers: ServersSection) -> str:
    """The Python that has SGLang: the configured one, or that of `.venv-sglang` beside the project or in the work folder.

    StartError when there is none.
    """
    if servers.python:
        if shutil.which(servers.python) is None:
            raise StartError("servers.python", f"no executable Python at {servers.python}")
        return servers.python
    places = [Path(__file__).resolve().parents[2], Path.cwd()]
    for place in places:
        python = place / ".venv-sglang" / "bin" / "python"
        if os.access(python, os.X_OK):
            return str(python)
    looked = ", ".join(dict.fromkeys(str(p / ".venv-sglang") for p in places))
    raise StartError(
        "servers.python", f"no SGLang environment in {looked}: create it (see docs/rollout.md) or set servers.python"
    )


class LocalServer:
    """One SGLang server on loopback (or at another address of this machine, `host`), with a random key, a free port and its log
    in `run_dir`.

    `start()` launches and returns at once, `wait_ready()` waits until it has generated a token; as a context manager it does
    both, and stops the server on the way out. Its processes end with this one, even when this one is killed (see `guardian`).

    model_path: Hugging Face folder. max_length: tokens of prompt and response together, at most. first_gpu: with device
    cuda, the first GPU of its `servers.tensor`.
    """

    def __init__(
        self,
        model_path: str | Path,
        servers: ServersSection,
        *,
        run_dir: str | Path,
        max_length: int,
        name: str = "server0",
        seed: int = 0,
        first_gpu: int = 0,
        host: str = LOOPBACK,
    ) -> None:
        self.model_path = Path(model_path).resolve()
        self.servers = servers
        self.name = name
        self.log_path = Path(run_dir) / f"{name}.log"
        self.api_key = servers.api_key or secrets.token_hex(24)  # never starts with a dash, which would pass for an option
        self._max_length = max_length
        self._seed = seed
        self._host = host
        self._first_gpu = first_gpu
        self._port = 0
        self._guardian: subprocess.Popen[bytes] | None = None
        self._scratch: Path | None = None
        self._log_start = 0

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(f"http://{self._host}:{self._port}", self.api_key, self.name)

    @property
    def pid(self) -> int:
        """Process id of the guardian, the root of the server's processes; 0 when it is not started."""
        return self._guardian.pid if self._guardian else 0

    def start(self) -> None:
        """Launch the server's processes on a free port; returns at once. StartError when the model or SGLang is missing."""
        if self._guardian is not None:
            raise StartError(self.name, "is started already")
        if not (self.model_path / "config.json").is_file():
            raise StartError(self.name, f"no config.json in {self.model_path}: not a Hugging Face model folder")
        python = server_python(self.servers)
        self._port = _free_port(self._host)
        plan = plan_server(
            self.model_path,
            self.servers,
            host=self._host,
            port=self._port,
            api_key=self.api_key,
            max_length=self._max_length,
            seed=self._seed,
            first_gpu=self._first_gpu,
        )
        # SGLang leaves sockets in the temporary folder when it is killed; a folder of its own can be removed with them.
        # It is not under run_dir: a socket's path may have 107 characters only.
        self._scratch = Path(tempfile.mkdtemp(prefix="gvpo-"))
        settings_file = self._scratch / "server.yaml"
        _write_private(settings_file, json.dumps(plan.settings))  # JSON is YAML
        environment = {**os.environ, **plan.environment, "TMPDIR": str(self._scratch)}
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
            self._log_start = log.tell()
            self._guardian = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", guardian.__file__),
                    *(str(os.getpid()), str(_GRACE_S[self.servers.device]), str(self._scratch)),
                    *(python, "-m", "sglang.launch_server", "--config", str(settings_file)),
                    *plan.flags,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C in the terminal reaches the trainer, which stops its servers itself
            )

    def wait_ready(self) -> None:
        """Wait until the server has generated a token. StartError, with the log's last lines, past `start_timeout_s`."""
        deadline = time.monotonic() + self.servers.start_timeout_s
        for _ in range(_PORT_TRIES):
            if self._guardian is None:
                self.start()
            if self._answers_before(deadline):
                return
            # Another process took the port between our look and the server's bind.
            self.stop()
        raise StartError(self.name, f"found no free port in {_PORT_TRIES} tries; its log is {self.log_path}")

    def _answers_before(self, deadline: float) -> bool:
        """True when it is ready, False when its port was taken; StartError when it died or is late."""
        headers = {"Authorization": f"Bearer {self.api_key}"}
        one_token = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
        with httpx.Client(base_url=self.endpoint.url, headers=headers, timeout=5.0, trust_env=False) as http:
            while time.monotonic() < deadline:
                assert self._guardian is not None
                if self._guardian.poll() is not None:
                    if any(word.lower() in self._log_text().lower() for word in _PORT_TAKEN):
                        return False
                    raise StartError(self.name, f"ended with code {self._guardian.returncode} while starting; {self._log_tail()}")
                try:
                    status = http.get("/model_info").status_code
                    if status == 401:
                        return False  # a stranger answers on this port: the key is not its key
                    if status == 200:
                        left = max(1.0, deadline - time.monotonic())
                        if http.post("/generate", json=one_token, timeout=left).status_code == 200:
                            self._log_text()
                            return True
                except httpx.TransportError:
                    pass  # not listening yet
                time.sleep(0.1)
        raise StartError(self.name, f"not ready within {self.servers.start_timeout_s:g} s; {self._log_tail()}")

    def alive(self) -> bool:
        """Whether its processes run (not whether it answers)."""
        return self._guardian is not None and self._guardian.poll() is None

    def stop(self) -> None:
        """End all its processes and wait for that (a few seconds at most on a CPU). Harmless when it is not running."""
        if self._guardian is not None:
            self._guardian.send_signal(signal.SIGTERM)
            try:
                self._guardian.wait(_GRACE_S[self.servers.device] + 15.0)
            except subprocess.TimeoutExpired:
                self._guardian.kill()  # the server follows: it is set to die with its guardian
                self._guardian.wait(10.0)
            self._guardian = None
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)  # the guardian has, unless it was killed or never started
            self._scratch = None

    def _log_text(self) -> str:
        """What this start logged. SGLang logs all its arguments, so the key is blotted out, in the file too."""
        key, blot = self.api_key.encode(), b"*" * len(self.api_key)
        with self.log_path.open("r+b") as log:
            log.seek(self._log_start)
            text = log.read()
            at = text.find(key)
            while at >= 0:
                log.seek(self._log_start + at)
                log.write(blot)  # in place and of the same length: the server goes on appending
                at = text.find(key, at + len(key))
        return text.replace(key, blot).decode(errors="replace")

    def _log_tail(self) -> str:
        lines = [line.strip() for line in self._log_text().splitlines() if line.strip()]
        return f"last lines of {self.log_path}: " + " | ".join(lines[-_LOG_LINES_IN_ERROR:])

    def __enter__(self) -> LocalServer:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


@contextmanager
def running_servers(
    model_path: str | Path,
    servers: ServersSection,
    *,
    run_dir: str | Path,
    max_length: int,
    name: str = "server",
    seed: int = 0,
    first_gpu: int = 0,
) -> Iterator[Sequence[Endpoint]]:
    """The servers that a config section asks for: started here side by side (`launch: local`), or running ones (`urls`, or those
    that write their addresses to `registry`)."""
    if servers.launch == "none" and servers.registry:
        yield registered_servers(servers, name)
        return
    if servers.launch == "none":
        yield [Endpoint(url.rstrip("/"), servers.api_key, f"{name}{i}") for i, url in enumerate(servers.urls)]
        return
    with ExitStack() as stack:
        started = [
            LocalServer(
                model_path,
                servers,
                run_dir=run_dir,
                max_length=max_length,
                name=f"{name}{i}",
                seed=seed + i,
                first_gpu=first_gpu + i * servers.tensor,
            )
            for i in range(servers.count)
        ]
        for server in started:
            stack.callback(server.stop)
            server.start()
        for server in started:
            server.wait_ready()
        yield [server.endpoint for server in started]


def _free_port(host: str) -> int:
    """A port that is free now; `wait_ready` tries others when somebody takes it first."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _write_private(path: Path, text: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
