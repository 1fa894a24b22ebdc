"""Combines one rank's model chunks of a pipelined model to one object that samples, saves and loads like a whole model.

Training does not use this forward: the engine runs the model chunks op by op (``engine.stage_run``). A call of the
model is one pass of the sampler through all stages, one after the other; only the last stage then has the result.
Passes that only decode keep all stages busy (``sampling.in_process.pipelined_steps``).

Legend: n tokens of the pass, C hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

from megatron_dta.core.model.attention.context import AttentionContext
from megatron_dta.core.model.tree_model import TreeGPTModel


class StagedModel(torch.nn.Module):
    """The rank's model chunks in stage order; attributes are as in ``TreeGPTModel``.

    The outer key of state dictionaries is the number of the model chunk.

    Attributes:
        group: the ranks of the pipeline, in the order of their stages.
    """

    def __init__(self, model_chunks: Sequence[TreeGPTModel]) -> None:
        super().__init__()
        self.model_chunks = torch.nn.ModuleList(model_chunks)
        self.config, self.true_vocab_size = model_chunks[0].config, model_chunks[0].true_vocab_size
        self.max_sequence_length = model_chunks[0].max_sequence_length
        # The last stage sends complete logits to the others, also those of a tensor group.
        self.vocabulary_shard = None
        self.group = parallel_state.get_pipeline_model_parallel_group()
        self._communicator = P2PCommunicator(self.group, self.config)

    @property
    def attention_layers(self) -> list[int]:
        """1-based numbers in the whole model of this rank's layers with attention."""
        return [number for chunk in self.model_chunks for number in chunk.attention_layers]

    @property
    def decodes_directly(self) -> bool:
        """Whether all model chunks of this rank decode without modules."""
        return all(chunk.decodes_directly for chunk in self.model_chunks)

    @property
    def counts_on_host(self) -> bool:
        """Whether the host has to know how many tokens each expert of this rank gets."""
        return any(chunk.counts_on_host for chunk in self.model_chunks)

    def forward(self, input_ids: Tensor, context: AttentionContext) -> Tensor:
        """Hidden states [n, C] after the final norm on the last stage; undefined on the others.

        Every rank of the pipeline must call this with the same arguments. Not for training.
        """
        hidden = None
        for chunk in self.model_chunks:
            if not chunk.pre_process:
                chunk.set_input_tensor(self._receive(chunk.stage_shape(input_ids.shape[1])))
            hidden = chunk(input_ids, context)
            if not chunk.post_process:
                self._send(hidden)
        if self.model_chunks[-1].post_process:
            return hidden
        return hidden.new_zeros(input_ids.shape[1], self.config.hidden_size)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, V] of ``hidden`` [n, C], complete and bit-identical on every rank."""
        last = self.model_chunks[-1]
        logits = last.logits(hidden) if last.post_process else hidden.new_empty(hidden.shape[0], self.true_vocab_size)
        source = torch.distributed.get_process_group_ranks(self.group)[-1]
        logits = logits.contiguous()
        torch.distributed.broadcast(logits, source, group=self.group)
        return logits

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The model chunks' state dictionaries by number of the model chunk."""
        return {str(i): chunk.state_dict(*args, **kwargs) for i, chunk in enumerate(self.model_chunks)}

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The model chunks' sharded state dictionaries by number of the model chunk."""
        return {str(i): chunk.sharded_state_dict(*args, **kwargs) for i, chunk in enumerate(self.model_chunks)}

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Load a dictionary from ``state_dict`` or ``sharded_state_dict``."""
        for i, chunk in enumerate(self.model_chunks):
            chunk.load_state_dict(state_dict[str(i)], *args, **kwargs)

    def _receive(self, shape: tuple[int, int, int]) -> Tensor:
        tensor, handles = self._communicator.send_forward_recv_forward(None, True, shape, overlap_p2p_comm=True)
        for handle in handles.values():
            handle.wait()
        return tensor.detach()

    def _send(self, hidden: Tensor) -> None:
        _, handles = self._communicator.send_forward_recv_forward(hidden.contiguous(), False, None, True)
        for handle in handles.values():
            handle.wait()


# The type that ``build_model`` returns: a whole model, or a pipeline rank's model chunks.
Model = TreeGPTModel | StagedModel
