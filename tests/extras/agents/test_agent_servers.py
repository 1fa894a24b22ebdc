"""Agents whose calls vLLM and SGLang servers answer: training, rewards by a function, counts."""

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from conftest import seed_all
from rollout_runs import Runs, metrics_of

AGENT = '''
import json, urllib.request

def agent(record, access):
    """Two completions, the second of them behind the first."""
    prompt = list(record["prompt_token_ids"])
    for _ in range(2):
        body = json.dumps({"prompt": prompt, "max_tokens": 5}).encode()
        headers = {"authorization": "Bearer " + access.api_key}
        with urllib.request.urlopen(urllib.request.Request(access.base_url + "/completions", body, headers)) as reply:
            text = json.loads(reply.read())["choices"][0]["text"]
        prompt += [int(word) for word in text.split()] + [4]
'''


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_servers_answer_agents(kind: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        runs = Runs(stack, tmp_path, seed_all(3))
        (server,) = runs.add_servers(kind, 1)
        (tmp_path / "agent.py").write_text(AGENT)
        agent = f"--agent-callable {tmp_path}/agent.py:agent"
        trainer, _ = runs.trainer(f"--train-iters 2 --save {tmp_path / 'run'} {agent}")
        seen = []
        collect = trainer.source.next_batch
        trainer.source.next_batch = lambda number: seen.append(collect(number)) or seen[-1]
        trainer.run()
        trainer.metrics.close()
        assert not server.violations
        rows = metrics_of(tmp_path / "run")
        assert [row["sessions"] for row in rows] == [12, 12]
        assert [row["agent_calls"] for row in rows] == [24, 24]
        assert [row["failed_sessions"] for row in rows] == [0, 0]
        for version, rollouts in enumerate(seen):
            assert {rollout.policy_version for rollout in rollouts} == {version}
            assert len({rollout.trajectory_id for rollout in rollouts}) == 12
            # One reward for a session, from the function and its last answer.
            assert all(rollout.reward == int(rollout.reward) for rollout in rollouts)
            assert all((rollout.logprobs[rollout.loss_mask] < 0).all() for rollout in rollouts)
            assert sum(np.count_nonzero(rollout.loss_mask) for rollout in rollouts) <= 12 * 10
