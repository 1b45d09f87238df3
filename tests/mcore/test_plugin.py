"""The objectives in a stranger's Megatron-Core loop: the same loss and gradients as `train`, and errors that can be mended."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.mcore.plugin_cases import Case, own_share, through_foreign_loop
from tests.mcore.step_cases import OBJECTIVES, through_engine
from tests.mcore.tiny import VOCAB, make_hf, sections
from tests.ranks import free_port, run_ranks

ROOT = Path(__file__).parents[2]
# gvpo gives coefficients and its loss; sft gives coefficients; grpo differentiates terms of its own.
NAMES = ("gvpo", "grpo", "sft")
MODES = [(per_token, outputs) for per_token in (False, True) for outputs in ("logits", "hidden")]
Layout = dict[str, int]
Found = list[tuple[Layout, Case, float, dict[str, Any]]]


def _two_ranks() -> list[tuple[Layout, Case]]:
    cases: list[tuple[Layout, Case]] = []
    for name in NAMES:
        for per_token, outputs in MODES:
            cases += [({"tensor": 2}, Case(name, per_token, outputs)), ({"pipeline": 2}, Case(name, per_token, outputs))]
            cases.append(({}, Case(name, per_token, outputs, micro=3)))
    # torch's DDP makes no difference to the objective, only to what divides the gradient.
    cases += [({}, Case("gvpo", per_token, outputs, wrapper="torch", micro=3)) for per_token, outputs in MODES]
    # One weight with two gradients: that of the head, and that of the embedding on another stage.
    cases += [({"pipeline": 2}, Case("gvpo", per_token, "hidden", tied=True)) for per_token in (False, True)]
    return cases


def _four_ranks() -> list[tuple[Layout, Case]]:
    return [
        ({"pipeline": 2}, Case("gvpo", False, "hidden", micro=3)),
        ({"pipeline": 2}, Case("grpo", True, "logits", micro=3)),
        ({"pipeline": 2, "virtual_pipeline": 2}, Case("gvpo", False, "hidden", tied=True, micro=3)),
        ({"tensor": 2, "pipeline": 2}, Case("grpo", True, "logits")),
        ({"tensor": 2, "sequence": 1}, Case("gvpo", True, "hidden", spec="plain", micro=3)),
        ({"tensor": 2, "sequence": 1}, Case("sft", False, "logits", spec="plain", micro=3)),
        ({"context": 2}, Case("gvpo", False, "hidden", spec="plain", micro=3)),
        ({"context": 2, "tensor": 2, "sequence": 1}, Case("gvpo", True, "logits", spec="plain")),
    ]


CASES: dict[int, Callable[[], list[tuple[Layout, Case]]]] = {2: _two_ranks, 4: _four_ranks}


def _start(world: int, layout: Layout) -> Any:
    """Process groups and CPU device mode, which a stranger's own start-up brings."""
    from megatron_gvpo.mcore.startup import start

    parallel, train, precision = sections(world, **{**layout, "sequence": bool(layout.get("sequence"))})
    return start(parallel, train, precision)


def _foreign(rank: int, world: int, folder: str) -> Found:
    from megatron_gvpo.mcore.startup import shutdown

    found: Found = []
    for layout, case in CASES[world]():
        _start(world, layout)
        loss, gradients = through_foreign_loop(case, layout, folder)
        found.append((layout, case, loss, gradients if rank == 0 else {}))
    shutdown()
    return found


def _train(rank: int, world: int, folder: str) -> dict[tuple[str, str], tuple[float, float, dict[str, Any]]]:
    from megatron_gvpo.mcore.startup import shutdown

    ranks = _start(world, {})
    pairs = [(name, "llama-four") for name in NAMES] + [("gvpo", "llama-four-tied")]
    found = {(o, m): through_engine(f"{folder}/{m}", ranks, sections(world)[0], o, micro=99) for o, m in pairs}
    shutdown()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hf")
    for name in ("llama-four", "llama-four-tied"):
        make_hf(root, name)
    return root


@pytest.fixture(scope="module")
def train(folder: Path) -> dict[tuple[str, str], tuple[float, float, dict[str, Any]]]:
    """`train`'s engine on one rank and one micro-batch; `test_step_layouts.py` shows that it is the same for every layout."""
    (found,) = run_ranks(_train, 1, str(folder), init=False, timeout=150)
    return found


@pytest.mark.heavy
@pytest.mark.parametrize("world", sorted(CASES))
def test_loss_and_gradients_are_those_of_train(world: int, folder: Path, train: Any) -> None:
    """Why: an objective has to mean the same in a loop that is not ours. A model of Megatron's own layers, Megatron's DDP with
    its finalizer or torch's DDP, ragged and missing micro-batches, an iterator of foreign records, both normalisation modes,
    logits and hidden states: loss and whole gradient equal to `train`'s to 1e-9, in float64.

    Does not cover a GPU, bf16, experts, FSDP, or the distributed optimizer (which changes no gradient).
    """
    results = run_ranks(_foreign, world, str(folder), init=False, timeout=280)
    for number, (layout, case, loss, gradients) in enumerate(results[0]):
        label = f"{layout} {case}"
        assert all(other[number][2] == pytest.approx(loss, rel=1e-12) for other in results), label
        want_loss, _, want = train[case.objective, case.model]
        assert loss == pytest.approx(want_loss, rel=1e-9), label
        largest = max(float(g.abs().max()) for g in want.values())
        assert max(float((gradients[n] - want[n]).abs().max()) for n in want) / largest < 1e-9, label


def _steps(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Several steps on the same samples, without samples, and with samples that differ between tensor-parallel ranks."""
    import torch
    from megatron.core import parallel_state as mpu
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_gvpo.mcore import make_forward_step, prepare_step
    from megatron_gvpo.mcore.startup import shutdown
    from megatron_gvpo.objectives import create_objective
    from tests.mcore.plugin_cases import own_chunks, wrapped

    found: dict[str, Any] = {}
    _start(world, {})
    case = Case("gvpo", False, "logits")
    torch.manual_seed(5)
    chunks = own_chunks(case, {})
    # Dropout is Megatron's default: it must be in the loss, as the model says, and not in the recorded log-probs.
    chunks[0].config.hidden_dropout = 0.1
    for layer in chunks[0].decoder.layers:
        layer.hidden_dropout = 0.1
    model = wrapped(case, chunks)
    mine = own_share(3, mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size(), drop=("old_logprobs",))
    forward_step = make_forward_step(create_objective("gvpo", OBJECTIVES["gvpo"]), vocab_size=VOCAB)

    def run(step: Any) -> Any:
        model.zero_grad_buffer()
        get_forward_backward_func()(forward_step_func=forward_step, model=model, forward_only=False, **step.schedule())
        return step.finish()

    first = prepare_step(forward_step, mine, model)
    found["training"] = all(module.training for module in model.modules())
    ratio = first.batch.sequences.sum_of("logprobs") - first.batch.sequences.sum_of("old_logprobs")
    found["first ratio"] = float(ratio.abs().max())
    found["filled"] = [s.old_logprobs is not None for micro in mine for s in micro if any(s.mask)]
    found["masked"] = [s.old_logprobs for micro in mine for s in micro if not any(s.mask)]
    run(first)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.05 * parameter.main_grad)
    second = prepare_step(forward_step, mine, model)
    moved = second.batch.sequences.sum_of("logprobs") - second.batch.sequences.sum_of("old_logprobs")
    found["second ratio"] = float(moved.abs().max())
    old = second.batch.sequences.sum_of("old_logprobs") - first.batch.sequences.sum_of("old_logprobs")
    found["old stays"] = float(old.abs().max())

    calls: list[int] = []

    def counted_call(called: Any, micro: Any) -> Any:
        calls.append(1)
        return called(micro.tokens_BS, micro.positions_BS, None)

    counted = make_forward_step(create_objective("gvpo", {}), vocab_size=VOCAB, call=counted_call)
    fresh = own_share(3, mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size(), drop=("old_logprobs",))
    prepare_step(counted, fresh, model, single_step=True)
    found["calls with single_step"] = len(calls)

    masked = [[s for s in micro if not any(s.mask)] for micro in mine]
    nothing = prepare_step(forward_step, masked, model)
    report = run(nothing)
    found["empty"] = (nothing.empty, report.loss, max(float(p.main_grad.abs().max()) for p in model.parameters()))
    found["dropped"] = [d.reason for d in nothing.dropped]

    remembering = make_forward_step(create_objective("tv_opd", {}), vocab_size=VOCAB)
    for accepted in (False, True):
        step = prepare_step(remembering, mine, model)
        get_forward_backward_func()(forward_step_func=remembering, model=model, forward_only=False, **step.schedule())
        step.finish(accepted)
        found[f"remembers {accepted}"] = remembering.objective.state_dict()

    _start(world, {"tensor": 2})
    chunks = own_chunks(case, {"tensor": 2})
    other = own_share(4, 0, 1)
    other[0][0].reward = float(rank)
    found["differ"] = _message(lambda: prepare_step(forward_step, other, wrapped(case, chunks)))
    shutdown()
    return found


def _message(action: Callable[[], Any]) -> str:
    try:
        action()
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_several_steps_on_the_same_samples_and_none_at_all() -> None:
    """Why: a loop of one's own takes several steps on a batch (the old log-probs must stay those of the first), meets batches
    with nothing to train on, and loses what an objective remembers if nobody tells it of the step.

    Does not cover context parallelism, where the old log-probs of a sample come from several ranks.
    """
    for found in run_ranks(_steps, 2, "", init=False, timeout=150):
        assert found["training"]
        assert found["first ratio"] == 0.0
        assert all(found["filled"])
        assert found["masked"] in ([], [None])
        assert found["second ratio"] > 1e-3
        assert found["old stays"] == 0.0
        assert found["calls with single_step"] == 0
        assert found["empty"] == (True, 0.0, 0.0)
        assert found["dropped"] == ["empty"]
        assert found["remembers False"] != found["remembers True"]
        assert "ranks 0 and 1 work on the same samples (data-parallel rank 0), but were given different ones" in found["differ"]


def _mistakes(rank: int, world: int) -> dict[str, str]:
    import torch
    from megatron.core import parallel_state as mpu
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_gvpo.mcore import make_forward_step, prepare_step, use_hidden_state_head
    from megatron_gvpo.mcore.startup import shutdown
    from megatron_gvpo.objectives import create_objective
    from tests.mcore.plugin_cases import own_chunks, wrapped

    _start(world, {})
    case = Case("gvpo", False, "logits")
    model = wrapped(case, own_chunks(case, {}))
    config = model.config
    gvpo = create_objective("gvpo", {})
    found: dict[str, str] = {}

    def mine(**changes: Any) -> Any:
        share = own_share(4, mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size())
        for name, value in changes.items():
            setattr(share[0][0], name, value)
        return share

    def prepared(samples: Any = None, trained: Any = None, objective: Any = gvpo, **options: Any) -> Any:
        forward_step = make_forward_step(objective, **{"vocab_size": VOCAB, **options})
        return forward_step, prepare_step(forward_step, mine() if samples is None else samples, trained or model)

    def mistake(name: str, action: Callable[[], Any]) -> None:
        found[name] = _message(action)

    def scheduled(call: Any = None, batch_of: Any = None) -> None:
        options = {} if call is None else {"call": call}
        forward_step, step = prepared(objective=create_objective("sft", {}), batch_of=batch_of, **options)
        get_forward_backward_func()(forward_step_func=forward_step, model=model, forward_only=False, **step.schedule())

    mistake("per token", lambda: prepared(calculate_per_token_loss=True))
    mistake("vocabulary", lambda: prepared(vocab_size=400))
    mistake("outputs", lambda: make_forward_step(gvpo, vocab_size=VOCAB, model_outputs="hiden"))  # pyright: ignore
    mistake("no head", lambda: prepared(model_outputs="hidden"))
    mistake("gkd", lambda: make_forward_step(create_objective("gkd", {"teacher": "topk"}), vocab_size=VOCAB))
    mistake("flat samples", lambda: prepared(mine()[0]))
    mistake("reward", lambda: prepared(mine(reward=None)))
    mistake("id", lambda: prepared(mine(prompt_ids=[VOCAB])))
    mistake("prompt", lambda: prepared(mine(prompt_ids=[])))
    mistake("signal", lambda: prepared(mine(old_logprobs=[-1.0] * 99)))
    mistake("teacher", lambda: prepared(mine(teacher_logprobs=None), objective=create_objective("opd", {})))
    mistake("not a model", lambda: prepared(trained=torch.nn.Linear(2, 2)))
    mistake("bare", lambda: prepared(trained=model.module))
    mistake("labels", lambda: scheduled(call=lambda m, x: m(x.tokens_BS, x.positions_BS, None, labels=x.tokens_BS)))
    mistake("whole vocabulary", lambda: scheduled(call=lambda m, x: m(x.tokens_BS, x.positions_BS, None).repeat(1, 1, 2)))
    mistake("record", lambda: scheduled(batch_of=lambda item: {"item": item}))
    alone = [torch.distributed.new_group([r]) for r in range(world)][rank]
    wrong_group = torch.nn.parallel.DistributedDataParallel(own_chunks(case, {})[0], process_group=alone)
    mistake("torch's group", lambda: prepared(trained=wrong_group))
    config.mtp_num_layers = 1
    mistake("mtp", prepared)
    config.mtp_num_layers = None
    use_hidden_state_head(model)
    mistake("hidden head", prepared)
    forward_step, step = prepared(objective=create_objective("sft", {}), model_outputs="hidden")
    get_forward_backward_func()(forward_step_func=forward_step, model=model, forward_only=False, **step.schedule())
    step.finish()
    mistake("twice", step.finish)
    share = mine()
    shutdown()
    mistake("no groups", lambda: prepared(share))
    return found


WORDS = {
    "per token": "calculate_per_token_loss=False, and make_forward_step was given True",
    "vocabulary": "vocab_size is 400, and the model's output layer has 384 rows",
    "outputs": "'hiden'; it must be one of hidden, logits",
    "no head": "call use_hidden_state_head(model) once",
    "gkd": "'gkd' needs the teacher's distributions (topk)",
    "flat samples": "it has to hold lists of samples",
    "reward": "has the reward None, and objective 'gvpo' needs a number",
    "id": "holds a token id outside 0 to 299",
    "prompt": "has an empty prompt",
    "signal": "has 99 old_logprobs for",
    "teacher": "has no teacher_logprobs, and objective 'opd' needs them",
    "not a model": "no Megatron-Core language model inside this Linear",
    "bare": "gradient_reduction='sum' or 'mean'",
    "torch's group": "averages over 1 ranks, and 2 hold different samples",
    "labels": "that is a loss: call the model without labels",
    "whole vocabulary": "has width 768, but this rank's vocabulary shard [0, 384) has width 384",
    "record": "batch_of gave a dict",
    "mtp": "mtp_num_layers is 1",
    "hidden head": "make_forward_step needs model_outputs='hidden'",
    "twice": "finish() was called before",
    "no groups": "call parallel_state.initialize_model_parallel() first",
}


def test_mistakes_are_named_in_one_line_on_every_rank() -> None:
    """Why: in a stranger's loop a wrong width, mode or sample otherwise trains on nonsense, or leaves the other ranks waiting.
    Not here: what only a GPU or a tensor-parallel group of another shape shows.
    """
    for found in run_ranks(_mistakes, 2, init=False, timeout=150):
        assert set(found) == set(WORDS)
        for name, words in WORDS.items():
            assert words in found[name], f"{name}: {found[name]}"
            assert "\n" not in found[name], name


@pytest.mark.parametrize("layout", [["--pipeline", "2"], []], ids=["pipeline", "data"])
def test_the_example_learns(layout: list[str]) -> None:
    """Why: the script is what a newcomer copies; as shipped, under torchrun, its few steps must raise the probability of the
    rewarded responses and lower that of the others. Does not cover GPUs.
    """
    script = ROOT / "examples" / "foreign_loop" / "train.py"
    assert len(script.read_text().splitlines()) < 60
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-addr",
        "127.0.0.1",
    ]
    command += ["--master-port", str(free_port()), str(script), "--cpu", *layout]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"step +(\d+) .*rewarded (\S+) others (\S+)", done.stdout)
    assert len(rows) >= 5, done.stdout
    rewarded, others = ([float(row[i]) for row in rows] for i in (1, 2))
    assert rewarded[-1] > rewarded[0] + 1.0, done.stdout
    assert others[-1] < others[0], done.stdout
