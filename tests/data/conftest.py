"""A small real tokenizer with a chat template, built here so that no test needs a download."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] not in ('system', 'user', 'assistant') %}{{ raise_exception('unknown role ' + m['role']) }}{% endif %}"
    "<bos>{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a byte-level tokenizer that puts <bos> first, as Llama's does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<bos>", "<eos>", *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> PreTrainedTokenizerBase:
    from megatron_gvpo.data.prompts import load_tokenizer

    return load_tokenizer(tokenizer_folder)
