"""Compares trees with independent rollouts on held-out prompts, at equal leaves and at equal decoded tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_dta.sampling.config.run import SampledRun
from megatron_dta.sampling.evaluation import Answers, evaluate_answers
from megatron_dta.sampling.interface import RolloutEngine
from megatron_dta.sampling.sources.independent import evaluation_params
from megatron_dta.sampling.task import SamplingTask
from megatron_dta.sampling.treepo.sampler import TreeSampler
from megatron_dta.sampling.treepo.settings import TreeSettings
from megatron_dta.sampling.treepo.source import sample_scored_trees, stop_rules


def compare_at_equal_tokens(
    engine: RolloutEngine, task: SamplingTask, config: SampledRun, ks: Sequence[int], answer_of: Callable[[str], str]
) -> dict[str, dict[str, float]]:
    """Metrics (``evaluate_answers``) of ``tree``, ``independent`` (equal leaves) and ``independent, equal tokens``.

    The trees have ``n_samples_per_eval_prompt`` leaves. All three use the random numbers of evaluation.
    """
    sampling = config.sampling
    leaves, longest = sampling.n_samples_per_eval_prompt, sampling.rollout_max_response_len
    tree = TreeSettings.from_config(config.treepo, replace(sampling, n_samples_per_prompt=leaves))
    rules = stop_rules(task, config)

    def judged(settings: TreeSettings) -> dict[str, float]:
        problems = sample_answers(TreeSampler(engine, settings, rules), task, config, answer_of)
        return evaluate_answers(problems, ks, config.optimization.seed)

    trees, independent = judged(tree), judged(TreeSettings.independent(leaves, longest, tree.segment_tokens))
    affordable = max(1, int(trees["decoded_tokens"] / (independent["decoded_tokens"] / leaves)))
    equal = judged(TreeSettings.independent(affordable, longest, tree.segment_tokens))
    return {"tree": trees, "independent": independent, "independent, equal tokens": equal}


def sample_answers(
    sampler: TreeSampler, task: SamplingTask, config: SampledRun, answer_of: Callable[[str], str]
) -> list[Answers]:
    """Sample and score the answers to each held-out prompt."""
    params = evaluation_params(task, config.sampling, config.optimization.seed)
    prompts = task.eval_prompts[: config.logging.eval_iters]
    trees = sample_scored_trees(sampler, task, prompts, 0, params, 0)
    answers = []
    for tree, rewards in trees:
        texts = [task.tokenizer.decode(tree.tokens(leaf)[tree.nodes[0].length :].tolist()) for leaf in tree.leaves]
        answers.append(Answers([answer_of(t) for t in texts], [rewards[i] for i in tree.leaves], tree.decoded_tokens))
    return answers
