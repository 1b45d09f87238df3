"""The shipped demo assets: the items, the tokenizer, the two models, and what their README says of them."""

import json
import re
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_gvpo.config.schema import RolloutSection, ServersSection
from megatron_gvpo.rollout.engine import RolloutEngine
from megatron_gvpo.rollout.pool import PromptIds
from megatron_gvpo.rollout.server import LocalServer
from megatron_gvpo.rollout.wire import Sampling

FOLDER = Path(__file__).parents[2] / "examples" / "chain_sum"
MAX_NEW_TOKENS = 6
EOS = 1


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def make_models() -> ModuleType:
    """The script that made the assets, as a module."""
    spec = util.spec_from_file_location("make_models", FOLDER / "make_models.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def items(make_models: ModuleType) -> tuple[list[Any], list[Any]]:
    """Held-out and training items as the script draws them: 5 s, so once."""
    return make_models.make_items()


def hf_greedy(folder: Path, prompts: list[str]) -> list[list[int]]:
    """Greedy responses by Hugging Face generate, left-padded, each cut behind its EOS."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    batch = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    out = model.generate(**batch, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    responses = out[:, batch["input_ids"].shape[1] :].tolist()
    return [ids[: ids.index(EOS) + 1] if EOS in ids else ids for ids in responses]


def test_no_training_item_repeats_a_heldout_item() -> None:
    """A gain on held-out items is worth nothing if they were trained on. Not covered: 3 + 4 and 4 + 3 are two items."""
    heldout = [row["prompt"] for row in rows("heldout.jsonl")]
    training = [row["prompt"] for row in rows("train.jsonl")]
    assert len(heldout) == len(set(heldout)) == 400
    assert len(training) == len(set(training)) >= 5000
    assert not set(heldout) & set(training)


def test_every_answer_is_right() -> None:
    """A wrong reference answer would be rewarded. Computed here without reasoning-gym."""
    for row in rows("heldout.jsonl") + rows("train.jsonl"):
        match = re.fullmatch(r"(\d{1,2}) ([+-]) (\d{1,2}) =", row["prompt"])
        assert match, row
        left, sign, right = match.groups()
        assert int(row["answer"]) == int(left) + int(right) * (1 if sign == "+" else -1), row
    for row in rows("heldout.jsonl"):
        assert row["question"].endswith(row["prompt"])


def test_the_script_makes_the_shipped_items(items: tuple[list[Any], list[Any]]) -> None:
    """The files must be those of the script, or its README is about other data. Not covered: the training of the models,
    which takes minutes and differs in its last bits from machine to machine."""
    heldout, training = items
    assert [vars(item) for item in heldout] == rows("heldout.jsonl")
    assert [{"prompt": item.prompt, "answer": item.answer} for item in training] == rows("train.jsonl")


def test_the_script_makes_the_shipped_tokenizer(make_models: ModuleType, items: tuple[list[Any], list[Any]]) -> None:
    """Student and teacher must share a tokenizer, the script's, for the distillation objectives to compare their tokens."""
    made = json.loads(make_models.make_tokenizer(items[1]).backend_tokenizer.to_str())
    for name in ("student", "teacher"):
        assert json.loads((FOLDER / name / "tokenizer.json").read_text(encoding="utf-8")) == made


@pytest.mark.parametrize("name", ["student", "teacher"])
def test_tokens_of_prompt_and_response_are_those_of_the_whole_text(name: str) -> None:
    """The models were trained on prompt ids + answer ids: no BOS, and no merge across the border between the two."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / name)
    for row in rows("heldout.jsonl"):
        prompt, answer = tokenizer.encode(row["prompt"]), tokenizer.encode(f" {row['answer']}")
        assert len(prompt) <= 7
        assert len(answer) < MAX_NEW_TOKENS
        whole = f"{row['prompt']} {row['answer']}"
        assert tokenizer.encode(whole) == prompt + answer
        assert tokenizer.decode(prompt + answer) == whole
    other = "def f(x):\n    return  x  # naïve, 你好"
    assert tokenizer.decode(tokenizer.encode(other)) == other


@pytest.mark.parametrize("name", ["student", "teacher"])
def test_folders_are_what_the_demo_needs(name: str) -> None:
    """Float32 and tied; heads that tensor-parallel 4 divides, a vocabulary that it does not; EOS where every reader looks."""
    config: dict[str, Any] = json.loads((FOLDER / name / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "float32"
    assert config["tie_word_embeddings"] is True
    assert config["num_attention_heads"] % 4 == config["num_key_value_heads"] % 4 == config["intermediate_size"] % 4 == 0
    assert config["vocab_size"] % 4 != 0
    generation = json.loads((FOLDER / name / "generation_config.json").read_text())
    assert config["eos_token_id"] == generation["eos_token_id"] == EOS
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / name)
    assert tokenizer.eos_token_id == EOS
    assert len(tokenizer) == config["vocab_size"]


@pytest.mark.parametrize("name", ["student", "teacher"])
def test_accuracy_is_what_the_readme_says(name: str, make_models: ModuleType) -> None:
    """The README's numbers are those of the shipped weights, and its greedy accuracy, computed without sampling, is the one
    that generation gives (to one item of 400: two nearly equal logits may change places on another CPU)."""
    heldout = [make_models.Item(**row) for row in rows("heldout.jsonl")]
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / name)
    model = AutoModelForCausalLM.from_pretrained(FOLDER / name, dtype=torch.float32)
    accuracy = make_models.evaluate(model, heldout, tokenizer)
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    number = r"([\d.]+) ± ([\d.]+)"
    row = re.search(rf"^\| {name} \| {number} \| {number} \|", readme, re.MULTILINE)
    assert row, f"no row of {name} in the README's table"
    measured = (accuracy.greedy, accuracy.greedy_se, accuracy.sampled, accuracy.sampled_se)
    assert [float(value) for value in row.groups()] == pytest.approx([100 * value for value in measured], abs=0.3)

    texts = [
        tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in hf_greedy(FOLDER / name, [i.prompt for i in heldout])
    ]
    generated = sum(text == item.answer for text, item in zip(texts, heldout, strict=True)) / len(heldout)
    assert generated == pytest.approx(accuracy.greedy, abs=1.01 / len(heldout))


@pytest.mark.heavy
def test_sglang_serves_the_student_with_the_same_greedy_answers(tmp_path: Path) -> None:
    """The folder was saved by the trainer's transformers and is loaded by the server's, another version: config, tokenizer
    and weights must survive that. Not covered: the teacher, whose folder differs in the weights' values alone, and sampled
    log-probs, which the rollout tests compare."""
    for file in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (FOLDER / "student" / file).read_bytes() == (FOLDER / "teacher" / file).read_bytes()
    student = FOLDER / "student"
    prompts = [row["prompt"] for row in rows("heldout.jsonl")[:64]]
    tokenizer = AutoTokenizer.from_pretrained(student)
    ids = [PromptIds(f"item{i}", tokenizer.encode(prompt)) for i, prompt in enumerate(prompts)]
    rollout = RolloutSection(request_timeout_s=60)
    sampling = Sampling(max_new_tokens=MAX_NEW_TOKENS, stop_token_ids=(EOS,)).greedy()
    local = LocalServer(student, ServersSection(), run_dir=tmp_path, max_length=64)
    with local, RolloutEngine([local.endpoint], rollout, vocab_size=len(tokenizer), max_length=64) as engine:
        groups = sorted(engine.generate_groups(ids, 1, sampling), key=lambda group: group.index)
    assert [group.samples[0].response_ids for group in groups] == hf_greedy(student, prompts)
