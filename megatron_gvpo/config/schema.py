"""The sections of a run's YAML file, typed. Every key has a default that works and a unit in its description.

Torch-free and megatron-free: reading and checking a config takes a fraction of a second.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A part of the config: unknown keys are refused, and nothing changes after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelSection(Section):
    path: str = Field(default="", description="Hugging Face folder of the model: config.json, safetensors, tokenizer")
    tokenizer: str = Field(default="", description="folder of the tokenizer; the model's own when empty")
    max_length: int = Field(default=4096, gt=0, description="tokens of prompt and response together")
    init: Literal["pretrained", "random"] = Field(default="pretrained", description="where the first weights come from")
    recompute: Literal["none", "selective", "full"] = Field(default="none", description="activation recomputation")
    megatron: dict[str, Any] = Field(
        default_factory=dict,
        description="any field of Megatron-Core's TransformerConfig, by name; checked for existence",
    )


class ParallelSection(Section):
    tensor: int = Field(default=1, ge=1, description="tensor-parallel ranks")
    pipeline: int = Field(default=1, ge=1, description="pipeline stages")
    virtual_pipeline: int | None = Field(default=None, ge=1, description="model chunks per pipeline stage")
    context: int = Field(default=1, ge=1, description="context-parallel ranks")
    expert: int = Field(default=1, ge=1, description="expert-parallel ranks")
    expert_tensor: int | None = Field(default=None, ge=1, description="tensor-parallel ranks of an expert; `tensor` when empty")
    sequence: bool = Field(default=False, description="sequence parallelism (wants tensor > 1)")
    first_stage_layers: int | None = Field(default=None, ge=1, description="layers of the first pipeline stage")
    last_stage_layers: int | None = Field(default=None, ge=1, description="layers of the last pipeline stage")
    nodes: int = Field(default=1, ge=1, description="machines of the trainer")
    gpus_per_node: int = Field(default=1, ge=1, description="trainer ranks per machine (processes, in the CPU device mode)")

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def data(self) -> int:
        """Data-parallel ranks; the config check refuses a world that this does not divide."""
        return self.world_size // (self.tensor * self.pipeline * self.context)


class PrecisionSection(Section):
    params: Literal["fp32", "bf16"] = Field(default="bf16", description="dtype of weights and activations")
    grad_reduce_fp32: bool = Field(default=True, description="accumulate and reduce gradients in fp32")
    fp8: Literal["none", "delayed", "tensorwise", "mxfp8", "blockwise"] = Field(
        default="none", description="Transformer Engine recipe; `none` computes in `params`"
    )
    fp8_params: bool = Field(default=False, description="keep weights in FP8 and gather them so")
    bf16_first_layers: int = Field(default=1, ge=0, description="layers at the start that stay in bf16 under FP8")
    bf16_last_layers: int = Field(default=1, ge=0, description="layers at the end that stay in bf16 under FP8")


class ObjectiveSection(BaseModel):
    """`name` and the objective's own keys, which its own config class checks."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = Field(default="gvpo", description="a built-in or entry-point name, or module:Class")

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class GupoSection(Section):
    enabled: Literal[True, False, "observe"] = Field(default=False, description="`observe` computes the weights and applies none")
    samples: int = Field(default=4, ge=2, description="posterior samples M")
    s: float = Field(default=0.5, gt=0, description="exponent of the precision in the evidence")
    eta: float = Field(default=0.1, ge=0, le=1, description="share of the weights that follows the uncertainty")
    delta: Literal["auto"] | float = Field(default="auto", description="prior precision; auto solves for kl_target")
    kl_target: float = Field(default=0.01, gt=0, description="nats a token from the model to a posterior sample")
    layer: Literal["output_layer", "final_norm"] = Field(default="output_layer", description="the layer Phi")
    rows: float = Field(default=1.0, gt=0, le=1, description="share of the layer's rows on which evidence is averaged")
    evidence_scale: Literal["paper", "batch", "snr"] = Field(default="batch", description="scale of sigma in the evidence")
    coefficients: Literal["recomputed", "held"] = Field(default="recomputed", description="coefficients under each sample")
    sigma_floor: float = Field(default=1e-3, ge=0, lt=1, description="least sigma, as a share of the group's median; 0: no floor")
    memory_gib: float = Field(default=4.0, gt=0, description="GiB a rank's buffers of the layer's size are fitted into")
    every: int = Field(default=1, ge=1, description="steps between two computations of the weights")


class ServersSection(Section):
    """Where responses come from: servers that this run starts, or URLs of running ones."""

    launch: Literal["local", "none"] = Field(default="local", description="`local`: this run starts and stops them")
    count: int = Field(default=1, ge=1, description="servers to start")
    urls: list[str] = Field(default_factory=list, description="servers that run already (with launch: none)")
    nodes: int = Field(default=0, ge=0, description="machines of the SLURM job that serve `count` each; 0: those of the trainer")
    registry: str = Field(default="", description="folder where those servers write their addresses (`serve --register`)")
    python: str = Field(default="", description="python of the server's environment; .venv-sglang beside the project when empty")
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="device of the started servers")
    dtype: Literal["float32", "bfloat16", "auto"] = Field(default="float32", description="dtype of the started servers")
    tensor: int = Field(default=1, ge=1, description="tensor-parallel ranks of a server")
    api_key: str = Field(default="", description="bearer key; a fresh random one for started servers when empty")
    args: list[str] = Field(default_factory=list, description="further arguments of sglang.launch_server")
    start_timeout_s: float = Field(default=300.0, gt=0, description="seconds to become ready")
    concurrency: int = Field(default=256, ge=1, description="requests in flight per server")


class RolloutSection(Section):
    group_size: int = Field(default=8, ge=1, description="responses per prompt, k")
    prompts_per_step: int = Field(default=32, ge=1, description="prompts per rollout batch")
    temperature: float = Field(default=1.0, gt=0, description="divides the logits, in sampling and in every log-prob")
    top_p: float = Field(default=1.0, gt=0, le=1, description="nucleus mass; 1 samples from the full support")
    top_k: int = Field(default=-1, ge=-1, description="candidates; -1 samples from the full support")
    max_new_tokens: int = Field(default=1024, gt=0, description="tokens of a response at most")
    stop_token_ids: list[int] = Field(default_factory=list, description="ids that end a response, beside the eos")
    max_staleness: int = Field(default=0, ge=0, description="versions behind the newest that a training sample may be")
    truncated: Literal["keep", "drop"] = Field(default="keep", description="what happens to responses cut at max_new_tokens")
    request_timeout_s: float = Field(default=600.0, gt=0, description="seconds for one request")
    retries: int = Field(default=3, ge=0, description="further tries of a request that may pass")
    weight_sync: Literal["disk", "distributed"] = Field(default="distributed", description="how weights reach the servers")
    bucket_mib: int = Field(default=256, gt=0, description="MiB per weight-sync bucket")
    sync_timeout_s: float = Field(default=600.0, gt=0, description="seconds for one weight update")
    logprob_alarm: float = Field(default=0.05, gt=0, description="mean |trainer - server| log-prob, nats, above which it warns")
    servers: ServersSection = Field(default_factory=ServersSection, description="the rollout servers")


class TeacherSource(Section):
    """One teacher: its folder, and where it is served."""

    path: str = Field(default="", description="Hugging Face folder of the teacher; empty: no teacher")
    servers: ServersSection = Field(default_factory=ServersSection, description="the teacher's servers")


class TeacherSection(TeacherSource):
    signal: Literal["sequence", "sampled", "topk", "full"] = Field(default="sampled", description="what the teacher gives")
    where: Literal["served", "colocated"] = Field(default="served", description="on SGLang servers, or in the trainer's job")
    top_k: int = Field(default=64, ge=1, description="ids per token of the topk signal")
    by_domain: dict[str, TeacherSource] = Field(
        default_factory=dict, description="further teachers, each for the prompts of one domain; the others take `path`"
    )
    align_vocabulary: bool = Field(
        default=False, description="accept a vocabulary of another size: only the ids that both have are compared"
    )
    offload: bool = Field(default=False, description="keep a colocated teacher's weights in CPU memory between its passes")
    cache: str = Field(default="", description="folder that remembers served scores between runs; empty: none")
    batch: int = Field(default=8, ge=1, description="responses per scoring request")
    request_timeout_s: float = Field(default=600.0, gt=0, description="seconds for one scoring request")
    retries: int = Field(default=3, ge=0, description="further tries of a scoring request that may pass")
    hedge_after_s: float | None = Field(
        default=None, ge=0, description="seconds after which a request also goes to a second server; empty: 3 medians; 0: never"
    )


class DataSection(Section):
    train: str = Field(default="", description="prompts: FILE.jsonl, FILE.parquet, or reasoning_gym:TASK")
    eval: str = Field(default="", description="held-out prompts, same forms; empty: no evaluation")
    prompt_key: str = Field(default="prompt", description="field of the prompt: a text, or a list of chat messages")
    answer_key: str = Field(default="answer", description="field of the right answer")
    task_args: dict[str, Any] = Field(default_factory=dict, description="arguments of the reasoning-gym task")
    size: int = Field(default=10000, gt=0, description="items of a reasoning-gym training set")
    eval_size: int = Field(default=400, gt=0, description="held-out items used; all of a shorter file")
    chat_template: bool = Field(default=False, description="wrap the prompt by the tokenizer's chat template")
    system_prompt: str = Field(default="", description="system message, with chat_template")
    shuffle: bool = Field(default=True, description="a new order each epoch, from train.seed")
    filter_long: bool = Field(default=True, description="leave out, and count, prompts that leave no room for a response")


class RewardSection(Section):
    name: str = Field(default="exact", description="exact, math_verify, reasoning_gym, or module:function")
    extract: Literal["all", "last_number", "boxed", "answer_tag"] = Field(default="all", description="part of the text scored")
    timeout_s: float = Field(default=10.0, gt=0, description="seconds for one response; past it the reward is 0 and counted")
    workers: int = Field(default=0, ge=0, description="processes that score; 0: one, and `exact` in the controller itself")


class OptimizerSection(Section):
    lr: float = Field(default=1e-6, gt=0, description="peak learning rate")
    min_lr: float = Field(default=0.0, ge=0, description="learning rate at the end of the decay")
    warmup_steps: int = Field(default=0, ge=0, description="optimizer steps of linear warm-up")
    schedule: Literal["constant", "cosine", "linear"] = Field(default="constant", description="decay after the warm-up")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="Adam's first decay")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="Adam's second decay")
    eps: float = Field(default=1e-8, gt=0, description="Adam's epsilon")
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay")
    clip_grad: float = Field(default=1.0, ge=0, description="global gradient norm; 0: no clipping")
    distributed: bool = Field(default=True, description="shard the optimizer state over data-parallel ranks")
    overlap_grad_reduce: bool = Field(default=False, description="reduce gradients during the backward pass")
    overlap_param_gather: bool = Field(default=False, description="gather parameters during the forward pass")
    cpu_offload: bool = Field(default=False, description="keep optimizer state in CPU memory")


class TrainSection(Section):
    steps: int = Field(default=100, ge=1, description="rollout batches")
    optimizer_steps: int = Field(default=1, ge=1, description="optimizer steps per rollout batch")
    micro_batch_size: int = Field(default=0, ge=0, description="samples per micro-batch; 0: by micro_batch_tokens")
    micro_batch_tokens: int = Field(default=16384, gt=0, description="tokens (padded) per micro-batch")
    seed: int = Field(default=0, ge=0, description="seed of data order, initialisation and noise")
    device: Literal["cpu", "cuda"] = Field(default="cuda", description="`cpu` is the device mode for laptops and tests")
    eval_every: int = Field(default=0, ge=0, description="steps between evaluations; 0: before and after only")
    eval_samples: int = Field(default=1, ge=1, description="responses per held-out prompt at temperature 1")
    max_bad_steps: int = Field(default=5, ge=1, description="non-finite steps in a row that end the run")
    collective_timeout_s: float = Field(default=600.0, gt=0, description="seconds for one collective")
    peer_timeout_s: float = Field(default=60.0, gt=0, description="seconds of silence after which a rank counts as dead")
    deadline_s: float = Field(default=0.0, ge=0, description="seconds after which the run saves and leaves with 85; 0: never")
    threads: int = Field(default=1, ge=1, description="CPU threads per rank in the CPU device mode")


class CheckpointSection(Section):
    every: int = Field(default=0, ge=0, description="steps between checkpoints; 0: on a signal and at the end only")
    keep: int = Field(default=2, ge=1, description="newest checkpoints that stay")
    keep_every: int = Field(default=0, ge=0, description="also keep each checkpoint whose step this divides; 0: none")
    asynchronous: bool = Field(default=False, description="write in the background")
    on_error: Literal["stop", "continue"] = Field(default="stop", description="what happens when one cannot be written")
    export: bool = Field(default=True, description="write Hugging Face weights at the end")


class LogSection(Section):
    dir: str = Field(default="runs/{name}", description="run directory; {name} is the config file's, {seed} the seed")
    wandb: Literal["off", "offline", "online"] = Field(default="off", description="Weights & Biases")
    wandb_project: str = Field(default="megatron-gvpo", description="project there")
    dump_samples: bool = Field(default=True, description="write every rollout batch to RUN/samples/step_N.jsonl")
    report: bool = Field(default=True, description="write report.html at the end")


class LaunchSection(Section):
    job_name: str = Field(default="gvpo", description="SLURM job name")
    partition: str = Field(default="", description="SLURM partition")
    account: str = Field(default="", description="SLURM account")
    time: str = Field(default="24:00:00", description="SLURM time limit, HH:MM:SS")
    container: str = Field(default="", description="container image for srun --container-image")
    modules: list[str] = Field(default_factory=list, description="environment modules to load")
    env: dict[str, str] = Field(default_factory=dict, description="environment variables on every srun line")
    sbatch: list[str] = Field(default_factory=list, description="further options of sbatch, such as --qos=high")
    srun: list[str] = Field(default_factory=list, description="further options of every srun, such as --container-mounts=/data")
    setup: list[str] = Field(default_factory=list, description="shell lines before the run, such as activating an environment")
    array: str = Field(default="", description="seeds as a job array, such as 0-3%2: train.seed is the task's number")
    heterogeneous: bool = Field(default=False, description="servers' nodes as components of their own of the job")
    health: list[str] = Field(default_factory=list, description="shell lines that a node has to pass before the run starts")
    spare_nodes: int = Field(default=0, ge=0, description="further nodes, for those that do not pass `health`")
    grace_s: int = Field(default=300, ge=60, description="seconds before the time limit at which the run is told to save")


class Config(Section):
    """A whole run."""

    model: ModelSection = Field(default_factory=ModelSection)
    parallel: ParallelSection = Field(default_factory=ParallelSection)
    precision: PrecisionSection = Field(default_factory=PrecisionSection)
    objective: ObjectiveSection = Field(default_factory=ObjectiveSection)
    gupo: GupoSection = Field(default_factory=GupoSection)
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    teacher: TeacherSection = Field(default_factory=TeacherSection)
    data: DataSection = Field(default_factory=DataSection)
    reward: RewardSection = Field(default_factory=RewardSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    train: TrainSection = Field(default_factory=TrainSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    log: LogSection = Field(default_factory=LogSection)
    launch: LaunchSection = Field(default_factory=LaunchSection)
