"""DDP, Megatron's optimizer with its learning-rate schedule, and a step that a non-finite gradient cannot poison."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module

from megatron_gvpo.config.schema import OptimizerSection, PrecisionSection


@dataclass(frozen=True)
class Training:
    """The wrapped model chunks of this rank with what updates them."""

    chunks: list[Any]
    optimizer: Any
    scheduler: Any

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])


def make_training(
    chunks: list[Any], optimizer: OptimizerSection, precision: PrecisionSection, total_steps: int, params_dtype: torch.dtype
) -> Training:
    """Wrap the model chunks for training.

    total_steps: optimizer steps of the whole run, over which the schedule decays. params_dtype: dtype of the weights.
    """
    config = chunks[0].config
    bf16 = params_dtype == torch.bfloat16
    # The objective divides by the global denominator, so gradients are summed over ranks and never divided again. DDP reads
    # this when it is built.
    config.calculate_per_token_loss = True
    if bf16:
        chunks = [NarrowModule(config, chunk) for chunk in chunks]
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=precision.grad_reduce_fp32 and bf16,
        overlap_grad_reduce=optimizer.overlap_grad_reduce,
        overlap_param_gather=optimizer.overlap_param_gather,
        use_distributed_optimizer=optimizer.distributed,
        # A non-finite gradient is found before the optimizer step, counted and skipped; DDP's own check would end the run.
        check_for_nan_in_grad=False,
    )
    wrapped: list[Any] = [DistributedDataParallel(config, ddp, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)]
    megatron = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=optimizer.lr,
            min_lr=optimizer.min_lr,
            weight_decay=optimizer.weight_decay,
            adam_beta1=optimizer.beta1,
            adam_beta2=optimizer.beta2,
            adam_eps=optimizer.eps,
            clip_grad=optimizer.clip_grad,
            bf16=bf16,
            params_dtype=params_dtype,
            use_distributed_optimizer=optimizer.distributed,
            overlap_param_gather=optimizer.overlap_param_gather,
            optimizer_cpu_offload=optimizer.cpu_offload,
            optimizer_offload_fraction=1.0 if optimizer.cpu_offload else 0.0,
        ),
        wrapped,
        use_gloo_process_groups=False,
    )
    scheduler = OptimizerParamScheduler(
        megatron,
        # Megatron counts from step 0: so the first step is not taken at a learning rate of zero.
        init_lr=optimizer.lr / (optimizer.warmup_steps + 1),
        max_lr=optimizer.lr,
        min_lr=min(optimizer.min_lr, optimizer.lr),
        lr_warmup_steps=optimizer.warmup_steps,
        lr_decay_steps=max(total_steps, optimizer.warmup_steps + 1),
        lr_decay_style=optimizer.schedule,
        start_wd=optimizer.weight_decay,
        end_wd=optimizer.weight_decay,
        wd_incr_steps=total_steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # a resumed run follows its config, the step count its checkpoint
    )
    config.finalize_model_grads_func = _finalize
    config.grad_scale_func = megatron.scale_loss
    if optimizer.overlap_grad_reduce:
        config.no_sync_func = [c.no_sync for c in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
    if optimizer.overlap_param_gather:
        config.param_sync_func = [c.start_param_sync for c in wrapped] if len(wrapped) > 1 else wrapped[0].start_param_sync
    return Training(wrapped, megatron, scheduler)


class NarrowModule(Float16Module):
    """Megatron's bf16 wrapper, which widens what the last stage returns to fp32; the head's products want the weight's dtype."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return super().forward(*inputs, **{"fp32_output": False, **kwargs})


def _finalize(model: list[Any], num_tokens: Any = None, **groups: Any) -> None:
    """Megatron's reduction of gradients without its division by `num_tokens`: ours is already done."""
    finalize_model_grads(model, None, **groups)


def zero_gradients(training: Training) -> None:
    """Before each optimizer step's first micro-batch."""
    for chunk in training.chunks:
        chunk.zero_grad_buffer()
    training.optimizer.zero_grad()


def gradient_norm(training: Training) -> float:
    """The global norm of the finished gradients, before clipping; the same on every rank. inf or nan if any entry is so."""
    overflow = training.optimizer.prepare_grads()
    norm = training.optimizer.get_grad_norm()
    return math.inf if overflow else float(norm)


def apply_gradients(training: Training) -> None:
    """One optimizer step (with clipping) and one step of the schedule; the gradients are known to be finite."""
    done, _, _ = training.optimizer.step()
    if not done:
        raise RuntimeError("Megatron's optimizer refused a step whose gradient norm is finite")
    training.scheduler.step(1)


__all__ = ["Training", "apply_gradients", "gradient_norm", "make_training", "zero_gradients"]
