"""The names of metrics, and of the files in a run directory that hold them.

One step is one row. Step 0 is the evaluation before training; step n is the n-th rollout batch, counted from 1.

    step                            the row's step
    reward/mean, reward/std         over the responses of the rollout batch
    reward/unparsed, /timeout, /error, /died        responses whose reward is 0 for that reason
    eval/greedy, eval/greedy_se     share of held-out prompts solved, temperature 0, and its standard error
    eval/sampled, eval/sampled_se   the same for responses at the run's temperature
    loss, grad_norm, lr             of the last optimizer step on this batch
    logprob_diff/mean, /max         |trainer - server| log-prob of the sampled tokens, same weights, nats
    eval/logprob_diff/mean, /max    the same on responses to held-out prompts, with the weights after the last sync
    objective/<metric>              what the objective logs
    teacher/<what>                  served teachers: tokens scored, from_cache, second_requests, bytes_per_token received
    gupo/<metric>                   what GUPO logs
    tokens/<what>                   tokens of the batch: prompt, response, trained
    batch/<what>                    sequences, groups, micro_batches
    response/length, response/cut   mean length in tokens, and share cut at the limit
    drop/<reason>                   samples that were not trained on
    time/<part>, time/step          seconds; the parts and time/other add up to time/step

Values are numbers. In the JSON file those that are not finite are the texts "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.yaml"
REPORT_FILE = "report.html"
SAMPLES_DIR = "samples"

STEP = "step"
TIME_STEP = "time/step"
TIME_OTHER = "time/other"

# In the order of a step; parts that are not listed come after these, and `other` last.
TIME_PARTS = {
    "time/rollout": "rollout",
    "time/reward": "reward",
    "time/teacher": "teacher",
    "time/logprobs": "log-probs",
    "time/gupo": "GUPO",
    "time/forward_backward": "forward and backward",
    "time/optimizer": "optimizer",
    "time/sync": "weight sync",
    "time/eval": "evaluation",
    "time/checkpoint": "checkpoint",
}
