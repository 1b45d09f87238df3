"""`serve`: addresses and a working key are printed, a signal stops everything, a dead server is an error.

The server is a stand-in that speaks as much of SGLang's HTTP as start-up needs; the real one is started in tests/rollout.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.config.conftest import Run

STAND_IN = """#!{python}
import http.server, json, os, pathlib, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
key = json.load(open(sys.argv[sys.argv.index("--config") + 1]))["api-key"]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        known = self.headers.get("Authorization") == f"Bearer {{key}}"
        self.send_response(200 if known else 401)
        self.end_headers()
        self.wfile.write(b"{{}}")
    def do_POST(self):
        self.do_GET()
    def log_message(self, *args):
        pass
pathlib.Path({pids!r}, str(os.getpid())).touch()
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class Served:
    """`megatron-gvpo serve --json` as a process, with what it announced."""

    def __init__(self, run: Run) -> None:
        self.pids = run.folder / "pids"
        self.pids.mkdir()
        python = run.folder / "python"
        python.write_text(STAND_IN.format(python=sys.executable, pids=str(self.pids)))
        python.chmod(0o755)
        config = run.write({"rollout": {"servers": {"python": str(python), "count": 2}, "max_new_tokens": 64}})
        command = [sys.executable, "-m", "megatron_gvpo.cli", "serve", str(config), "--json", "--logs", str(run.folder / "logs")]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        text = ""
        assert self.process.stdout is not None
        while not text.endswith("}\n"):  # ends with the process, at the latest
            line = self.process.stdout.readline()
            assert line, self.process.communicate(timeout=30)
            text += line
        self.announced = json.loads(text)

    def server_pids(self) -> list[int]:
        return [int(file.name) for file in self.pids.iterdir()]


@pytest.fixture
def served(run: Run) -> Served:
    return Served(run)


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_serves_until_a_signal_and_leaves_nothing(served: Served) -> None:
    """Why: a forgotten server holds a GPU; and a key that does not work shows only in the next run."""
    try:
        assert len(served.announced["urls"]) == 2
        for url in served.announced["urls"]:
            request = urllib.request.Request(
                f"{url}/model_info", headers={"Authorization": f"Bearer {served.announced['api_key']}"}
            )
            with urllib.request.urlopen(request, timeout=10) as answer:
                assert answer.status == 200
        served.process.send_signal(signal.SIGTERM)
        _, err = served.process.communicate(timeout=40)
    finally:
        served.process.kill()
    assert (served.process.returncode, err) == (0, "")
    assert all(_gone(pid) for pid in served.server_pids())


def test_a_dead_server_ends_it_with_its_name_and_log(served: Served) -> None:
    try:
        os.kill(served.server_pids()[0], signal.SIGKILL)
        _, err = served.process.communicate(timeout=40)
    finally:
        served.process.kill()
    assert served.process.returncode == 1
    assert "has ended; its log is " in err
    assert err.count("\n") == 1
    assert all(_gone(pid) for pid in served.server_pids())


def test_no_teacher_to_serve(run: Run) -> None:
    command = [sys.executable, "-m", "megatron_gvpo.cli", "serve", str(run.write({})), "--teacher"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (2, "teacher.path: is missing: there is nothing to serve\n")
