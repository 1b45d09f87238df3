"""A loop of Megatron-Core's own, with GVPO as its loss. CPU: torchrun --nproc-per-node 2 train.py --tensor 2 --cpu"""

import argparse
import os
import random

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_gvpo.data.samples import Sample
from megatron_gvpo.mcore import cpu_device, make_forward_step, prepare_step
from megatron_gvpo.objectives import create_objective

parser = argparse.ArgumentParser()
for name, default in (("--tensor", 1), ("--pipeline", 1), ("--steps", 8)):
    parser.add_argument(name, type=int, default=default)
parser.add_argument("--cpu", action="store_true", help="gloo ranks instead of GPUs")
args = parser.parse_args()
if args.cpu:
    cpu_device.enable()
else:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("gloo" if args.cpu else "nccl")
parallel_state.initialize_model_parallel(args.tensor, args.pipeline)
tensor_parallel.model_parallel_cuda_manual_seed(1)

sizes = dict(num_layers=4, hidden_size=64, num_attention_heads=4, attention_dropout=0.0, hidden_dropout=0.0)
layout = dict(tensor_model_parallel_size=args.tensor, pipeline_model_parallel_size=args.pipeline, pipeline_dtype=torch.float32)
config = TransformerConfig(**sizes, **layout)
stage = dict(pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage())
gpt = GPTModel(config, get_gpt_layer_local_spec(), 128, 64, position_embedding_type="rope", **stage).cuda()
model = DistributedDataParallel(config, DistributedDataParallelConfig(), gpt)
optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3), [model])
config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, optimizer.scale_loss

rng = random.Random(parallel_state.get_data_parallel_rank())  # the same samples on all ranks that share them
samples = []
for number in range(16):  # a response of even ids is right; sampling and rewards are your own loop's
    ids = [2 * rng.randrange(50) + number % 2 for _ in range(6)]
    samples.append(Sample(f"prompt {number // 8}", [1, 2, 3 + number // 8], ids, [1] * 6, reward=1.0 - number % 2))

forward_step = make_forward_step(create_objective("gvpo", {"beta": 0.1}), vocab_size=100)
for number in range(args.steps):
    step = prepare_step(forward_step, [samples[i : i + 4] for i in range(0, 16, 4)], model)
    model.zero_grad_buffer()
    optimizer.zero_grad()
    get_forward_backward_func()(forward_step_func=forward_step, model=model, forward_only=False, **step.schedule())
    report = step.finish(accepted=optimizer.step()[0])
    logprob, right = report.sequences.sum_of("logprobs"), report.sequences.reward_N > 0
    if torch.distributed.get_rank() == 0:
        print(f"step {number} loss {report.loss:.4f} rewarded {logprob[right].mean():.2f} others {logprob[~right].mean():.2f}")
