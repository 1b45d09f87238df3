"""A Hugging Face model and its Megatron model are the same function, at every layout, and go back bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.mcore.tiny import MODELS, VOCAB, build, logits, make_hf, sections
from tests.ranks import run_ranks

LAYOUTS: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [{"tensor": 2}, {"tensor": 2, "sequence": True}, {"pipeline": 2, "virtual_pipeline": 2}, {"pipeline": 2}],
    4: [{"tensor": 2, "pipeline": 2}, {"pipeline": 2, "first_stage_layers": 1}],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All models, as folders; one of them in several shards."""
    folder = tmp_path_factory.mktemp("hf")
    for name in MODELS:
        make_hf(folder, name, shard="100KB" if name == "qwen3" else "50GB")
    return folder


def _cases(rank: int, world: int, folder: str, layouts: list[dict[str, Any]], out: str) -> dict[str, dict[str, Any]]:
    """For every layout and model: the largest difference of logits, and what the way back changed."""
    import torch
    import transformers
    from safetensors.torch import load_file

    from megatron_gvpo.mcore.startup import shutdown, start
    from megatron_gvpo.mcore.weights import export_hf, save_hf

    ids = torch.randint(0, VOCAB, (2, 32), generator=torch.Generator().manual_seed(3))
    found: dict[str, dict[str, Any]] = {}
    for number, layout in enumerate(layouts):
        parallel, train, precision = sections(world, **layout)
        ranks = start(parallel, train, precision)
        for name in MODELS:
            path = Path(folder) / name
            chunks = build(path, ranks, parallel)
            ours = logits(chunks, ids, ranks)
            original: dict[str, torch.Tensor] = {}
            for file in path.glob("*.safetensors"):
                original |= load_file(file)
            exported = {n: t.clone() for n, t in export_hf(chunks)}
            target = Path(out) / f"{world}-{number}-{name}"
            save_hf(chunks, target, path, shard_bytes=100_000 if name == "qwen2" else 10**9)
            case: dict[str, Any] = {
                "names": sorted(exported) == sorted(original),
                "same": all(torch.equal(exported[n], original[n]) for n in original),
            }
            if ours is not None and ranks.tensor.rank == 0 and ranks.data.rank == 0:
                for which, source in (("logits", path), ("saved", target)):
                    reference = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
                    with torch.no_grad():
                        case[which] = float((reference(ids).logits - ours[..., :VOCAB]).abs().max())
                case["scale"] = float(ours[..., :VOCAB].abs().max())
            found[f"{layout} {name}"] = case
        shutdown_needed = number == len(layouts) - 1
        if shutdown_needed:
            shutdown()
    return found


@pytest.mark.parametrize("world", sorted(LAYOUTS))
def test_logits_agree_with_transformers_and_weights_come_back_bit_for_bit(world: int, folders: Path, tmp_path: Path) -> None:
    """Why: a wrong RoPE scaling, a wrong split of grouped queries or a lost tie trains another model than the server runs.

    Float32, every family, tied and untied, at TP1, TP2 with and without sequence parallelism, PP2, virtual PP2, TP2 x PP2 and
    uneven stages. Does not cover bfloat16, Transformer Engine's layers or GPUs.
    """
    results = run_ranks(_cases, world, str(folders), LAYOUTS[world], str(tmp_path), init=False, timeout=240)
    for case in (c for result in results for c in result.items()):
        name, facts = case
        assert facts["names"], name
        assert facts["same"], name
    compared = {name: facts for result in results for name, facts in result.items() if "logits" in facts}
    assert len(compared) == len(LAYOUTS[world]) * len(MODELS)
    worst = {name: facts for name, facts in compared.items() if max(facts["logits"], facts["saved"]) >= 1e-4}
    assert worst == {}
    assert all(facts["scale"] > 1e-1 for facts in compared.values())  # otherwise 1e-4 would say nothing
