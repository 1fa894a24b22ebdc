"""Megatron-Core's GPTModel for trees: positions from the context, hidden states as output, logprobs of edges on top.

Two methods of the stock model are overridden, and nothing is patched. ``_preprocess``: Megatron's rotary embedding
ignores ``position_ids`` and numbers tokens from 0, which is wrong for a segment; here the context's positions index the
table. ``_postprocess``: the stock model would return the logits of every row; here the last stage returns hidden
states, and the logprob head turns the needed rows into logprobs, one logit chunk at a time.

Under tensor parallelism every rank returns all hidden states. The logprob head of a rank holds a part of the
vocabulary, so the gradients of the ranks are parts of a sum, which Megatron's mappings here compute. Under sequence
parallelism, a pass is padded to a multiple of the number of ranks; the core attention leaves out the padding. The
same holds under context parallelism, where a rank computes its share of the tokens (``context_group``). A pass over no
tokens is padded, too, because Megatron's layers need one token.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor

from dta_kernels.logprobs.linear import RowChunk, VocabularyShard, linear_logprobs
from dta_kernels.logprobs.logit_chunks import Head
from dta_kernels.logprobs.reverse_kl import ReverseKLSettings, TeacherRows, linear_reverse_kl
from megatron_dta.core.model.attention.context import AttentionContext, check_context
from megatron_dta.core.model.main_grad import main_grad_of, output_rows
from megatron_dta.core.model.parallel.tensor_sum import tensor_sum
from megatron_dta.core.model.rotary import rotary_tables

if TYPE_CHECKING:
    from megatron_dta.core.model.decode.paged_context import PagedContext
    from megatron_dta.core.model.hybrid.path_states import RecurrentShape


class TreeGPTModel(GPTModel):
    """A GPTModel, or a model chunk of one, whose forward takes an ``AttentionContext``.

    Attributes:
        true_vocab_size: rows of the output weight that are tokens; rows beyond are padding and get no probability.
        stage_layers: layers of each virtual pipeline stage, in stage order.
        has_fused_layers: whether its layers are those of ``fused_layer``.
        adds_to_main_grad: whether gradients are added to the weights' gradient buffers, see ``main_grad``.
        fp32_lm_head: whether logits are float32 in a 16-bit model.
    """

    true_vocab_size: int
    stage_layers: tuple[int, ...]
    has_fused_layers: bool = False
    adds_to_main_grad: bool = False
    fp32_lm_head: bool = False

    @property
    def model_chunks(self) -> list[TreeGPTModel]:
        """A list of this one model chunk; ``StagedModel.model_chunks`` lists several."""
        return [self]

    @cached_property
    def attention_rows(self) -> dict[int, int]:
        """Index of each layer with attention among them, by its number: its place in a pool of keys and values."""
        mixing = [layer for layer in self.decoder.layers if not isinstance(layer.self_attention, IdentityOp)]
        numbers = [layer.layer_number for layer in mixing if not hasattr(layer.self_attention, "recurrent_shape")]
        return {number: row for row, number in enumerate(numbers)}

    @cached_property
    def recurrent_layers(self) -> dict[int, RecurrentShape]:
        """Shape of what each layer with a recurrence keeps at a fork, by its number."""
        attentions = {layer.layer_number: layer.self_attention for layer in self.decoder.layers}
        return {n: layer.recurrent_shape for n, layer in attentions.items() if hasattr(layer, "recurrent_shape")}

    @property
    def attention_layers(self) -> list[int]:
        """1-based numbers of this model chunk's layers with attention, which alone keep keys and values."""
        return list(self.attention_rows)

    @property
    def layer_numbers(self) -> list[int]:
        """1-based numbers in the whole model of this model chunk's layers."""
        return [layer.layer_number for layer in self.decoder.layers]

    def stage_shape(self, num_tokens: int, context_size: int = 1) -> tuple[int, int, int]:
        """Shape of the hidden states that stages exchange in a pass over ``num_tokens`` tokens.

        Args:
            context_size: ranks that divide the tokens of the pass.
        """
        return self.rows_of_share(num_tokens, context_size) // self._row_ranks, 1, self.config.hidden_size

    def rows_of_share(self, num_tokens: int, context_size: int) -> int:
        """Rows, padding included, of each of ``context_size`` shares of a pass over ``num_tokens`` tokens."""
        return max(1, -(-num_tokens // (context_size * self._row_unit))) * self._row_unit

    @property
    def _row_ranks(self) -> int:
        """Number of ranks among which the rows of a pass are divided."""
        return self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1

    @property
    def _row_unit(self) -> int:
        """A pass is padded to a multiple of this: an equal share for each rank, and the unit of FP8 products."""
        if not self.config.fp8:
            return self._row_ranks
        from megatron_dta.core.config.checks.transformer_engine import FP8_UNITS

        return self._row_ranks * FP8_UNITS[self.config.fp8_recipe]

    @property
    def decodes_directly(self) -> bool:
        """Whether ``decode_layer`` can run all layers of this model chunk in passes over pages, without modules."""
        return (
            self.has_fused_layers
            and not self.config.fp8
            and len(self.decoder.layers) > 0
            and all(getattr(layer, "decodes_directly", False) for layer in self.decoder.layers)
        )

    @property
    def counts_on_host(self) -> bool:
        """Whether the host has to know how many tokens each expert gets."""
        experts = [getattr(layer.mlp, "experts", None) for layer in self.decoder.layers]
        return any(module is not None and getattr(module, "counts_on_host", True) for module in experts)

    def forward(self, input_ids: Tensor, context: AttentionContext, **kwargs: object) -> Tensor:
        """Hidden states [n, hidden size] after the final norm; in a context group, those of the rank's share.

        A stage before the last returns the input of the next one, [n, 1, hidden size] (divided among the ranks under
        sequence parallelism). A stage after the first reads the tensor of ``set_input_tensor`` instead of token ids.

        Args:
            input_ids: int64 [1, n], token ids of the pass.
            context: positions and attention of the pass.
        """
        if context.reads_pages:
            is_direct = self.decodes_directly and not torch.is_grad_enabled()
            context.direct_until, context.carried = self.layer_numbers[-1] if is_direct else None, None
            if is_direct:
                return self._decode(input_ids, context)
        tokens = self._own_share(input_ids, context), self._own_share(context.position_ids, context).unsqueeze(0)
        if self._has_direct_layers:
            x = self._preprocess(*tokens, packed_seq_params=context)[0]
            x = self._run_layers(self.decoder.input_tensor if x is None else x, context)
            return self._postprocess(x, packed_seq_params=context)
        return super().forward(*tokens, attention_mask=None, packed_seq_params=context, **kwargs)

    def _preprocess(self, *args: object, packed_seq_params: object = None, **kwargs: object) -> tuple:
        context = check_context(packed_seq_params)
        # The table always has its full length, so Megatron's cache of it hits for every segment.
        context.max_seqlen_q = context.max_seqlen_kv = self.max_sequence_length
        outputs = list(super()._preprocess(*args, packed_seq_params=context, **kwargs))
        if torch.is_grad_enabled() and outputs[0] is not None and not outputs[0].requires_grad:
            # For frozen weights: recomputation computes gradients only if its input requires a gradient.
            outputs[0].requires_grad_()
        is_direct = context.reads_pages and context.direct_until is not None
        positions = context.position_ids if is_direct else self._own_share(context.position_ids, context)
        outputs[1] = outputs[1].index_select(0, positions)
        if self.has_fused_layers:
            context.rotary_tables = rotary_tables(outputs[1], self.config)
        return tuple(outputs)

    def _decode(self, input_ids: Tensor, context: PagedContext) -> Tensor:
        """``forward`` by ``decode_layer``: every rank of a tensor group has all rows, except between stages."""
        x = self._embedded(input_ids, context.position_ids) if self.pre_process else self._all_rows(input_ids)
        self._preprocess(input_ids, context.position_ids, decoder_input=x, packed_seq_params=context)
        x = self._run_layers(x, context)
        return x.squeeze(1) if self.post_process else self._own_rows(x)

    @property
    def _has_direct_layers(self) -> bool:
        """Whether every layer has a ``FusedAutogradLayer``, and none is recomputed by Megatron's block."""
        direct = [getattr(layer, "direct", None) for layer in self.decoder.layers]
        return None not in direct and len(direct) > 0 and self.config.recompute_granularity is None

    def _run_layers(self, x: Tensor, context: AttentionContext) -> Tensor:
        """The layers and the final norm; without Megatron's block, which takes the host a sixth of a layer's time."""
        for layer in self.decoder.layers:
            if not context.reads_pages and layer.direct.takes(x, context):
                x = layer.direct(x, context)
            else:
                x, _ = layer(hidden_states=x, attention_mask=None, packed_seq_params=context)
        return x if self.decoder.final_layernorm is None else self.decoder.final_layernorm(x)

    def _all_rows(self, input_ids: Tensor) -> Tensor:
        """The input of a stage after the first, [n, 1, hidden size]."""
        x = self.decoder.input_tensor
        if self.config.sequence_parallel:
            x = tensor_parallel.gather_from_sequence_parallel_region(x)
        return x[: input_ids.shape[1]]

    def _own_rows(self, x: Tensor) -> Tensor:
        """The output of a stage before the last, in the shape ``stage_shape``."""
        if not self.config.sequence_parallel:
            return x
        missing = self._row_ranks * self.stage_shape(len(x))[0] - len(x)
        return tensor_parallel.scatter_to_sequence_parallel_region(F.pad(x, (0, 0, 0, 0, 0, missing)))

    def _embedded(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Input [n, 1, hidden size] of the first layer, complete on every rank."""
        if self.config.tensor_model_parallel_size == 1:
            return self.embedding(input_ids=input_ids, position_ids=position_ids.unsqueeze(0))
        weight = self.embedding.word_embeddings.weight
        row = input_ids[0] - self._first_token(weight)
        is_elsewhere = (row < 0) | (row >= len(weight))
        rows = F.embedding(row.masked_fill(is_elsewhere, 0), weight)
        return tensor_sum()(rows.masked_fill_(is_elsewhere.unsqueeze(1), 0)).unsqueeze(1)

    def _postprocess(
        self, hidden_states: Tensor, *args: object, packed_seq_params: object = None, **kwargs: object
    ) -> Tensor:
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            hidden_states = tensor_parallel.gather_from_sequence_parallel_region(hidden_states)
        elif self.config.tensor_model_parallel_size > 1:
            hidden_states = tensor_parallel.copy_to_tensor_model_parallel_region(hidden_states)
        context = check_context(packed_seq_params)
        group, num_tokens = context.context_group, context.position_ids.shape[0]
        begin = 0 if group is None else group.rank * self.rows_of_share(num_tokens, group.size)
        return hidden_states.squeeze(1)[: max(0, num_tokens - begin)]

    def _own_share(self, tokens: Tensor, context: AttentionContext) -> Tensor:
        """The rank's share of ``tokens`` [..., n], which are padded with zeros to ``rows_of_share`` for each rank."""
        group = context.context_group
        ranks = 1 if group is None else group.size
        missing = ranks * self.rows_of_share(tokens.shape[-1], ranks) - tokens.shape[-1]
        filled_up = F.pad(tokens, (0, missing)) if missing else tokens
        return filled_up if group is None else group.own_rows(filled_up)

    def output_weight(self) -> Tensor:
        """The rank's rows of the output weight [its part of the vocabulary, hidden size], without padding rows."""
        weight = self._padded_output_weight()
        return weight[: self._true_rows(weight)]

    def _true_rows(self, weight: Tensor) -> int:
        """Number of rows of the rank's part of the output weight that are tokens."""
        return max(0, min(len(weight), self.true_vocab_size - self._first_token(weight)))

    def _padded_output_weight(self) -> Tensor:
        shared = self.share_embeddings_and_output_weights
        return self.shared_embedding_or_output_weight() if shared else self.output_layer.weight

    @staticmethod
    def _first_token(weight: Tensor) -> int:
        """Token id of the first row of the rank's part of the output weight."""
        return parallel_state.get_tensor_model_parallel_rank() * weight.shape[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocabulary] of ``hidden`` [n, hidden size], complete on every rank; for sampling only.

        Every rank of a tensor group gets the same bits.
        """
        if self.config.tensor_model_parallel_size == 1:
            return Head(self.output_weight(), self.fp32_lm_head).logits(hidden)
        logits = Head(self._padded_output_weight(), self.fp32_lm_head).logits(hidden)
        return tensor_parallel.gather_from_tensor_model_parallel_region(logits)[:, : self.true_vocab_size]

    @property
    def vocabulary_shard(self) -> VocabularyShard | None:
        """This rank's share of the vocabulary; None if it has all of it."""
        if self.config.tensor_model_parallel_size == 1:
            return None
        first_token = self._first_token(self._padded_output_weight())
        return VocabularyShard(first_token, parallel_state.get_tensor_model_parallel_group())

    def own_logits(self, hidden: Tensor) -> tuple[Tensor, int]:
        """Logits [n, this rank's part of the vocabulary with padding], and how many of its columns are tokens."""
        weight = self._padded_output_weight()
        return Head(weight, self.fp32_lm_head).logits(hidden), self._true_rows(weight)

    def head(self) -> Head:
        """This rank's rows of the output weight, for distributions that need no gradient."""
        return Head(self.output_weight().detach(), self.fp32_lm_head)

    def token_logprobs(self, hidden: Tensor, token: Tensor, temperature: float) -> Tensor:
        """Logprob of one ``token`` (int64 [n]) after each row of ``hidden``, by ``edge_logprobs``."""
        n = len(hidden)
        row = torch.arange(n, device=hidden.device)
        return self.edge_logprobs(hidden, row, token, [RowChunk(0, n, 0, n)], temperature)[0]

    def row_reverse_kl(self, hidden: Tensor, teacher: TeacherRows, rows_per_chunk: int, temperature: float) -> Tensor:
        """KL(this model || teacher) over the vocabulary at every row of ``hidden``; see ``linear_reverse_kl``.

        Call ``edge_logprobs`` for the same pass, too: it informs autograd that the output weight has a gradient.
        """
        padded = self._padded_output_weight()
        buffer = main_grad_of(padded) if self.adds_to_main_grad else None
        weight = self.output_weight()
        if buffer is not None:
            weight, buffer = weight.detach(), buffer[: weight.shape[0]]
        settings = ReverseKLSettings(rows_per_chunk, temperature, self.vocabulary_shard, buffer, self.fp32_lm_head)
        return linear_reverse_kl(hidden, weight, teacher, settings)

    def edge_logprobs(
        self, hidden: Tensor, edge_row: Tensor, target: Tensor, chunks: list[RowChunk], temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Logprob of every edge and entropy of every row of ``hidden``; see ``linear_logprobs``."""
        padded = self._padded_output_weight()
        buffer = main_grad_of(padded) if self.adds_to_main_grad else None
        if buffer is None:
            weight = self.output_weight()
        else:
            is_embedding = self.share_embeddings_and_output_weights and self.pre_process
            weight = output_rows(padded, self._true_rows(padded), is_embedding)
            buffer = buffer[: weight.shape[0]]
        of_weight = dict(weight_grad_VC=buffer, shard=self.vocabulary_shard, in_float32=self.fp32_lm_head)
        return linear_logprobs(hidden, weight, edge_row, target, chunks, temperature, **of_weight)
