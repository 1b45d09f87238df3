"""A real SGLang server for tests, started once for the whole test session, and the tiny models that it serves.

A start costs 15 to 50 seconds, so every test that needs a healthy server shares this one: take the fixture `sglang_server`
(import it in the folder's conftest). It serves `models.first`; a test may put other weights on it, the next one finds the first
again. Tests that kill a server start their own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import pytest

from megatron_gvpo.config.schema import ServersSection
from megatron_gvpo.rollout.server import Endpoint, LocalServer

VOCAB = 101  # no multiple of anything
EOS = 1
MAX_LENGTH = 64  # of prompt and response together


@dataclass
class TinyModels:
    """Two random Llamas of one shape (float32, peaked enough for log-probs to differ), as Hugging Face folders."""

    folder: Path

    @cached_property
    def first(self) -> Path:
        return self._make("first", seed=0)

    @cached_property
    def second(self) -> Path:
        return self._make("second", seed=1)

    def _make(self, name: str, seed: int) -> Path:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=MAX_LENGTH,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=EOS,
            pad_token_id=0,
        )
        model = LlamaForCausalLM(config).float()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.15)
        model.save_pretrained(self.folder / name)
        return self.folder / name


def reference_logprobs(model_path: Path, prompt_ids: list[int], response_ids: list[int], temperature: float) -> list[float]:
    """Log-probs of the response tokens by a Hugging Face float32 forward pass, at this temperature."""
    import torch

    model = _load(model_path)
    ids = torch.tensor([[*prompt_ids, *response_ids]])
    with torch.no_grad():
        logits_TV = model(ids).logits[0, len(prompt_ids) - 1 : -1].float()
    logprobs_TV = torch.log_softmax(logits_TV / temperature, -1)
    return logprobs_TV.gather(1, torch.tensor(response_ids)[:, None])[:, 0].tolist()


_loaded: dict[Path, Any] = {}


def _load(model_path: Path) -> Any:
    if model_path not in _loaded:
        import torch
        from transformers import AutoModelForCausalLM

        _loaded[model_path] = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    return _loaded[model_path]


@dataclass
class TestServer:
    """The shared server: where it answers, what it can serve, and how it was started."""

    __test__ = False

    local: LocalServer
    models: TinyModels
    started_with_version: str = ""

    @property
    def endpoint(self) -> Endpoint:
        return self.local.endpoint

    def http(self) -> httpx.Client:
        """A plain client with the key, to look at the server from outside of the product."""
        headers = {"Authorization": f"Bearer {self.local.api_key}"}
        return httpx.Client(base_url=self.endpoint.url, headers=headers, timeout=30.0, trust_env=False)

    def restore(self) -> None:
        """Back to the first weights, generating, with an empty cache."""
        with self.http() as http:
            http.post("/continue_generation", json={}).raise_for_status()
            if http.get("/model_info").json()["weight_version"] != self.started_with_version:
                body = {"model_path": str(self.models.first), "weight_version": self.started_with_version, "flush_cache": True}
                http.post("/update_weights_from_disk", json=body).raise_for_status()


_shared = pytest.StashKey[TestServer]()


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("models"))


@pytest.fixture
def sglang_server(request: pytest.FixtureRequest, tiny_models: TinyModels) -> Iterator[TestServer]:
    """The session's server with its first weights; one for all folders, whoever asks first starts it."""
    stash = request.config.stash
    if _shared not in stash:
        folder = tempfile.TemporaryDirectory(prefix="server-")
        local = LocalServer(tiny_models.first, ServersSection(), run_dir=folder.name, max_length=MAX_LENGTH, name="test-server")
        request.config.add_cleanup(folder.cleanup)
        request.config.add_cleanup(local.stop)
        local.start()
        local.wait_ready()
        stash[_shared] = TestServer(local, tiny_models)
        with stash[_shared].http() as http:
            stash[_shared].started_with_version = http.get("/model_info").json()["weight_version"]
    server = stash[_shared]
    yield server
    server.restore()
