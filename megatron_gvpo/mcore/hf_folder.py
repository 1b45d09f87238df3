"""Hugging Face folders: which tensors a model has, reading them from safetensors, writing them in shards.

Only safetensors are read; pickled weights can run code when they are opened, so they are refused.
"""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_gvpo.config.hf_shape import ModelShape
from megatron_gvpo.mcore.errors import SetupError

INDEX = "model.safetensors.index.json"
# What a folder holds beside weights, and what a server or a later training run needs of it.
_KEPT_SUFFIXES = {".json", ".jinja", ".model", ".txt"}


def hf_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name and size of every tensor of the model, in the order of its layers. A tied output layer is not among them."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab, shape.hidden)}
    for layer in range(shape.layers):
        here = f"model.layers.{layer}."
        tensors[here + "input_layernorm.weight"] = (shape.hidden,)
        for name, width in (("q", queries), ("k", keys), ("v", keys)):
            tensors[f"{here}self_attn.{name}_proj.weight"] = (width, shape.hidden)
            if shape.qkv_bias:
                tensors[f"{here}self_attn.{name}_proj.bias"] = (width,)
        if shape.qk_norm:
            tensors[here + "self_attn.q_norm.weight"] = (shape.head_dim,)
            tensors[here + "self_attn.k_norm.weight"] = (shape.head_dim,)
        tensors[here + "self_attn.o_proj.weight"] = (shape.hidden, queries)
        tensors[here + "post_attention_layernorm.weight"] = (shape.hidden,)
        tensors[here + "mlp.gate_proj.weight"] = (shape.ffn, shape.hidden)
        tensors[here + "mlp.up_proj.weight"] = (shape.ffn, shape.hidden)
        tensors[here + "mlp.down_proj.weight"] = (shape.hidden, shape.ffn)
    tensors["model.norm.weight"] = (shape.hidden,)
    if not shape.tied:
        tensors["lm_head.weight"] = (shape.vocab, shape.hidden)
    return tensors


class TensorSource(Protocol):
    """Where a model's first weights come from."""

    def tensor(self, name: str) -> Tensor:
        """The whole tensor of this Hugging Face name, on the CPU."""
        ...


class HfFolder:
    """The tensors of a folder of safetensors files, read one by one.

    ValueError where the folder does not hold exactly the tensors of the shape, naming them, or where a file is damaged.
    """

    def __init__(self, path: str | Path, shape: ModelShape) -> None:
        self.path = Path(path)
        self._files: dict[str, Any] = {}
        self._where = self._find()
        self._sizes = hf_tensors(shape)
        self._check(shape)

    def tensor(self, name: str) -> Tensor:
        tensor = self._open(self._where[name]).get_tensor(name)
        if tuple(tensor.shape) != self._sizes[name]:
            raise SetupError(
                f"{self.path}: {name} has the shape {list(tensor.shape)}, config.json says {list(self._sizes[name])}"
            )
        return tensor

    def _check(self, shape: ModelShape) -> None:
        missing = [name for name in self._sizes if name not in self._where]
        if missing:
            raise SetupError(f"{self.path}: these tensors are missing: {_some(missing)}")
        unexpected = [name for name in self._where if name not in self._sizes and not _harmless(name, shape)]
        if unexpected:
            raise SetupError(f"{self.path}: config.json describes a model without these tensors: {_some(unexpected)}")

    def _find(self) -> dict[str, str]:
        index = self.path / INDEX
        if index.exists():
            try:
                where = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise SetupError(f"{index}: not an index of safetensors files ({type(error).__name__}: {error})") from None
            for file in set(where.values()):
                if Path(file).name != file or not (self.path / file).is_file():
                    raise SetupError(f"{index}: names the file {file!r}, which is not in the folder")
            return where
        files = sorted(path.name for path in self.path.glob("*.safetensors"))
        if not files:
            pickled = any(self.path.glob("*.bin"))
            hint = "only pickled weights (*.bin), which are not opened: convert them" if pickled else "no *.safetensors"
            raise SetupError(f"{self.path}: {hint}")
        return {name: file for file in files for name in self._open(file).keys()}  # noqa: SIM118 - not a dict

    def _open(self, file: str) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(self.path / file, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise SetupError(f"{self.path / file}: cannot be read as safetensors: {error}") from error
        return self._files[file]


class RandomTensors:
    """A model's random start: normal with a standard deviation of 0.02, norms 1, biases 0; float32.

    Every tensor has a generator of its own, from the seed and its name, so the layout of the ranks does not matter.
    """

    def __init__(self, shape: ModelShape, seed: int, std: float = 0.02) -> None:
        self._sizes = hf_tensors(shape)
        self._seed = seed
        self._std = std

    def tensor(self, name: str) -> Tensor:
        size = self._sizes[name]
        if name.endswith("bias"):
            return torch.zeros(size)
        if "norm" in name:
            return torch.ones(size)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        return torch.empty(size).normal_(0.0, self._std, generator=generator)


class HfWriter:
    """Writes tensors, in the order they come, into safetensors files of at most `shard_bytes` (or one tensor) each."""

    def __init__(self, path: Path, shard_bytes: int) -> None:
        self._path = path
        self._limit = shard_bytes
        self._shards: list[list[str]] = []
        self._waiting: dict[str, Tensor] = {}
        self._bytes = self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._waiting and self._bytes + size > self._limit:
            self._flush()
        # A copy: the tensor may be a view of a weight that goes on training, or of one shared with another name.
        self._waiting[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._bytes += size
        self._total += size

    def finish(self) -> None:
        """Write what is left, give the files their final names, and the index where there is more than one."""
        if self._waiting:
            self._flush()
        count = len(self._shards)
        names = ["model.safetensors"] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        for number, name in enumerate(names):
            self._part(number).rename(self._path / name)
        if count > 1:
            weight_map = {tensor: names[i] for i, shard in enumerate(self._shards) for tensor in shard}
            index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
            (self._path / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _flush(self) -> None:
        save_file(self._waiting, self._part(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(self._waiting))
        self._waiting, self._bytes = {}, 0

    def _part(self, number: int) -> Path:
        return self._path / f"part-{number:05d}"


def copy_description(source: Path, target: Path, dtype: torch.dtype) -> None:
    """Config, tokenizer, chat template and generation settings; the config's dtype becomes that of the written weights."""
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix in _KEPT_SUFFIXES and file.name != INDEX:
            shutil.copyfile(file, target / file.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    # transformers 5 writes `dtype`, before it was `torch_dtype`; both read the older one.
    key = "dtype" if "dtype" in config else "torch_dtype"
    config[key] = str(dtype).removeprefix("torch.")
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def replace_folder(new: Path, target: Path) -> None:
    """Put the finished folder `new` in the place of `target`; a kill in between leaves the old one beside, as `NAME.old`."""
    old = target.with_name(target.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    new.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _harmless(name: str, shape: ModelShape) -> bool:
    """Left by older versions of transformers: tables that are computed, and a second copy of a tied matrix."""
    return name.endswith("rotary_emb.inv_freq") or (shape.tied and name == "lm_head.weight")


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
