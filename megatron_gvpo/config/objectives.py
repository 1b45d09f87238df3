"""The typed configs of the built-in objectives, torch-free, with what each objective needs.

A third party's objective brings its own subclass of `ObjectiveConfig` as its class attribute `Config`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from megatron_gvpo.config.needs import Needs


class ObjectiveConfig(BaseModel):
    """Base of every objective's config: unknown keys are refused, and a value does not change once read."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def needs(self) -> Needs:
        """What the objective asks of the run under this config."""
        return Needs()


class GvpoConfig(ObjectiveConfig):
    """GVPO, arXiv 2504.19599: group variance of the distance between reward and implicit reward."""

    beta: float = Field(default=0.1, gt=0, description="strength of the KL to the reference, in units of reward per nat")
    reference: Literal["old", "rollout", "frozen"] = Field(
        default="old",
        description="theta': `old` is the policy at the first optimizer step of this batch of rollouts, `rollout` the policy "
        "that sampled it, `frozen` a fixed model",
    )

    def needs(self) -> Needs:
        return Needs(
            rewards=True,
            current=True,
            old=self.reference == "old",
            rollout=self.reference == "rollout",
            reference=self.reference == "frozen",
            min_group_size=2,
            data="any",
            full_support=True,
            denominator="groups",
            groups=True,
        )


class RlooConfig(ObjectiveConfig):
    """REINFORCE with a leave-one-out baseline, sequence sum, no ratio."""

    def needs(self) -> Needs:
        return Needs(rewards=True, min_group_size=2, denominator="sequences", groups=True)


class SftConfig(ObjectiveConfig):
    """Supervised fine-tuning: the token mean of -log p."""

    def needs(self) -> Needs:
        return Needs(data="any", denominator="tokens")


BUILTIN_CONFIGS: dict[str, type[ObjectiveConfig]] = {"gvpo": GvpoConfig, "rloo": RlooConfig, "sft": SftConfig}
