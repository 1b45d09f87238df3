"""Floating-point operations of a step, counted from the model's shape; every sequence at its full length.

A product of [m, k] and [k, n] is 2 m k n operations, and its backward pass twice as many. Causal attention over L positions
takes 2 L q a token and layer (two products over L/2 keys on average, q the width of all query heads).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_gvpo.config.hf_shape import ModelShape
from megatron_gvpo.config.needs import Needs
from megatron_gvpo.config.schema import Config
from megatron_gvpo.gupo.cost import head_products
from megatron_gvpo.launch.head_memory import gupo_plan
from megatron_gvpo.launch.parameters import layer_parameters

# The head's products of a trained token, each 2 V H: with coefficients known beforehand one forward and two backward; with a
# differentiated loss the logits are made once more.
_SCORE_PRODUCTS, _DIFFERENTIATED_PRODUCTS = 3, 4
_SCORE = ("gvpo", "gvpo_opd", "opd", "tv_opd", "rloo", "sft")


@dataclass(frozen=True)
class TokenWork:
    """Operations of one token's forward pass through one layer, and of one trained token through the head."""

    products: float
    attention: float
    head: float

    @property
    def layer(self) -> float:
        return self.products + self.attention


def token_work(shape: ModelShape, length: int) -> TokenWork:
    """length: of the sequences, in tokens."""
    parts = layer_parameters(shape)
    weights = parts["attention"].sharded + (parts["mlp"].sharded if "mlp" in parts else 0)
    if shape.experts is not None:
        weights += parts["experts"].sharded * shape.experts.per_token // shape.experts.count + parts["router"].replicated
    return TokenWork(2.0 * weights, 2.0 * length * shape.heads * shape.head_dim, 2.0 * shape.vocab * shape.hidden)


@dataclass(frozen=True)
class StepWork:
    """Operations of one step of the whole job, by what they are for; `model`: what is needed without any recomputation."""

    train: float
    recompute: float
    no_grad: float
    teacher: float
    gupo: float
    model: float

    @property
    def total(self) -> float:
        return self.train + self.recompute + self.no_grad + self.teacher + self.gupo


def step_work(config: Config, shape: ModelShape, needs: Needs, teacher: ModelShape | None = None) -> StepWork:
    """One rollout batch with its `train.optimizer_steps` optimizer steps. teacher: a colocated teacher's shape."""
    samples = config.rollout.prompts_per_step * config.rollout.group_size
    length, steps = config.model.max_length, config.train.optimizer_steps
    tokens, trained = samples * length, samples * config.rollout.max_new_tokens
    work = token_work(shape, length)
    forward = tokens * shape.layers * work.layer
    head = trained * work.head
    passes = no_grad_passes(config, needs)
    teacher_work = 0.0
    if teacher is not None:
        their = token_work(teacher, length)
        teacher_work = tokens * teacher.layers * their.layer + trained * their.head
    gupo = 0.0
    if config.gupo.enabled is not False:
        gupo = head_products(config.gupo, shape.vocab, gupo_plan(config, shape)).total * head / config.gupo.every * steps
    train = steps * (3 * forward + head_passes(config) * head)
    return StepWork(
        train=train,
        recompute=steps * forward if config.model.recompute == "full" else 0.0,
        no_grad=passes * (forward + head),
        teacher=teacher_work,
        gupo=gupo,
        model=steps * (3 * forward + 3 * head),
    )


def head_passes(config: Config) -> int:
    """Products of the head for a trained token's log-prob and gradients."""
    return _SCORE_PRODUCTS if config.objective.name in _SCORE else _DIFFERENTIATED_PRODUCTS


def no_grad_passes(config: Config, needs: Needs) -> int:
    """Forward passes for log-probs before the loss: old (free where it cancels), the current ones of later steps, reference."""
    steps = config.train.optimizer_steps
    passes = 0
    if needs.old or needs.current:
        cancels = steps == 1 and needs.old_cancels and config.gupo.enabled is False
        passes += 0 if cancels else 1
        passes += steps - 1 if needs.current else 0
    return passes + (1 if needs.reference else 0)
