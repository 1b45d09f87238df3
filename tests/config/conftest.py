"""A run that passes the check, to be broken one key at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_gvpo.config import Config, ConfigError, load_config

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 384,
    "vocab_size": 303,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
MOE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "head_dim": 32,
}


def write_model(folder: Path, values: dict[str, Any]) -> Path:
    """A Hugging Face folder as far as the check looks at one: the weights are never read, only found."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "model.safetensors").touch()
    (folder / "tokenizer.json").write_text("{}")
    return folder


class Run:
    """A good config on disk; `with_` breaks it and gives the lines of the refusal."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = write_model(folder / "model", LLAMA)
        self.data = folder / "train.jsonl"
        self.data.touch()
        self.file = folder / "run.yaml"

    def sections(self) -> dict[str, Any]:
        return {
            "model": {"path": str(self.model), "max_length": 128},
            "rollout": {"max_new_tokens": 64, "prompts_per_step": 8, "group_size": 4},
            "data": {"train": str(self.data)},
            "train": {"device": "cpu"},
        }

    def write(self, changes: dict[str, dict[str, Any]]) -> Path:
        sections = self.sections()
        for section, keys in changes.items():
            sections[section] = {**sections.get(section, {}), **keys}
        self.file.write_text(yaml.safe_dump(sections, sort_keys=False))
        return self.file

    def load(self, **changes: dict[str, Any]) -> Config:
        return load_config(self.write(changes))

    def refusal(self, **changes: dict[str, Any]) -> list[str]:
        """The lines of the refusal, without the file's name: `LINE:COL: section.key: why`."""
        with pytest.raises(ConfigError) as caught:
            self.load(**changes)
        return [line.removeprefix(f"{self.file}:") for line in caught.value.lines]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.fixture
def refuse(tmp_path: Path) -> Callable[..., list[str]]:
    """Reads a YAML text (and `--set` overrides) that must be refused; gives the lines, the file called `run.yaml`."""

    def _refuse(text: str, *overrides: str) -> list[str]:
        file = tmp_path / "text.yaml"
        file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_config(file, overrides)
        return [line.replace(str(file), "run.yaml") for line in caught.value.lines]

    return _refuse
