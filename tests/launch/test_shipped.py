"""Every shipped config: it is valid, it can be planned, and its model has the published number of parameters.

Model shapes ship as small config.json files, so none of this needs weights or a hub. Does not cover training with them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_gvpo.config import Config, load_config
from megatron_gvpo.config.hf_shape import read_shape
from megatron_gvpo.launch.parameters import active_parameters, count_parameters

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "yaml_configs" / "models"
# From the model cards and the safetensors indices of the published checkpoints.
PUBLISHED = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "qwen2.5-math-1.5b": 1_543_714_304,
    "qwen2.5-math-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
}
CLUSTER = sorted(path.stem for path in (ROOT / "yaml_configs").glob("*_[0-9]*.yaml"))


def shipped(name: str) -> Config:
    return load_config(ROOT / "yaml_configs" / f"{name}.yaml", files=False)


def test_published_parameter_counts() -> None:
    """Why: whoever plans a cluster run trusts these; a wrong size in a config.json shows as a wrong sum."""
    found = {folder.name: sum(count_parameters(read_shape(folder)).values()) for folder in sorted(MODELS.iterdir())}
    assert found == PUBLISHED
    assert active_parameters(read_shape(MODELS / "qwen3-235b-a22b")) == 22_190_763_520


def test_there_are_a_dozen() -> None:
    assert len(CLUSTER) == 12


@pytest.mark.parametrize("name", CLUSTER)
def test_the_name_says_what_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why: `<model>_<method>_<precision>_<gpus>` is how a user picks one; a name that lies costs a cluster's hour."""
    monkeypatch.chdir(ROOT)
    config = shipped(name)
    model, *method, precision, gpus = name.split("_")
    assert Path(config.model.path) == Path("yaml_configs/models") / model
    assert config.parallel.world_size == int(gpus)
    assert ("fp8" if config.precision.fp8 != "none" else config.precision.params) == precision
    assert config.objective.name == "_".join(part for part in method if part != "gupo")
    assert (config.gupo.enabled is True) == ("gupo" in method)


@pytest.mark.parametrize("name", CLUSTER[:3])
def test_validate_answers_at_once_and_takes_no_torch(name: str) -> None:
    """Why: a person tries a dozen values, and each answer is due in half a second."""
    code = (
        "import sys; from megatron_gvpo.cli.app import main\n"
        f"code = main(['validate', 'yaml_configs/{name}.yaml', '--no-files'])\n"
        "print(code, [m for m in ('torch', 'megatron', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1].startswith("0 ")
    assert done.stdout.splitlines()[-1].endswith("[]")
