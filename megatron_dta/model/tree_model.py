"""Megatron-Core's GPTModel for trees: positions from the context, hidden states out, logprobs of edges on top.

Two hooks of the stock model are overridden and nothing is patched. ``_preprocess``: Megatron's rotary embedding ignores
``position_ids`` and numbers tokens from 0, which for a segment is wrong; here the table is indexed by the context's
positions. ``_postprocess``: the stock model would return the logits of every row; here the last stage returns hidden
states, and the logprob head turns the rows that need it into logprobs, a chunk at a time.
"""

from __future__ import annotations

from megatron.core.models.gpt import GPTModel
from torch import Tensor

from dta_kernels.linear_logprobs import RowChunk, linear_logprobs
from megatron_dta.model.attention_context import AttentionContext, check_context


class TreeGPTModel(GPTModel):
    """A GPTModel whose forward takes an ``AttentionContext`` and returns hidden states ``[n, hidden size]``.

    Attributes:
        true_vocab_size: rows of the output weight that are tokens; rows beyond are padding and take no probability.
    """

    true_vocab_size: int

    def forward(self, input_ids: Tensor, context: AttentionContext, **kwargs: object) -> Tensor:
        """Hidden states after the final norm.

        Args:
            input_ids: int64 [1, n], token ids of the pass.
            context: positions and attention of the pass.
        """
        return super().forward(
            input_ids=input_ids,
            position_ids=context.position_ids.unsqueeze(0),
            attention_mask=None,
            packed_seq_params=context,
            **kwargs,
        )

    def _preprocess(self, *args: object, packed_seq_params: object = None, **kwargs: object) -> tuple:
        context = check_context(packed_seq_params)
        # The table always has its full length, so Megatron's cache of it hits for every segment.
        context.max_seqlen_q = context.max_seqlen_kv = self.max_sequence_length
        outputs = list(super()._preprocess(*args, packed_seq_params=context, **kwargs))
        outputs[1] = outputs[1].index_select(0, context.position_ids)
        return tuple(outputs)

    def _postprocess(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        return hidden_states.squeeze(1) if self.post_process else hidden_states

    def output_weight(self) -> Tensor:
        """The output weight [vocabulary, hidden size] without its padding rows."""
        shared = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if shared else self.output_layer.weight
        return weight[: self.true_vocab_size]

    def edge_logprobs(
        self, hidden: Tensor, edge_row: Tensor, target: Tensor, chunks: list[RowChunk], temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Logprob of every edge and entropy of every row of ``hidden``; see ``linear_logprobs``."""
        return linear_logprobs(hidden, self.output_weight(), edge_row, target, chunks, temperature)
