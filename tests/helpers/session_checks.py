"""Checks of recorded sessions: every token as it was sampled, trained once; and a training step on their trees."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from megatron_dta.core.config import ModelConfig, ObjectiveConfig, ParallelConfig, TreeConfig
from megatron_dta.core.model.build import build_stock_model
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.core.objectives.registry import make_objective
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.extras.agents.gateway.records import session_rollouts
from megatron_dta.extras.agents.gateway.session import Call, Session
from megatron_dta.extras.parity.references import run_stock
from megatron_dta.extras.parity.tree_run import run_tree
from scripted_engine import ScriptedEngine


def check_sessions(sessions: list[Session], engine: ScriptedEngine) -> None:
    """The ids of calls and rollouts against what the engine saw and gave."""
    seen = Counter((tuple(prompt), key) for prompt, key in engine.prompts)
    assert max(seen.values()) == 1
    prompts = Counter(prompt for prompt, _ in seen)
    sampled = trained = 0
    for session in sessions:
        rollouts = session_rollouts(session, 1.0)
        for call in session.calls:
            prompts[tuple(call.token_ids(call.prompt_length).tolist())] -= 1
            sampled += len(call.output)
        owned = [rollout.token_ids[rollout.loss_mask].tolist() for rollout in rollouts]
        trained += sum(map(len, owned))
        by_call = [tuple(call.output.tolist()) for call in session.calls]
        in_rollouts = [
            tuple(rollout.token_ids[begin:end].tolist())
            for rollout in rollouts
            for begin, end in np.flatnonzero(np.diff(rollout.loss_mask, prepend=0, append=0)).reshape(-1, 2)
        ]
        assert Counter(by_call) == Counter(in_rollouts), "an answer is not trained exactly once"
    assert not any(prompts.values()), "the engine saw other prompts than the trees have"
    assert sampled == trained


def distinct_tokens(calls: Sequence[Call]) -> int:
    """The tokens of the smallest tree of all calls' sequences."""
    prefixes = set()
    for call in calls:
        digest = 0
        for token in call.token_ids().tolist():
            digest = hash((digest, token))
            prefixes.add(digest)
    return len(prefixes)


def samples_of(sessions: list[Session], alone: bool) -> list[TrainingSample]:
    """Training samples with an advantage for each session: of the trees' paths, or of every call alone."""
    samples = []
    for session in sessions:
        advantage = np.random.default_rng(session.number).normal()
        rows = []
        for call in session.calls if alone else []:
            rows.append((call.token_ids(), np.arange(call.length) >= call.prompt_length))
        for rollout in [] if alone else session_rollouts(session, 1.0):
            rows.append((rollout.token_ids, rollout.loss_mask))
        samples += [TrainingSample(ids, mask, advantages=np.full(len(ids), advantage)) for ids, mask in rows]
    return samples


def step_error(sessions: list[Session], vocab_size: int) -> float:
    """Loss, logprobs and gradients of the step on trees against every call alone on the stock model."""
    initialize_parallel(1, ParallelConfig())
    model = ModelConfig(1, 16, 2, max_position_embeddings=4096, vocab_size=vocab_size, params_dtype=torch.float64)
    weights = {
        k: v.clone() for k, v in build_stock_model(model, torch.device("cpu")).state_dict().items() if v is not None
    }
    objective = make_objective(ObjectiveConfig())
    ours, _ = run_tree(model, weights, samples_of(sessions, False), objective, TreeConfig(tree_segment_tokens=2048))
    stock = run_stock(model, weights, samples_of(sessions, True), objective)
    assert ours.gradients.keys() == stock.gradients.keys()
    errors = [float((ours.gradients[name] - stock.gradients[name]).abs().max()) for name in stock.gradients]
    # In order of size, since the rows differ; untrained tokens have 0.
    logprobs = [np.concatenate(outcome.logprobs) for outcome in (ours, stock)]
    values, references = (np.sort(values[values != 0]) for values in logprobs)
    return max(*errors, abs(ours.loss - stock.loss), float(np.abs(values - references).max()))
