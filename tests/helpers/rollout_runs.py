"""Runs that train on rollouts of the local servers, and what their tests compare."""

import io
import json
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from conversion_cases import save_huggingface
from megatron_dta.common.console import Console
from megatron_dta.training.arguments import parse_arguments
from megatron_dta.training.huggingface.save import hf_weights
from megatron_dta.training.loop import Trainer
from megatron_dta.wiring.setup import build_trainer
from rollout_servers import SERVERS, RolloutServer

VOCABULARY = 37
EOS = 3
REWARD = """
def reward(prompt, response, response_token_ids):
    return float(len(set(response_token_ids)) % 5)
"""


class Runs:
    """A model's folder, prompts, a reward, and servers to train with."""

    def __init__(self, stack: ExitStack, folder: Path, rng: np.random.Generator) -> None:
        self._stack, self.folder = stack, folder
        save_huggingface(folder / "hf", "llama", 5)
        (folder / "reward.py").write_text(REWARD)
        prompts = [rng.integers(4, VOCABULARY, rng.integers(1, 6)).tolist() for _ in range(7)]
        rows = [json.dumps({"prompt_token_ids": prompt}) for prompt in prompts]
        (folder / "prompts.jsonl").write_text("\n".join(rows))
        self.servers: list[RolloutServer] = []

    def add_servers(self, kind: str, count: int, **options: object) -> list[RolloutServer]:
        table = np.random.default_rng(0).normal(size=(VOCABULARY, VOCABULARY))
        self.servers += [self._stack.enter_context(SERVERS[kind](table, **options)) for _ in range(count)]
        return self.servers

    def command(self, more: str, engine: str | None = None) -> str:
        urls = " ".join(f"--rollout-server-url {server.url}" for server in self.servers)
        engine = engine or self.servers[0].kind
        command = (
            f"--load-hf {self.folder / 'hf'} --lr 1e-2 --clip-grad 1 --tree-segment-tokens 16 "
            f"--prompt-data {self.folder / 'prompts.jsonl'} --tokenizer-type NullTokenizer --eos-id {EOS} "
            f"--reward-function {self.folder / 'reward.py'}:reward --rollout-batch-size 3 --n-samples-per-prompt 4 "
            f"--rollout-max-response-len 8 --rollout-engine {engine} {urls if engine in SERVERS else ''} {more}"
        )
        if engine in SERVERS:
            command += " --rollout-attempts 3 --rollout-timeout 20"
        return command

    def trainer(self, more: str, engine: str | None = None) -> tuple[Trainer, io.StringIO]:
        output = io.StringIO()
        command = self.command(more, engine)
        return build_trainer(parse_arguments(command.split()), Console(file=output, width=400)), output

    def run(self, more: str, engine: str | None = None) -> tuple[Trainer, str]:
        trainer, output = self.trainer(more, engine)
        try:
            trainer.run()
        finally:
            trainer.metrics.close()
        return trainer, output.getvalue()


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    weights = hf_weights(trainer.config, trainer.model)
    return {name: values.detach().clone() for name, values in weights.iterate()}


def metrics_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
