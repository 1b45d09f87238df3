"""Makes everything in this folder from nothing: the items, the tokenizer, the teacher and the careless student.

    python examples/chain_sum/make_models.py [--out DIR] [--data-only]

The task is `chain_sum` of reasoning-gym with two terms of one or two digits: "12 + 34 =" -> " 46". Both models come from
one line of supervised training:

    random weights -- PRETRAIN_STEPS on right answers --+-- CARELESS_STEPS on answers that are often wrong --> student/
                                                        +-- TEACHER_STEPS more, learning rate to zero --> teacher/

So the student holds the skill but is careless: it spreads its probability over near misses. Reinforcement learning
sharpens such a skill in a minute of CPU; a skill that is missing altogether would take far longer.

It takes about 6 CPU minutes on one thread. Everything is seeded, but float sums differ between CPUs and torch versions,
so another machine gives models of the same quality, not the same bits. The folders in the repository are one such run.
"""

import argparse
import copy
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import reasoning_gym
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 1
PAD_ID, EOS_ID = 0, 1
HELDOUT_ITEMS, TRAIN_ITEMS = 400, 9600
PRETRAIN_STEPS, TEACHER_STEPS, BATCH, LEARNING_RATE = 2500, 1500, 64, 2e-3
CARELESS_STEPS, CARELESS_BATCH, CARELESS_LEARNING_RATE = 55, 128, 5e-4
WRONG_SHARE = 0.7  # of the answers the careless student sees
WRONG_BY = (-10, -2, -1, 1, 2, 10)  # slips in either digit; the right answer stays likelier than any one of them
IGNORED = -100  # cross_entropy's mark for a position that is not a target


@dataclass(frozen=True)
class Item:
    """One problem. `prompt` is the exact text that is tokenised, `question` the wording reasoning-gym gave it."""

    prompt: str
    answer: str
    question: str


def make_items(seed: int = SEED) -> tuple[list[Item], list[Item]]:
    """Distinct problems in random order, split into held-out and training items; no problem is in both."""
    drawn = reasoning_gym.create_dataset(
        "chain_sum", size=60_000, seed=seed, min_terms=2, max_terms=2, min_digits=1, max_digits=2
    )
    distinct: dict[str, Item] = {}
    for entry in drawn:
        question, answer = str(entry["question"]), str(entry["answer"])
        prompt = question.rsplit(": ", 1)[1]
        distinct.setdefault(prompt, Item(prompt, answer, question))
    items = sorted(distinct.values(), key=lambda item: item.prompt)
    random.Random(seed).shuffle(items)
    return items[:HELDOUT_ITEMS], items[HELDOUT_ITEMS : HELDOUT_ITEMS + TRAIN_ITEMS]


def make_tokenizer(items: Sequence[Item]) -> PreTrainedTokenizerFast:
    """Byte-level BPE that takes any text, with digits one by one and " +", " -", " =" as single tokens; adds no BOS."""
    bpe = Tokenizer(models.BPE())
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    bpe.pre_tokenizer = pre_tokenizers.Sequence(split)  # pyright: ignore[reportAttributeAccessIssue]
    bpe.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=512,  # never reached: the corpus holds only three merges
        special_tokens=["<pad>", "<eos>"],  # PAD_ID and EOS_ID, in this order
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([f"{item.prompt} {item.answer}" for item in items[:2000]], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<pad>",
        eos_token="<eos>",
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int = SEED) -> LlamaForCausalLM:
    """A random Llama of 0.79M parameters. 4 heads and 4 key-value heads divide by tensor-parallel 2 and 4; the
    vocabulary (261) divides by neither, so that its padding is always exercised."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    return LlamaForCausalLM(config).float()


def encode(items: Sequence[Item], tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """Right-padded ids [N, L] and their labels [N, L], int64; only the answer and its EOS are targets."""
    prompts = [tokenizer.encode(item.prompt) for item in items]
    answers = [[*tokenizer.encode(f" {item.answer}"), EOS_ID] for item in items]
    length = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    ids_NL = torch.full((len(items), length), PAD_ID)
    labels_NL = torch.full((len(items), length), IGNORED)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids_NL[row, :end] = torch.tensor(prompt + answer)
        labels_NL[row, len(prompt) : end] = torch.tensor(answer)
    return ids_NL, labels_NL


def train(
    model: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    steps: int,
    batch: Callable[[], tuple[Tensor, Tensor]],
    learning_rate: Callable[[int], float],
) -> None:
    """`steps` steps of cross-entropy on the answers; `learning_rate` gives step i (from 0) its rate."""
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        ids_BL, labels_BL = batch()
        logits_BLV = model(input_ids=ids_BL, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits_BLV[:, :-1].flatten(0, 1), labels_BL[:, 1:].flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 250 == 0:
            print(f"  step {step + 1} of {steps}: loss {loss.item():.4f}", flush=True)


@dataclass(frozen=True)
class Accuracy:
    """Shares in [0, 1] of the items, with standard errors over items."""

    greedy: float
    greedy_se: float
    sampled: float
    sampled_se: float

    def __str__(self) -> str:
        return (
            f"greedy {100 * self.greedy:.1f} +- {100 * self.greedy_se:.1f} %, "
            f"temperature 1 {100 * self.sampled:.1f} +- {100 * self.sampled_se:.1f} %"
        )


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, items: Sequence[Item], tokenizer: PreTrainedTokenizerFast) -> Accuracy:
    """Both accuracies from one forward pass over the right answers, without sampling.

    Greedy decoding gives the right answer if and only if each of its tokens is the argmax after the ones before it.
    A sample at temperature 1 is right with exactly the probability of the answer's tokens, so its mean is known, too.
    """
    ids_NL, labels_NL = encode(items, tokenizer)
    logprobs_NLV = model(input_ids=ids_NL, use_cache=False).logits[:, :-1].log_softmax(-1)
    targets_NL = labels_NL[:, 1:]
    answer_NL = targets_NL != IGNORED
    hit_NL = logprobs_NLV.argmax(-1) == targets_NL
    right_N = (hit_NL | ~answer_NL).all(-1).double()
    token_NL = logprobs_NLV.gather(-1, targets_NL.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    prob_N = token_NL.where(answer_NL, 0.0).sum(-1).double().exp()
    root = math.sqrt(len(items))
    return Accuracy(right_N.mean().item(), right_N.std().item() / root, prob_N.mean().item(), prob_N.std().item() / root)


def careless(item: Item, rng: random.Random) -> Item:
    """The item, with a wrong answer in WRONG_SHARE of the cases."""
    if rng.random() >= WRONG_SHARE:
        return item
    return Item(item.prompt, str(int(item.answer) + rng.choice(WRONG_BY)), item.question)


def make_models(train_items: Sequence[Item], heldout: Sequence[Item], out: Path, seed: int = SEED) -> None:
    """Trains both models and writes `out/student` and `out/teacher`."""
    rng = random.Random(seed)
    tokenizer = make_tokenizer(train_items)
    model = make_model(tokenizer, seed)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, vocabulary {len(tokenizer)}", flush=True)
    ids_NL, labels_NL = encode(train_items, tokenizer)

    def right_batch() -> tuple[Tensor, Tensor]:
        rows_B = torch.tensor(rng.sample(range(len(train_items)), BATCH))
        return ids_NL[rows_B], labels_NL[rows_B]

    def warm_cosine(step: int) -> float:
        decay = 0.5 * (1 + math.cos(math.pi * step / (PRETRAIN_STEPS + TEACHER_STEPS)))
        return LEARNING_RATE * min(1.0, (step + 1) / 50) * decay

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.02)
    train(model, optimizer, PRETRAIN_STEPS, right_batch, warm_cosine)
    print("branch point:", evaluate(model, heldout, tokenizer), flush=True)

    student = make_careless(copy.deepcopy(model), train_items, tokenizer, seed)
    print("student:", evaluate(student, heldout, tokenizer), flush=True)
    save(student, tokenizer, out / "student")

    train(model, optimizer, TEACHER_STEPS, right_batch, lambda step: warm_cosine(PRETRAIN_STEPS + step))
    print("teacher:", evaluate(model, heldout, tokenizer), flush=True)
    save(model, tokenizer, out / "teacher")


def make_careless(
    model: LlamaForCausalLM, items: Sequence[Item], tokenizer: PreTrainedTokenizerFast, seed: int
) -> LlamaForCausalLM:
    """The same model after a few steps on careless answers, which blur what it knows."""
    rng = random.Random(seed)

    def careless_batch() -> tuple[Tensor, Tensor]:
        return encode([careless(item, rng) for item in rng.sample(items, CARELESS_BATCH)], tokenizer)

    optimizer = torch.optim.AdamW(model.parameters(), lr=CARELESS_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    train(model, optimizer, CARELESS_STEPS, careless_batch, lambda _: CARELESS_LEARNING_RATE)
    return model


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """A complete Hugging Face folder: config, float32 weights, generation defaults, tokenizer."""
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_jsonl(path: Path, rows: Sequence[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the items, tokenizer, teacher and student of the chain_sum demo.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder to write to")
    parser.add_argument("--data-only", action="store_true", help="write the two .jsonl files and no models")
    args = parser.parse_args()
    torch.set_num_threads(1)  # sums in one order, so that a rerun on the same machine gives the same models
    heldout, train_items = make_items()
    args.out.mkdir(parents=True, exist_ok=True)
    write_jsonl(args.out / "heldout.jsonl", [vars(item) for item in heldout])
    write_jsonl(args.out / "train.jsonl", [{"prompt": item.prompt, "answer": item.answer} for item in train_items])
    if not args.data_only:
        make_models(train_items, heldout, args.out)


if __name__ == "__main__":
    main()
