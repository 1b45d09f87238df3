"""What GUPO costs, in products of the head's size and in bytes; torch-free, so that `plan` prints what the measurement does.

A product of the head's size is 2 x tokens x vocabulary x hidden floating-point operations, over the step's trained tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_gvpo.config.schema import GupoSection

# Rows of the layer on which sigma's medians are taken at most, and evidence is averaged at least.
SAMPLED_ROWS = 1024
# Elements of a block of the layer's gradient on a CPU: the running sums of a block should stay in its cache.
_CPU_BLOCK = 1 << 17
_SUMS = 4  # buffers of running sums
_LEAST_BLOCK = 64


def median_rows(vocabulary: int) -> int:
    """Rows of the layer on which medians are taken."""
    return min(vocabulary, SAMPLED_ROWS)


def evidence_rows(gupo: GupoSection, vocabulary: int) -> int:
    """Rows of the layer on which evidence is averaged: the share asked for, but never a handful of a small layer's."""
    return max(round(gupo.rows * vocabulary), min(vocabulary, SAMPLED_ROWS))


def one_pass(gupo: GupoSection) -> bool:
    """Whether log-normalisers can be found in the gradient's own pass: coefficients known before, and every row wanted."""
    return gupo.coefficients == "held" and gupo.rows == 1.0


@dataclass(frozen=True)
class MemoryPlan:
    """How a rank's buffers are laid out. bytes: of all of them at the peak, beside one chunk of logits.

    keep_samples: the M sampled layers are held; otherwise their rows are made anew (noise costs time, not memory).
    in_one_pass: log-normalisers are found in the gradients' own pass (held coefficients only). block_rows: rows of the layer
    worked on together. one_block: they are all of the shard's, so that the medians need no pass of their own.
    """

    keep_samples: bool
    in_one_pass: bool
    one_block: bool
    block_rows: int
    bytes: int


def memory_plan(
    gupo: GupoSection,
    vocabulary: int,
    rows: int,
    hidden: int,
    *,
    weight_bytes: int,
    compute_bytes: int = 4,
    cuda: bool = False,
) -> MemoryPlan:
    """vocabulary: rows of the layer; rows: of the largest shard (the plan is the same on all ranks). weight_bytes: of one weight;
    compute_bytes: of one running sum (4; 8 for float64 weights).

    The Fisher (one number per weight) is always held; the rest is fitted into `gupo.memory_gib`.
    """
    if gupo.layer == "final_norm":
        # One number per hidden unit; of the head there is only a chunk of logits.
        return MemoryPlan(True, gupo.coefficients == "held", True, 1, _SUMS * hidden * compute_bytes)
    budget = int(gupo.memory_gib * (1 << 30))
    rows = max(rows, 1)
    size = rows * hidden
    fisher, samples = size * compute_bytes, gupo.samples * size * weight_bytes
    keep = fisher + samples <= budget
    sums = _SUMS * size * compute_bytes
    if one_pass(gupo) and keep and samples + sums <= budget:
        return MemoryPlan(True, True, True, rows, max(fisher + samples, samples + sums))
    held = samples if keep else fisher
    per_row = hidden * (_SUMS * compute_bytes + gupo.samples * weight_bytes)
    fitting = max(budget - held, 0) // per_row
    if not cuda:
        fitting = min(fitting, _CPU_BLOCK // hidden)
    block = min(max(fitting, _LEAST_BLOCK), rows)
    one_block = block == rows and evidence_rows(gupo, vocabulary) == vocabulary
    return MemoryPlan(keep, False, one_block, block, max(fisher + (samples if keep else 0), held + block * per_row))


@dataclass(frozen=True)
class Products:
    """Products of the head's size: the Fisher's, the samples' log-probs, the samples' gradients, and the medians' rows."""

    fisher: float
    logprobs: float
    gradients: float
    medians: float

    @property
    def total(self) -> float:
        return self.fisher + self.logprobs + self.gradients + self.medians


def head_products(gupo: GupoSection, vocabulary: int, plan: MemoryPlan) -> Products:
    """3 M + 2 with recomputed coefficients, 2 M + 2 with held ones, for all rows.

    For the final norm too: its gradients come through the head. In an output layer of more than one block the medians add
    2 M / vocabulary for each of at most 1,024 rows.
    """
    samples = gupo.samples
    if gupo.layer == "final_norm":
        return Products(2.0, 0.0 if plan.in_one_pass else samples, 2.0 * samples, 0.0)
    rows, medians = evidence_rows(gupo, vocabulary) / vocabulary, median_rows(vocabulary) / vocabulary
    return Products(
        fisher=2.0,
        logprobs=0.0 if plan.in_one_pass else samples,
        gradients=2.0 * samples * rows,
        medians=0.0 if plan.one_block else 2.0 * samples * medians,
    )


def step_ratio(products: Products, head_parameters: int, parameters: int, *, own_pass: bool) -> float:
    """Arithmetic of a step with GUPO over that of one without, for responses much longer than prompts.

    parameters: all that act on a token, the head's included. own_pass: the run has a pass without grad anyway, for old or current
    log-probs; otherwise GUPO's is one more. A training pass counts as three forward ones.
    """
    without = (4 if own_pass else 3) * parameters
    added = products.total * head_parameters + (0 if own_pass else parameters)
    return 1.0 + added / without
