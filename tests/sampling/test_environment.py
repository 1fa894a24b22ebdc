"""Multi-turn rollouts as trees: turns, branching, copies of environments, rewards, time-outs and failures."""

import math
import time
from dataclasses import replace

import numpy as np
import pytest

from blank_tokenizer import blank_tokenizer
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.sampling.environment import EnvironmentRunner, load_environment
from megatron_dta.sampling.params import SamplingParams
from megatron_dta.sampling.prompts.tokenizer import CharacterTokenizer, NullTokenizer
from megatron_dta.sampling.rewards.registry import load_reward_function
from megatron_dta.sampling.sources.batch_source import RolloutError
from megatron_dta.sampling.task import build_task
from megatron_dta.sampling.treepo.records import tree_rollouts
from megatron_dta.sampling.treepo.sampler import TreeQuery, TreeSampler
from megatron_dta.sampling.treepo.settings import TreeSettings
from megatron_dta.sampling.treepo.tree import EndReason
from megatron_dta.training.arguments import parse_arguments
from megatron_dta.wiring.engines import build_engine
from megatron_dta.wiring.sources import build_sampling_evaluation, build_sampling_source
from recording_engine import RecordingEngine

VOCAB, EOS = 40, 0
PROMPT = np.array([5])


class Remembering:
    """Answers with all it has seen so far, so a copy that was shared between branches is found out."""

    turns = 3

    def reset(self, record):
        self.seen = [record.get("id", 1)]
        return [7, 8]

    def step(self, action: str):
        self.seen.append(len(action.split()))
        return [30 + len(self.seen), *self.seen[-3:]], float(len(self.seen)), len(self.seen) > self.turns


def replayed(record, actions):
    """The observations of a fresh environment after these actions."""
    environment = Remembering()
    environment.reset(record)
    return [environment.step(action) for action in actions]


def grow(seed: int, factory=Remembering, runner=None, **changes):
    runner = runner or EnvironmentRunner(factory, NullTokenizer(VOCAB, EOS))
    defaults = {"width": 6, "max_response_tokens": 60, "segment_tokens": 4}
    engine = RecordingEngine(VOCAB, 0.25, seed=seed)
    queries = [TreeQuery(i, np.array([5, 6]), {"id": 10 + i}) for i in range(4)]
    sampler = TreeSampler(engine, TreeSettings(**(defaults | changes)), None, runner)
    return queries, sampler.sample(queries, SamplingParams(60, EOS, seed=seed), 0), engine, runner


@pytest.mark.parametrize(("seed", "segment_tokens"), [(0, 4), (1, None)])
def test_every_branch_has_an_environment_of_its_own(seed: int, segment_tokens: int | None):
    queries, trees, engine, runner = grow(seed, segment_tokens=segment_tokens)
    requests = {request.key: request for request in engine.requests}
    reasons = set()
    for query, tree in zip(queries, trees, strict=True):
        assert tree.nodes[0].token_ids.tolist() == [5, 6, 7, 8]
        assert len(tree.leaves) == 6
        assert abs(sum(tree.leaf_weights().values()) - 1) < 1e-12
        for leaf, rollout in zip(tree.leaves, tree_rollouts(tree, "g"), strict=True):
            reasons.add(tree.nodes[leaf].end)
            path = [tree.nodes[i] for i in tree.lineage(leaf)]
            # The actions, read off the rollout alone: runs of sampled tokens up to an end of sequence.
            sampled = np.where(rollout.loss_mask, rollout.token_ids, -1)[4:]
            actions, current = [], []
            for token in sampled[sampled >= 0]:
                current.append(int(token))
                if token == EOS:
                    actions.append(" ".join(str(t) for t in current[:-1]))
                    current = []
            answers = replayed(query.record, actions)
            observed = [t for node in path[1:] for t in node.token_ids[node.num_sampled :].tolist()]
            ended = tree.nodes[leaf].turn_ended
            expected = [t for observation, _, _ in (answers[:-1] if ended else answers) for t in observation]
            assert observed == expected
            assert rollout.reward == pytest.approx(sum(r for _, r, _ in answers))
            assert rollout.segment_rewards.sum() == pytest.approx(rollout.reward)
            begin = 4
            for node in path[1:]:
                assert np.array_equal(requests[node.key].token_ids, rollout.token_ids[:begin])
                begin += len(node.token_ids)
    assert EndReason.ENVIRONMENT in reasons
    assert runner.counts["environment_steps"] == sum(node.turn_ended for tree in trees for node in tree.nodes)
    if segment_tokens is None:  # then there are no forks but where a turn has ended
        forks = [node for tree in trees for node in tree.nodes[1:] if len(node.children) > 1]
        assert forks
        assert all(node.turn_ended for node in forks)


def test_lengths_end_rollouts():
    _, trees, _, _ = grow(2, max_response_tokens=9)
    lengths = [tree.response_length(leaf) for tree in trees for leaf in tree.leaves]
    assert max(lengths) <= 9
    assert {tree.nodes[leaf].end for tree in trees for leaf in tree.leaves} == {EndReason.LENGTH}
    # An observation for which there is no room is left out: nothing untrained stands at the end.
    assert all(r.loss_mask[-1] for tree in trees for r in tree_rollouts(tree, "g"))


class Unreliable(Remembering):
    """Fails in all ways, by the length of the action."""

    def step(self, action: str):
        kind = len(action.split()) % 5
        if kind == 0:
            raise RuntimeError("broken\npipe")
        if kind == 1:
            time.sleep(20)
        if kind == 2:
            return "no tuple"
        return super().step(action)


def test_failures_and_timeouts_end_their_paths_and_are_counted():
    runner = EnvironmentRunner(Unreliable, NullTokenizer(VOCAB, EOS), 0.3, drops_failures=True)
    _, trees, _, runner = grow(0, runner=runner, width=4, segment_tokens=6)
    failed = [node for tree in trees for node in tree.nodes if node.end is EndReason.ENVIRONMENT_FAILED]
    counts = runner.counts
    assert counts["environment_failures"] == len(failed) > counts["environment_timeouts"] > 0
    assert all(len(tree.leaves) == 4 for tree in trees)
    for tree in trees:
        assert len(tree_rollouts(tree, "g")) == 4 - sum(tree.nodes[leaf] in failed for leaf in tree.leaves)
    strict = EnvironmentRunner(Unreliable, NullTokenizer(VOCAB, EOS), 0.3)
    with pytest.raises(InputError, match=r"--environment: a step failed: "):
        grow(0, runner=strict)


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (("ab", 0.0, True), "CharacterTokenizer cannot encode"),
        (([99], 0.0, True), "outside of the vocabulary"),
        (("1", float("nan"), True), "finite reward"),
        (("1", 0.0, "yes"), "as a bool"),
        (("1", 0.0), "must return (observation, reward, done), got a tuple of 2"),
    ],
)
def test_nonsense_is_a_failure(answer, failure: str):
    class Fixed(Remembering):
        def step(self, action):
            return answer

    runner = EnvironmentRunner(Fixed, CharacterTokenizer(), drops_failures=True)
    states, _ = runner.reset([{}], [PROMPT])
    _, (outcome,) = runner.step(states, [np.array([1])])
    assert failure in outcome.failure


def test_a_reset_that_fails_stops_the_run():
    class Broken(Remembering):
        def reset(self, record):
            raise KeyError("question")

    with pytest.raises(InputError, match=r"reset failed: prompt 1: KeyError: 'question'"):
        EnvironmentRunner(Broken, NullTokenizer(VOCAB, EOS)).reset([{}], [PROMPT])


def test_observations_are_encoded_where_they_stand(tmp_path):
    tokenizer = blank_tokenizer(tmp_path)

    class Answers(Remembering):
        def reset(self, record):
            return "see it"

        def step(self, action):
            return "and so on", 0.0, False

    runner = EnvironmentRunner(Answers, tokenizer)
    prompt, action = tokenizer.encode("user: "), np.append(tokenizer.encode("hm"), tokenizer.eos_id)
    states, observations = runner.reset([{}], [prompt])
    _, (outcome,) = runner.step(states, [action])
    # The tokenizer puts a blank before the first word of a text, which these are not.
    assert np.array_equal(np.concatenate([prompt, observations[0]]), tokenizer.encode("user: see it"))
    assert np.array_equal(outcome.observation, tokenizer.encode("</s>and so on")[1:])
    assert len(tokenizer.encode("and so on")) == len(outcome.observation) + 1
    assert runner.counts["observation_border_crossings"] == 0


def test_loading(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("class Env:\n    def reset(self, record): ...\n    def step(self, action): ...\n\nclass No: ...\n")
    assert load_environment(f"{file}:Env").__name__ == "Env"
    assert load_environment(f"{Remembering.__module__}.Remembering") is not None
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(InputError, match="the file does not run: SystemExit"):
        load_reward_function(f"{tmp_path}/leaves.py:reward")
    for spec, message in (
        (f"{tmp_path}/leaves.py:Env", "the file does not run: SystemExit: 0"),
        (f"{file}:No", "must be a class with the methods"),
        ("nothing", "dotted name"),
        ("no_such_package.Env", "does not load: ModuleNotFoundError"),
    ):
        with pytest.raises(InputError, match=message):
            load_environment(spec)


ECHO = """
class Guess:
    '''The first turn is answered with the sum's first digit; the second is the answer.'''
    def reset(self, record):
        self.answer, self.turn = str(record["answer"]), 0
    def step(self, action):
        self.turn += 1
        if self.turn == 1:
            return self.answer[0] + "=", 0.5, False
        return "", float(action == self.answer), True
"""


@pytest.mark.parametrize("method", ["independent", "treepo"])
def test_source_and_evaluation_with_an_environment(tmp_path, method: str):
    """On the training weights, in float64: recorded logprobs are those of the whole sequences."""
    (tmp_path / "guess.py").write_text(ECHO)
    flags = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 40 --task arithmetic "
    flags += "--arithmetic-max-operand 9 --rollout-batch-size 3 --n-samples-per-prompt 4 --rollout-max-response-len 12 "
    flags += f"--environment {tmp_path}/guess.py:Guess --eval-interval 1 --eval-iters 3 --n-samples-per-eval-prompt 2 "
    flags += f"--rollout-method {method} "
    if method == "treepo":
        flags += "--treepo-segment-length 3 "
    config = parse_arguments(flags.split())
    task = build_task(config.sampling, 40)
    import torch

    model_config = replace(
        config.model, vocab_size=task.tokenizer.vocab_size, init_method_std=0.3, params_dtype=torch.float64
    )
    model = build_model(model_config, initialize_parallel(3))
    source = build_sampling_source(build_engine(config.sampling, model), task, config)
    batches = [source.next_batch(step) for step in range(3)]
    assert all(len(batch) == 12 for batch in batches)
    statistics = source.statistics()
    assert statistics["environment_steps"] > 0
    assert statistics["environment_failures"] == 0
    rollouts = [rollout for batch in batches for rollout in batch]
    assert any(not rollout.loss_mask[np.argmax(rollout.loss_mask) :].all() for rollout in rollouts), "no second turn"
    from megatron_dta.core.config import TreeConfig
    from megatron_dta.core.engine import TreeEngine, prepare_batch
    from megatron_dta.core.planning.step.sample import TrainingSample

    samples = [TrainingSample(rollout.token_ids, rollout.loss_mask) for rollout in rollouts]
    logprobs = TreeEngine(model, 1.0).compute_logprobs(prepare_batch(samples, TreeConfig(tree_segment_tokens=32)))
    for rollout, trained in zip(rollouts, logprobs, strict=True):
        np.testing.assert_allclose(rollout.logprobs, trained, rtol=0, atol=1e-6)
    again = build_sampling_source(build_engine(config.sampling, model), task, config).next_batch(1)
    for a, b in zip(again, batches[1], strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.reward == b.reward
    evaluation = build_sampling_evaluation(build_engine(config.sampling, model), task, config)
    metrics = evaluation.evaluate(0)
    assert metrics == evaluation.evaluate(1)
    counts = {"environment_steps", "environment_failures", "environment_timeouts", "observation_border_crossings"}
    assert set(metrics) == {"reward", "response_tokens", "ended", "pass@2"} | counts
    assert 0 <= metrics["ended"] <= 1
    assert metrics["environment_steps"] > 0
    assert metrics["environment_failures"] == 0


BROKEN = """
import sys

class Broken:
    '''Some rollouts, told by their text, meet a tool that is broken.'''
    def reset(self, record):
        pass
    def step(self, action):
        kind = sum(map(ord, action)) % 4
        if kind == 1:
            sys.exit(0)
        if kind == 2:
            raise KeyboardInterrupt
        return "", 1.0 + kind, True

class Gone(Broken):
    def step(self, action):
        raise ConnectionError("no server")
"""


def test_rollouts_whose_environment_failed_can_be_left_out(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    flags = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 250 --task arithmetic "
    # Long enough for every response to end with an end of sequence: one that is cut has no turn.
    flags += "--rollout-batch-size 3 --n-samples-per-prompt 8 --rollout-max-response-len 240 --eval-interval 1 "
    flags += "--eval-iters 8 "
    for name in ("Broken", "Gone"):
        command = f"{flags} --environment {tmp_path}/broken.py:{name}"
        config = parse_arguments(f"{command} --rollout-failure drop".split())
        task = build_task(config.sampling, 250)
        model = build_model(replace(config.model, vocab_size=task.tokenizer.vocab_size), initialize_parallel(3))
        source = build_sampling_source(build_engine(config.sampling, model), task, config)
        evaluation = build_sampling_evaluation(build_engine(config.sampling, model), task, config)
        held_out = evaluation.evaluate(0)
        assert held_out["environment_failures"] > 0
        if name == "Gone":
            with pytest.raises(RolloutError, match="all rollouts of a batch have failed"):
                source.next_batch(0)
            assert math.isnan(held_out["reward"])
            assert held_out["environment_failures"] == held_out["environment_steps"]
            continue
        kept, counts = source.next_batch(0), source.statistics()
        assert 0 < counts["environment_failures"] < counts["environment_steps"] == 24
        assert counts["environment_timeouts"] == 0
        assert len(kept) == 24 - counts["environment_failures"]
        assert all(rollout.reward >= 1 for rollout in kept)
        for group in {r.group_id for r in kept}:
            assert sum(r.leaf_weight for r in kept if r.group_id == group) == pytest.approx(1)
        assert counts["ended"] == pytest.approx(1 - counts["environment_failures"] / 24)
        assert held_out["reward"] >= 1
    with pytest.raises(InputError, match="--rollout-failure drop would remove leaves"):
        parse_arguments(f"{command} --rollout-failure drop --rollout-method treepo --treepo-segment-length 2".split())
    config = parse_arguments(command.split())
    with pytest.raises(InputError, match="--environment: a step failed: "):
        build_sampling_source(build_engine(config.sampling, model), task, config).next_batch(0)


def test_calls_that_hang_share_one_time_out():
    """They begin together, so together they may take as long as one."""

    class Hanging(Remembering):
        def step(self, action):
            time.sleep(20)

    runner = EnvironmentRunner(Hanging, NullTokenizer(VOCAB, EOS), 1.0, drops_failures=True)
    states, _ = runner.reset([{}] * 6, [PROMPT] * 6)
    began = time.monotonic()
    _, outcomes = runner.step(states, [np.array([1])] * 6)
    assert time.monotonic() - began < 5
    assert all("took longer than" in outcome.failure for outcome in outcomes)
    assert runner.counts["environment_timeouts"] == 6
