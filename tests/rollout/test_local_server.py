"""Starting and stopping a local server, with a stand-in for the server's Python: what goes wrong at a start is quick to show.

The stand-in takes SGLang's command line and serves, dies or waits as told. The real server's life is in test_server_life.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megatron_gvpo.config.schema import ServersSection
from megatron_gvpo.rollout import server as server_module
from megatron_gvpo.rollout.errors import StartError
from megatron_gvpo.rollout.server import LocalServer, running_servers
from megatron_gvpo.rollout.sglang_command import cpu_cache_tokens, plan_server
from tests.rollout.test_guardian import gone, wait_for

# A server that answers like SGLang once its port is bound, unless a file in its folder says otherwise.
STAND_IN = """#!{python}
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
home = Path({home!r})
args = sys.argv[1:]
settings = json.loads(Path(args[args.index("--config") + 1]).read_text())
(home / "pid").write_text(str(os.getpid()))
print("starting with", settings["api-key"], flush=True)
if (home / "dies").exists():
    print("OSError: the model has no such layer", flush=True)
    sys.exit(3)
if (home / "waits").exists():
    time.sleep(600)
class Handler(BaseHTTPRequestHandler):
    def reply(self):
        self.send_response(200 if self.headers.get("authorization") == "Bearer " + settings["api-key"] else 401)
        self.end_headers()
    do_GET = do_POST = reply
    def log_message(self, *args): pass
HTTPServer(("127.0.0.1", int(args[args.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with a model's config.json and the stand-in as `python`."""
    python = tmp_path / "python"
    python.write_text(STAND_IN.format(python=sys.executable, home=str(tmp_path)))
    python.chmod(0o755)
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    return tmp_path


def local(home: Path, **options: object) -> LocalServer:
    servers = ServersSection.model_validate({"python": str(home / "python"), "start_timeout_s": 20, **options})
    return LocalServer(home, servers, run_dir=home / "run", max_length=64)


def test_it_serves_with_its_own_key_and_is_gone_after(home: Path) -> None:
    """The plain case, and the two promises of leaving: no process, no scratch folder."""
    with local(home) as running:
        assert running.alive()
        assert len(running.api_key) > 20
        scratch = running._scratch
        assert scratch is not None
        assert scratch.exists()
        assert running.api_key not in running.log_path.read_text()
        assert "starting with ****" in running.log_path.read_text()
    assert gone(int((home / "pid").read_text()))
    assert not scratch.exists()
    assert not running.alive()
    running.stop()  # twice is harmless


def test_a_server_that_dies_at_its_start_is_an_error_with_its_last_words(home: Path) -> None:
    """The cause is in the server's log; the error brings it to the user, without the key that the server printed."""
    (home / "dies").touch()
    with pytest.raises(StartError, match=r"server0: ended with code 3 .*the model has no such layer") as caught, local(home):
        pass
    assert "starting with ****" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_server_that_is_not_ready_in_time_is_an_error_and_is_stopped(home: Path) -> None:
    """start_timeout_s is the limit of the wait; a half-started server must not stay."""
    (home / "waits").touch()
    with (
        pytest.raises(StartError, match=r"server0: not ready within 1 s; last lines of .*server0.log"),
        local(home, start_timeout_s=1),
    ):
        pass
    assert wait_for(lambda: gone(int((home / "pid").read_text())))


def test_a_port_that_somebody_took_first_is_replaced(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between looking for a free port and binding it another process may take it; also when that is a server with another key."""
    with local(home) as first:
        ports = iter([first._port, first._port, server_module._free_port("127.0.0.1")])
        monkeypatch.setattr(server_module, "_free_port", lambda host: next(ports))
        with local(home) as second:
            assert second._port != first._port
            assert next(ports, None) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [({"python": "/nowhere/python"}, "no executable Python at /nowhere/python")],
)
def test_a_missing_environment_is_named(home: Path, options: dict[str, object], message: str) -> None:
    """Before anything is started."""
    with pytest.raises(StartError, match=message), local(home, **options):
        pass


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    """The commonest mistake of all: a wrong model path."""
    with pytest.raises(StartError, match=r"no config.json in .*: not a Hugging Face model folder"):
        LocalServer(tmp_path, ServersSection(), run_dir=tmp_path, max_length=64).start()


def test_when_one_of_several_does_not_start_the_others_are_stopped(home: Path) -> None:
    """Servers start side by side; an error in one must not leave the rest."""
    (home / "dies").touch()
    servers = ServersSection(python=str(home / "python"), count=3)
    with pytest.raises(StartError), running_servers(home, servers, run_dir=home / "run", max_length=64):
        pass
    assert sorted(path.name for path in (home / "run").iterdir()) == ["server0.log", "server1.log", "server2.log"]


def test_running_servers_by_url_are_taken_as_they_are(tmp_path: Path) -> None:
    """launch: none starts nothing."""
    servers = ServersSection(launch="none", urls=["http://a:1/", "http://b:2"], api_key="k")
    with running_servers("", servers, run_dir=tmp_path, max_length=64, name="teacher") as endpoints:
        assert [str(endpoint) for endpoint in endpoints] == ["teacher0 (http://a:1)", "teacher1 (http://b:2)"]
        assert all(endpoint.api_key == "k" for endpoint in endpoints)


def test_flags_for_a_cpu_and_for_gpus(home: Path) -> None:
    """The same server in two device modes. On GPUs SGLang keeps its own defaults for kernels, graphs and memory, and servers on
    one machine take GPUs side by side. Does not start one on a GPU."""
    rest = {"host": "127.0.0.1", "port": 1, "api_key": "secret", "max_length": 64, "seed": 0}
    cpu = plan_server(home, ServersSection(args=["--log-level", "debug"]), first_gpu=0, **rest)
    assert "PYTHONPATH" in cpu.environment
    assert {"--sleep-on-idle", "--skip-tokenizer-init"} <= set(cpu.flags)
    assert cpu.flags[-2:] == ("--log-level", "debug")  # the user's come last, and so win
    gpu = plan_server(home, ServersSection(device="cuda", dtype="bfloat16", tensor=4), first_gpu=4, **rest)
    assert "PYTHONPATH" not in gpu.environment
    assert not {"--attention-backend", "--disable-cuda-graph", "--max-total-tokens"} & set(gpu.flags)
    assert gpu.flags[gpu.flags.index("--base-gpu-id") + 1] == "4"
    assert gpu.flags[gpu.flags.index("--tp-size") + 1] == "4"
    for plan in (cpu, gpu):
        assert plan.settings == {"api-key": "secret"}
        assert "secret" not in plan.flags


def test_the_cpu_cache_is_bounded_by_memory_and_holds_two_contexts(home: Path) -> None:
    """SGLang would size it by the machine's free memory, which the trainer needs. 2 layers x 2 x 2 heads x 16 x 4 bytes = 512."""
    assert cpu_cache_tokens(home, 72) == 1 << 18
    wide = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 4096}
    (home / "config.json").write_text(json.dumps(wide))
    assert cpu_cache_tokens(home, 1000) == (1 << 30) // (32 * 2 * 8 * 128 * 4)
    assert cpu_cache_tokens(home, 100_000) == 200_000
