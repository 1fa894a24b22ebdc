"""The logprobs that training computes for the results of an engine."""

import numpy as np

from megatron_dta.core.config import TreeConfig
from megatron_dta.core.engine import TreeEngine, prepare_batch
from megatron_dta.core.planning.step.sample import TrainingSample
from rollout_forest import PARAMS


def trainers_logprobs(model, results: dict, tree: TreeConfig) -> list[np.ndarray]:
    """What training computes for the tokens that each request has sampled."""
    samples = []
    for request, result in results.values():
        token_ids = np.concatenate([request.token_ids, result.token_ids])
        samples.append(TrainingSample(token_ids, np.arange(len(token_ids)) >= len(request.token_ids)))
    engine = TreeEngine(model, temperature=PARAMS.temperature, logprob_chunk_tokens=50)
    logprobs = engine.compute_logprobs(prepare_batch(samples, tree))
    return [row[sample.loss_mask] for sample, row in zip(samples, logprobs, strict=True)]
