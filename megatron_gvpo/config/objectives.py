"""The typed configs of the built-in objectives, torch-free, with what each objective needs; and how a name finds its config.

A third party's objective brings its own subclass of `ObjectiveConfig` as its class attribute `Config`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from megatron_gvpo.config.needs import DataPolicy, Needs
from megatron_gvpo.config.wording import did_you_mean, explain_error

ENTRY_POINT_GROUP = "megatron_gvpo.objectives"


@dataclass(frozen=True)
class Shaping:
    """What an objective asks of the batch before the loss; the train loop does it with `objectives.shaping`.

    overlong_buffer: tokens before the length limit in which the penalty grows from 0 to `overlong_penalty`; 0: no penalty.
    resample_rounds: how often groups of equal reward are sampled anew; 0: they stay as they are.
    on_policy_share: share of the prompts answered by the student; the others keep the answer of the data set.
    """

    overlong_buffer: int = 0
    overlong_penalty: float = 1.0
    resample_rounds: int = 0
    on_policy_share: float = 1.0


class ObjectiveConfig(BaseModel):
    """Base of every objective's config: unknown keys are refused, and a value does not change once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    assumptions: Literal["refuse", "warn"] = Field(
        default="refuse",
        description="what happens to a run whose data or sampling breaks what the objective assumes",
    )

    def needs(self) -> Needs:
        """What the objective asks of the run under this config."""
        return Needs()

    def shaping(self) -> Shaping:
        """What the objective asks of the batch before the loss."""
        return Shaping()


class ImportanceConfig(ObjectiveConfig):
    """Truncated importance sampling from the policy that sampled to the one that the objective starts from."""

    tis: Literal["none", "token", "sequence"] = Field(
        default="none",
        description="truncated importance weights from the server's log-probs to the trainer's, per token or per sequence",
    )
    tis_cap: float = Field(default=2.0, gt=0, description="largest importance weight (a ratio of probabilities)")

    def data_policy(self) -> DataPolicy:
        """Score-function objectives are on-policy unless their samples are weighted."""
        return "on_policy" if self.tis == "none" else "stale"


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
            old_cancels=self.reference == "old",
        )


class GvpoOpdConfig(ObjectiveConfig):
    """GVPO++, arXiv 2609.21432: group variance of the log-ratio to a teacher; with `teacher_coef`, reward and teacher."""

    length_alpha: float = Field(
        default=0.0, ge=0, description="exponent of the weight (tokens)^-alpha of a response; 0 where tokenizers differ"
    )
    teacher_coef: float | None = Field(
        default=None,
        gt=0,
        description="reward per nat of teacher log-ratio, added to the reward; empty: distillation without rewards",
    )
    beta: float = Field(default=0.1, gt=0, description="GVPO's KL strength, reward per nat; used with teacher_coef")
    reference: Literal["old", "rollout", "frozen"] = Field(default="old", description="GVPO's theta'; used with teacher_coef")

    @model_validator(mode="after")
    def _one_form(self) -> GvpoOpdConfig:
        if self.teacher_coef is not None and self.length_alpha:
            raise ValueError("length_alpha belongs to distillation without rewards: leave it 0, or leave teacher_coef out")
        return self

    def needs(self) -> Needs:
        with_reward = self.teacher_coef is not None
        return Needs(
            rewards=with_reward,
            current=True,
            old=with_reward and self.reference == "old",
            rollout=with_reward and self.reference == "rollout",
            reference=with_reward and self.reference == "frozen",
            teacher="sequence",
            min_group_size=2,
            data="any",
            full_support=True,
            denominator="groups",
            groups=True,
        )


class OpdConfig(ImportanceConfig):
    """On-policy distillation on sampled tokens: a policy gradient whose advantage is a shape of the log-ratio Delta."""

    shape: Literal["raw", "sign", "tanh", "clip", "group_constant", "permuted"] = Field(
        default="raw",
        description="advantage: Delta, sign(Delta), tanh(Delta/2), Delta clipped; or a control: each sign's mean magnitude, "
        "each sign's magnitudes permuted",
    )
    clip: float = Field(default=5.0, gt=0, description="largest |Delta| of the clip shape, nats")
    baseline: Literal["none", "kl"] = Field(
        default="none", description="`kl` adds KL(student||teacher) of the state (vOPD): needs a top-k teacher, shape raw"
    )
    seed: int = Field(default=0, description="seed of the permuted shape")

    @model_validator(mode="after")
    def _baseline_is_of_raw(self) -> OpdConfig:
        if self.baseline == "kl" and self.shape != "raw":
            raise ValueError(f"baseline kl is the mean of the raw log-ratio: it does not go with shape {self.shape}")
        return self

    def needs(self) -> Needs:
        return Needs(
            current=True,
            rollout=self.tis != "none",
            teacher="topk" if self.baseline == "kl" else "sampled",
            data=self.data_policy(),
            full_support=True,
            denominator="tokens",
        )


class TvOpdConfig(ImportanceConfig):
    """TV-OPD, arXiv 2609.08341: the sign of the log-ratio, scaled by how far total variation has fallen."""

    alpha: float = Field(default=0.5, ge=0, description="exponent of the scale c_k")
    ema: float = Field(default=0.95, ge=0, lt=1, description="decay of the average of the total-variation estimate")
    c_min: float = Field(default=0.1, ge=0, le=1, description="smallest scale")
    eps: float = Field(default=1e-6, gt=0, description="added to both averages, in total variation")
    regulate: bool = Field(default=True, description="false holds the scale at 1")

    def needs(self) -> Needs:
        return Needs(
            current=True,
            rollout=self.tis != "none",
            teacher="sampled",
            data=self.data_policy(),
            full_support=True,
            denominator="tokens",
        )


class GkdConfig(ObjectiveConfig):
    """GKD, arXiv 2306.13649: a divergence between whole next-token distributions at every response token."""

    divergence: Literal["reverse_kl", "forward_kl", "jsd", "tv"] = Field(
        default="reverse_kl", description="KL(student||teacher), KL(teacher||student), Jensen-Shannon, or total variation"
    )
    jsd_beta: float = Field(default=0.5, gt=0, lt=1, description="the teacher's share b of the mixture in jsd")
    teacher: Literal["topk", "full"] = Field(default="topk", description="teacher's top-k with one tail bucket, or all of it")
    on_policy_share: float = Field(
        default=1.0, ge=0, le=1, description="share of prompts answered by the student; the others keep the data's answer"
    )

    def needs(self) -> Needs:
        return Needs(teacher=self.teacher, data="any", denominator="tokens")

    def shaping(self) -> Shaping:
        return Shaping(on_policy_share=self.on_policy_share)


class RatioConfig(ImportanceConfig):
    """What the objectives with a ratio to `old` share."""

    clip_high: float = Field(default=0.2, ge=0, description="the ratio is clipped above 1 + clip_high")
    kl_coef: float = Field(default=0.0, ge=0, description="weight of the KL to a frozen reference, per nat; 0: none")
    kl_estimator: Literal["k1", "k2", "k3"] = Field(default="k3", description="estimator of that KL on a sampled token")
    kl_in: Literal["loss", "reward"] = Field(default="loss", description="KL as a loss term, or taken off the reward")

    @model_validator(mode="after")
    def _kl_pulls(self) -> RatioConfig:
        if self.kl_coef and self.kl_in == "loss" and self.kl_estimator == "k1":
            raise ValueError("k1 in the loss has a gradient of mean zero: use k2 or k3, or kl_in: reward")
        return self

    def data_policy(self) -> DataPolicy:
        """The ratio to `old` covers several optimizer steps; what lies between `rollout` and `old` is for `tis`."""
        return "stale"

    def _needs(self, denominator: Literal["tokens", "sequences"], min_group_size: int = 2, current: bool = False) -> Needs:
        return Needs(
            rewards=True,
            current=current,
            old=True,
            rollout=self.tis != "none",
            reference=self.kl_coef > 0,
            min_group_size=min_group_size,
            data=self.data_policy(),
            rollout_corrected=self.tis != "none",
            denominator=denominator,
            groups=True,
        )


class ClippedConfig(RatioConfig):
    """A ratio that is clipped on both sides."""

    clip_low: float = Field(default=0.2, ge=0, le=1, description="the ratio is clipped below 1 - clip_low")


class GrpoConfig(ClippedConfig):
    """GRPO, arXiv 2402.03300: clipped ratio, standardised group advantage, mean over each response's tokens."""

    def needs(self) -> Needs:
        return self._needs("sequences")


class DrGrpoConfig(ClippedConfig):
    """Dr.GRPO, arXiv 2503.20783: no division by the standard deviation or by the length."""

    max_response_tokens: int = Field(default=1024, gt=0, description="constant length by which every response is divided")

    def needs(self) -> Needs:
        return self._needs("sequences", min_group_size=1)


class DapoConfig(ClippedConfig):
    """DAPO, arXiv 2503.14476: clip-higher, token mean, overlong shaping, dynamic sampling."""

    clip_high: float = Field(default=0.28, ge=0, description="the ratio is clipped above 1 + clip_high")
    overlong_buffer: int = Field(default=0, ge=0, description="tokens before the limit in which the penalty grows; 0: none")
    overlong_penalty: float = Field(default=1.0, ge=0, description="reward taken off at the length limit")
    dynamic_sampling: bool = Field(default=False, description="sample groups of equal reward anew")
    max_resample_rounds: int = Field(default=3, ge=1, description="rounds of dynamic sampling in a step at most")

    def needs(self) -> Needs:
        return self._needs("tokens")

    def shaping(self) -> Shaping:
        rounds = self.max_resample_rounds if self.dynamic_sampling else 0
        return Shaping(self.overlong_buffer, self.overlong_penalty, rounds)


class GspoConfig(ClippedConfig):
    """GSPO, arXiv 2507.18071: the ratio of whole responses, to the power 1/length."""

    clip_low: float = Field(default=3e-4, ge=0, le=1, description="the ratio is clipped below 1 - clip_low")
    clip_high: float = Field(default=4e-4, ge=0, description="the ratio is clipped above 1 + clip_high")

    def needs(self) -> Needs:
        # The KL and the importance weights look at log-probs themselves.
        cancels = self.kl_coef == 0 and self.tis == "none"
        return replace(self._needs("sequences", current=True), old_cancels=cancels)


class CispoConfig(RatioConfig):
    """CISPO, arXiv 2506.13585: the clipped ratio is a detached weight, so that no token loses its gradient."""

    clip_low: float | None = Field(default=None, ge=0, le=1, description="the weight is clipped below 1 - clip_low; empty: not")
    clip_high: float = Field(default=0.28, ge=0, description="the weight is clipped above 1 + clip_high")

    def needs(self) -> Needs:
        return self._needs("tokens")


class RlooConfig(ImportanceConfig):
    """REINFORCE with a leave-one-out baseline, arXiv 2402.14740: sequence sum, no ratio."""

    def needs(self) -> Needs:
        return Needs(
            rewards=True,
            current=self.tis != "none",
            rollout=self.tis != "none",
            min_group_size=2,
            data=self.data_policy(),
            denominator="sequences",
            groups=True,
        )


class SftConfig(ObjectiveConfig):
    """Supervised fine-tuning: the token mean of -log p."""

    on_policy_share: float = Field(
        default=0.0, ge=0, le=1, description="share of the prompts answered by the student; the others keep the data's answer"
    )

    def needs(self) -> Needs:
        return Needs(data="any", denominator="tokens")

    def shaping(self) -> Shaping:
        return Shaping(on_policy_share=self.on_policy_share)


BUILTIN_CONFIGS: dict[str, type[ObjectiveConfig]] = {
    "gvpo": GvpoConfig,
    "gvpo_opd": GvpoOpdConfig,
    "opd": OpdConfig,
    "tv_opd": TvOpdConfig,
    "gkd": GkdConfig,
    "grpo": GrpoConfig,
    "dr_grpo": DrGrpoConfig,
    "dapo": DapoConfig,
    "gspo": GspoConfig,
    "cispo": CispoConfig,
    "rloo": RlooConfig,
    "sft": SftConfig,
}
REGISTERED_CONFIGS: dict[str, type[ObjectiveConfig]] = {}
"""Configs of objectives that `objectives.register` was called for in this process."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with the objective section: the key (`name` for the objective itself, empty for several), and what."""

    key: str
    what: str
    on_key: bool = False  # the key rather than its value is to blame

    def __str__(self) -> str:
        return f"objective.{self.key}: {self.what}" if self.key else f"objective: {self.what}"


class ObjectiveConfigError(ValueError):
    """The objective section is wrong; `problems` has one entry, of one line, for each mistake."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("; ".join(str(p) for p in problems))


def objective_config(name: str, options: Mapping[str, Any]) -> ObjectiveConfig:
    """The checked config of the objective called `name`; imports no torch for a built-in one.

    name: a built-in or registered name, an entry point of the group `megatron_gvpo.objectives`, or `module:Class`.
    Raises ObjectiveConfigError for an unknown name, an unknown key or a wrong value.
    """
    config_class = _config_class(name)
    try:
        return config_class.model_validate(dict(options), strict=True)
    except ValidationError as error:
        found = {p.key: p for p in reversed([_problem(e, config_class) for e in error.errors(include_url=False)])}
        raise ObjectiveConfigError(list(found.values())) from None


def import_class(spec: str) -> Any:
    """What `module:Class` names; ObjectiveConfigError where there is no such thing."""
    module_name, _, attribute = spec.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and something that it imports is not
        what = f"there is no module {error.name!r} to import: install it, or put its folder on PYTHONPATH"
        raise ObjectiveConfigError([Problem("name", what)]) from None
    if not hasattr(module, attribute):
        what = f"module {module_name!r} has no {attribute!r}{did_you_mean(attribute, dir(module))}"
        raise ObjectiveConfigError([Problem("name", what)])
    return getattr(module, attribute)


def entry_point(name: str) -> str | None:
    """`module:Class` of an installed plug-in called `name`, or None."""
    return next((e.value for e in entry_points(group=ENTRY_POINT_GROUP) if e.name == name), None)


def unknown_objective(name: str) -> ObjectiveConfigError:
    """The error for a name that nobody knows."""
    known = [*BUILTIN_CONFIGS, *REGISTERED_CONFIGS, *(e.name for e in entry_points(group=ENTRY_POINT_GROUP))]
    what = f"there is no objective {name!r}{did_you_mean(name, known)} (known: {', '.join(known)}, or module:Class)"
    return ObjectiveConfigError([Problem("name", what)])


def _config_class(name: str) -> type[ObjectiveConfig]:
    if name in BUILTIN_CONFIGS:
        return BUILTIN_CONFIGS[name]
    if name in REGISTERED_CONFIGS:
        return REGISTERED_CONFIGS[name]
    spec = name if ":" in name else entry_point(name)
    if spec is None:
        raise unknown_objective(name)
    config_class = getattr(import_class(spec), "Config", None)
    if not (isinstance(config_class, type) and issubclass(config_class, ObjectiveConfig)):
        raise ObjectiveConfigError([Problem("name", f"{spec} is not an objective: its `Config` is no ObjectiveConfig")])
    return config_class


def _problem(error: Any, config_class: type[ObjectiveConfig]) -> Problem:
    # Every option of an objective is a plain value: pydantic's further path names members of a union, not keys.
    key = str(error["loc"][0]) if error["loc"] else ""
    known = config_class.model_fields
    annotation = known[key].annotation if key in known else None
    return Problem(key, explain_error(error, annotation, list(known), ()), on_key=error["type"] in ("extra_forbidden", "missing"))
