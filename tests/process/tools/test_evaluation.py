"""Pass@k and maj@k against enumeration, and the tool that compares trees with independent rollouts."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest

from forked import run_python
from megatron_dta.sampling.evaluation import majority_at_k, pass_at_k, pass_rates


def test_against_all_choices_of_k():
    rng = np.random.default_rng(0)
    for _ in range(20):
        count = int(rng.integers(1, 9))
        k = int(rng.integers(1, count + 1))
        answers = [str(a) for a in rng.integers(0, 4, count)]
        right = [answer in ("0", "3") for answer in answers]
        chosen = list(itertools.combinations(range(count), k))
        expected = np.mean([any(right[i] for i in subset) for subset in chosen])
        assert abs(pass_at_k(count, sum(right), k) - expected) < 1e-12
        majority = []
        for subset in chosen:
            votes = Counter(answers[i] for i in subset)
            best = [answer for answer, n in votes.items() if n == max(votes.values())]
            majority.append(np.mean([answer in ("0", "3") for answer in best]))
        estimate = majority_at_k(answers, right, k, np.random.default_rng(1))
        tolerance = 1e-12 if k in (1, count) else 4 * np.std(majority) / np.sqrt(1000) + 1e-12
        assert abs(estimate - np.mean(majority)) <= tolerance


def test_the_tool(tmp_path):
    """On a checkpoint of an untrained model: three columns, the third at no more decoded tokens than the trees."""
    model = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --vocab-size 16 --max-position-embeddings 32 "
    model += "--task arithmetic --arithmetic-max-operand 9 --rollout-max-response-len 6 "
    train = f"-m megatron_dta.train {model} --train-iters 1 --save {tmp_path}/run --rollout-batch-size 2"
    assert run_python(train.split()).returncode == 0
    judge = f"tools/evaluate_sampling.py {model} --load {tmp_path}/run --treepo-segment-length 1 --k 1 4 8 64 "
    judge += f"--n-samples-per-eval-prompt 8 --eval-iters 5 --output {tmp_path}/out.json"
    done = run_python(judge.split())
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out.json").read_text())
    assert list(results) == ["tree", "independent", "independent, equal tokens"]
    tree, equal, cheap = results.values()
    assert tree["answers"] == equal["answers"] == 8
    assert tree["decoded_tokens"] < equal["decoded_tokens"]
    assert cheap["answers"] < 8
    assert cheap["decoded_tokens"] < 1.3 * tree["decoded_tokens"]
    assert all({"pass@1", "maj@4", "pass@4"} <= set(values) for values in results.values())
    assert all(values["pass@1"] <= values["pass@4"] for values in results.values())
    assert "pass@64" not in tree
    for line in ("tree", "pass@4", "decoded_tokens"):
        assert line in done.stdout
    bad = run_python(judge.replace("--k 1", "--k 0").split())
    assert bad.returncode == 2
    assert bad.stderr.strip() == "error: --k 0: must be at least 1"


def test_pass_rates_are_means_over_all_choices():
    """Against every choice of k responses, with prompts that have lost some of theirs."""
    rng = np.random.default_rng(1)
    samples = int(rng.integers(2, 8))
    rewards = [rng.random(samples - int(rng.integers(0, 2))).tolist() for _ in range(5)]
    rates = pass_rates(rewards, samples)
    for k in {2, 4, samples} & set(range(2, samples + 1)):
        means = [
            np.mean([max(choice) > 0.5 for choice in itertools.combinations(answers, k)])
            for answers in rewards
            if len(answers) >= k
        ]
        if means:
            assert rates.pop(f"pass@{k}") == pytest.approx(np.mean(means))
    assert not rates
    assert pass_rates([[1.0], [0.0]], 1) == {}
    assert pass_rates([[1.0], []], 4) == {}
