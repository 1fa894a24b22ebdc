"""This project's engine on the peers' workload, with what it decides without flags."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from common.training_step import StepTimer
from megatron_dta.core.config import ParallelConfig, TreeConfig
from megatron_dta.core.engine import TreeBatch
from megatron_dta.core.objectives.fields import LossFields, Objective, TokenLosses, masked
from megatron_dta.training.autotune import Autotuner, measure_gpu
from megatron_dta.training.huggingface.config.config import architecture, read_hf_config
from megatron_dta.training.huggingface.mappings import ModelShape
from megatron_dta.training.huggingface.weights import HfWeights
from peers.workload import Sequence, model_config


def policy_gradient(logprobs: Tensor, entropy: Tensor, fields: LossFields) -> TokenLosses:
    """The loss of all peers: minus advantage times logprob, averaged over the trained tokens."""
    return TokenLosses(-masked(fields.advantages * logprobs, fields.loss_mask))


class EngineStep:
    """A model in our engine with a folder's weights."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.folder, config = folder, model_config(folder, dtype)
        self.timer = StepTimer(config, ParallelConfig(), seed=1)
        self.timer.objective = Objective("policy-gradient", policy_gradient, is_policy_gradient=True)
        self.device = self.timer.device
        self._weights().load(folder)
        self.tuner = None
        if self.device.type == "cuda":
            buffers = [buffer.grad_data for chunk in self.timer.chunks for buffer in chunk.buffers]
            states = [*self.timer.model.parameters(), *buffers]
            measure = lambda graphs: measure_gpu(self.device, states, graphs)  # noqa: E731
            self.tuner = Autotuner(self.timer.engine, self.timer.constant, measure)

    def _weights(self) -> HfWeights:
        family = architecture(read_hf_config(self.folder))
        chunks = list(getattr(self.timer.model, "model_chunks", [self.timer.model]))
        return HfWeights(chunks, family.architecture, ModelShape.of(self.timer.model_config))

    def plan(self, sequences: list[Sequence], mode: str) -> TreeBatch:
        """The step in mode "dta" or "dense"."""
        size = None if self.tuner is not None else 4096
        tree = TreeConfig(tree_mode=mode, tree_segment_tokens=size)
        return self.timer.plan([row.sample() for row in sequences], tree)

    def first_steps(self, sequences: list[Sequence], mode: str) -> None:
        """The two steps by which a run corrects its costs and its memory."""
        for _ in range(2 if self.tuner is not None else 0):
            self.timer.zero_gradients()
            batch, is_timed = self.plan(sequences, mode), self.tuner.measures_next_step
            result = self.timer.engine.forward_backward(batch, self.timer.objective, record_timeline=is_timed)
            self.tuner.observe(result)
            self.tuner.update()

    def step(self, batch: TreeBatch) -> float:
        """Compute the gradient of the batch; returns the loss."""
        self.timer.zero_gradients()
        return float(self.timer.engine.forward_backward(batch, self.timer.objective).loss)

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of the last step under Hugging Face's names."""
        weights = [(parameter, parameter.data) for parameter in self.timer.model.parameters()]
        for parameter, _ in weights:
            parameter.data = parameter.main_grad
        gradients = {name: values.clone() for name, values in self._weights().iterate()}
        for parameter, values in weights:
            parameter.data = values
        return gradients
