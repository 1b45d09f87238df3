"""What can be wrong with a step in a loop of one's own, found before any collective that would wait for a rank that stopped."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron_gvpo.config.needs import Needs
from megatron_gvpo.data.samples import TOKEN_SIGNALS, Sample
from megatron_gvpo.mcore.gradient_scale import gradient_scale
from megatron_gvpo.mcore.plugin import ObjectiveForwardStep


def trouble_of(forward_step: ObjectiveForwardStep, chunks: Sequence[Any], micro_batches: Sequence[Sequence[Sample]]) -> str:
    """What is wrong with this rank's arguments, if anything is: only the last pipeline stage sees the output layer."""
    if any(isinstance(micro, Sample) for micro in micro_batches):
        return "micro_batches holds samples; it has to hold lists of samples, one list a micro-batch"
    try:
        for chunk in chunks:
            forward_step.head(chunk)
            forward_step.check_config(get_model_config(chunk))
        data_context = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        gradient_scale(chunks[-1], get_model_config(chunks[-1]), 1, data_context, forward_step.gradient_reduction)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def agree(trouble: str, micro_batches: Sequence[Sequence[Sample]]) -> None:
    """One rank's trouble becomes everybody's, and ranks that share their samples must have the same ones.

    A rank that stopped alone would leave the others waiting in a collective.
    """
    data_rank = parallel_state.get_data_parallel_rank()
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, (trouble, data_rank, "" if trouble else _digest(micro_batches)))
    for rank, (words, _, _) in enumerate(said):
        if words:
            raise ValueError(f"rank {rank}: {words}")
    first: dict[int, tuple[int, str]] = {}
    for rank, (_, data, digest) in enumerate(said):
        at, expected = first.setdefault(data, (rank, digest))
        if digest != expected:
            raise ValueError(
                f"ranks {at} and {rank} work on the same samples (data-parallel rank {data}), but were given different ones: "
                "prepare_step wants the same micro-batches on all tensor-, pipeline- and context-parallel ranks"
            )


def check_samples(samples: Sequence[Sample], needs: Needs, vocab_size: int, name: str) -> None:
    """ValueError, one line, for the first sample that lacks what the objective needs or holds ids the model does not know."""
    signals = [
        ("rollout_logprobs", needs.rollout),
        ("ref_logprobs", needs.reference),
        ("teacher_logprobs", needs.teacher == "sampled"),
    ]
    for index, sample in enumerate(samples):
        where = f"sample {index} (group {sample.group!r})"
        largest = max([-1, *sample.prompt_ids, *sample.response_ids])
        if largest >= vocab_size or min([0, *sample.prompt_ids, *sample.response_ids]) < 0:
            raise ValueError(f"{where} holds a token id outside 0 to {vocab_size - 1}: is it of another tokenizer?")
        if not sample.prompt_ids:
            raise ValueError(f"{where} has an empty prompt: nothing predicts its first token")
        if needs.rewards and (sample.reward is None or not math.isfinite(sample.reward)):
            raise ValueError(f"{where} has the reward {sample.reward}, and objective {name!r} needs a number")
        if needs.teacher == "sequence" and sample.teacher_logprob is None and sample.teacher_logprobs is None:
            raise ValueError(f"{where} has no teacher_logprob, and objective {name!r} needs one")
        if len(sample.mask) != len(sample.response_ids):
            raise ValueError(f"{where} has {len(sample.mask)} mask values for {len(sample.response_ids)} response tokens")
        for signal in TOKEN_SIGNALS:
            values = getattr(sample, signal)
            if values is not None and len(values) != len(sample.response_ids):
                raise ValueError(f"{where} has {len(values)} {signal} for {len(sample.response_ids)} response tokens")
        for signal, needed in signals:
            if needed and getattr(sample, signal) is None:
                raise ValueError(f"{where} has no {signal}, and objective {name!r} needs them")


def _digest(micro_batches: Sequence[Sequence[Sample]]) -> str:
    found = hashlib.sha256()
    for number, micro in enumerate(micro_batches):
        for s in micro:
            found.update(repr((number, s.group, s.reward, s.teacher_logprob)).encode())
            for ids in (s.prompt_ids, s.response_ids, s.mask):
                found.update(array("q", ids))
            for name in TOKEN_SIGNALS:
                found.update(array("d", getattr(s, name) or ()))
    return found.hexdigest()
