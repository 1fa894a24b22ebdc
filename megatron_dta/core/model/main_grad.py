"""Adds weight gradients directly to the float32 buffers of Megatron's distributed data parallelism (``main_grad``).

Megatron's own gradient accumulation fusion does this with a CUDA extension of another package, and only for its linear
layers. Here one of PyTorch's matrix products adds to a float32 matrix, and the gradients of the rows of a tied
embedding are added to the same buffer as the output weight's. A weight without a buffer, as in a model that is not
wrapped, uses Megatron's path and gets its gradient from autograd.

Megatron's hooks, which sum gradients over the replicas, must fire once for every weight in a backward pass, after all
contributions to its gradient. Each weight therefore returns exactly one ``gradient_placeholder`` to autograd in a pass.
Without a placeholder, the hooks would run in another thread than the backward pass, in an order that may differ between
ranks; two placeholders would be added. For a tied weight, the placeholder comes from the embedding, which the backward
pass reaches last.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import torch.distributed as distributed
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor
from torch.nn import Parameter

from dta_kernels.invariant.products import is_batch_invariant, product
from dta_kernels.layers.weight_gradients import add_row_gradients, add_weight_gradient, gradient_placeholder


def main_grad_of(weight: Tensor) -> Tensor | None:
    """The buffer for the weight's gradient; None if there is none or the weight is frozen."""
    return getattr(weight, "main_grad", None) if weight.requires_grad else None


def added_to_main_grad(weight: Parameter) -> Tensor:
    """Tell Megatron's hooks that the gradient is in the buffer; returns the placeholder for autograd.

    Raises:
        RuntimeError: the hooks are missing, so the placeholder of an earlier pass still exists and autograd would add
            to it.
    """
    if weight.grad is not None:
        raise RuntimeError(
            "a weight with a gradient buffer has a separate gradient: keep its DistributedDataParallel, whose hooks "
            "clear it after each backward"
        )
    weight.grad_added_to_main_grad = True
    return gradient_placeholder(weight)


class _Linear(torch.autograd.Function):
    """``input @ weight.T + bias`` on a tensor group; Megatron's communication overlaps with the products."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Parameter,
        bias: Tensor | None,
        reduces_input_gradient: bool,
        sequence_parallel: bool,
        group: distributed.ProcessGroup | None,
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.weight, ctx.has_bias = weight, bias is not None
        ctx.reduces_input_gradient, ctx.sequence_parallel, ctx.group = reduces_input_gradient, sequence_parallel, group
        rows = _start_gather(input, group)[0] if sequence_parallel else input
        output = product(rows, weight)
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple:
        input, weight = ctx.saved_tensors
        rows, handle = input, None
        if ctx.sequence_parallel:
            rows, handle = _start_gather(input, ctx.group, wait=False)
        grad_rows = grad_output.reshape(-1, grad_output.shape[-1])
        grad_input = (grad_rows @ weight).view(*grad_output.shape[:-1], weight.shape[1])
        # The sum over the ranks overlaps with the product of the weight gradient.
        if handle is not None:
            handle.wait()
            grad_local = torch.empty_like(input, memory_format=torch.contiguous_format)
            handle = distributed.reduce_scatter_tensor(grad_local, grad_input, group=ctx.group, async_op=True)
        elif ctx.reduces_input_gradient:
            grad_local, handle = grad_input, distributed.all_reduce(grad_input, group=ctx.group, async_op=True)
        else:
            grad_local = grad_input
        rows = rows.reshape(-1, rows.shape[-1])
        if main_grad_of(ctx.weight) is None:
            grad_weight = grad_rows.t() @ rows if ctx.needs_input_grad[1] else None
        else:
            add_weight_gradient(ctx.weight.main_grad, grad_rows, rows)
            grad_weight = added_to_main_grad(ctx.weight)
        grad_bias = grad_rows.sum(0) if ctx.has_bias else None
        if handle is not None:
            handle.wait()
        return grad_local, grad_weight, grad_bias, None, None, None


def _start_gather(
    input: Tensor, group: distributed.ProcessGroup, wait: bool = True
) -> tuple[Tensor, distributed.Work | None]:
    """The rows of all ranks of a tensor group; if a handle is returned, they are ready when the handle is."""
    gathered = input.new_empty(input.shape[0] * group.size(), *input.shape[1:])
    return gathered, distributed.all_gather_into_tensor(gathered, input.contiguous(), group=group, async_op=not wait)


class _IntoMainGrad:
    """Megatron's linear layer with another product for a weight that has a buffer, or where it must be invariant."""

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
        if main_grad_of(weight) is None and not is_batch_invariant():
            return super()._forward_impl(input=input, weight=weight, bias=bias, **options)
        return _Linear.apply(
            input, weight, bias, options["allreduce_dgrad"], options["sequence_parallel"], options["tp_group"]
        )


class MainGradColumnParallelLinear(_IntoMainGrad, ColumnParallelLinear):
    """Megatron's ``ColumnParallelLinear`` whose weight gradient is written directly to its buffer."""


class MainGradRowParallelLinear(_IntoMainGrad, RowParallelLinear):
    """Megatron's ``RowParallelLinear`` whose weight gradient is written directly to its buffer."""


class _Lookup(torch.autograd.Function):
    """``weight[row]`` [..., C], zero where ``is_own`` is False."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, is_own: Tensor | None, weight: Parameter) -> Tensor:
        ctx.save_for_backward(row, is_own)
        ctx.weight = weight
        embedding = torch.nn.functional.embedding(row, weight)
        return embedding if is_own is None else embedding.masked_fill_(~is_own.unsqueeze(-1), 0)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple:
        row, is_own = ctx.saved_tensors
        if is_own is not None:
            grad_output = grad_output.masked_fill(~is_own.unsqueeze(-1), 0)
        add_row_gradients(ctx.weight.main_grad, row.flatten(), grad_output.reshape(-1, grad_output.shape[-1]))
        return None, None, added_to_main_grad(ctx.weight)


class MainGradEmbedding(VocabParallelEmbedding):
    """Megatron's ``VocabParallelEmbedding`` whose row gradients are added directly to the weight's buffer."""

    def forward(self, input_: Tensor) -> Tensor:
        """Embeddings of the token ids ``input_`` [b, n], in Megatron's layout."""
        if main_grad_of(self.weight) is None:
            return super().forward(input_)
        row, is_own = input_, None
        if self.tp_group.size() > 1:
            row = input_ - self.vocab_start_index
            is_own = (row >= 0) & (row < self.num_embeddings_per_partition)
            # Tokens of other ranks add zeros; spread over the rows, because adding all of them to one row is slow.
            row = row.remainder(self.num_embeddings_per_partition)
        embedding = _Lookup.apply(row, is_own, self.weight)
        if self.reduce_scatter_embeddings:
            return reduce_scatter_to_sequence_parallel_region(
                embedding.transpose(0, 1).contiguous(), group=self.tp_group
            )
        return reduce_from_tensor_model_parallel_region(embedding, group=self.tp_group)


class _OutputRows(torch.autograd.Function):
    """The first rows of an output weight whose gradient is added to its buffer without autograd."""

    @staticmethod
    def forward(ctx: Any, weight: Parameter, num_rows: int) -> Tensor:
        ctx.weight = weight
        return weight[:num_rows]

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple:
        return added_to_main_grad(ctx.weight), None


def output_rows(weight: Parameter, num_rows: int, is_embedding: bool) -> Tensor:
    """The first rows of an output weight with a buffer, for an op that adds their gradient to the buffer's rows.

    Args:
        is_embedding: whether the weight is also this model chunk's embedding, which then returns the placeholder.
    """
    return weight.detach()[:num_rows] if is_embedding else _OutputRows.apply(weight, num_rows)


_REPLACEMENTS = {ColumnParallelLinear: MainGradColumnParallelLinear, RowParallelLinear: MainGradRowParallelLinear}


def with_main_grad_layers(spec: Any) -> Any:
    """Replace Megatron's linear layers by ours in ``spec`` (of a layer, a block or any part of one), in place.

    Parts of a spec are ``ModuleSpec`` up to Megatron-Core 0.16 and also ``functools.partial`` later.
    """
    if isinstance(spec, type):
        return _REPLACEMENTS.get(spec, spec)
    if isinstance(spec, functools.partial):
        keywords = {name: with_main_grad_layers(part) for name, part in spec.keywords.items()}
        return functools.partial(spec.func, *map(with_main_grad_layers, spec.args), **keywords)
    if isinstance(spec, list):
        return [with_main_grad_layers(part) for part in spec]
    if isinstance(spec, ModuleSpec):
        spec.module, spec.submodules = with_main_grad_layers(spec.module), with_main_grad_layers(spec.submodules)
    elif dataclasses.is_dataclass(spec):
        for part in dataclasses.fields(spec):
            setattr(spec, part.name, with_main_grad_layers(getattr(spec, part.name)))
    return spec


def use_main_grad(chunk: Any) -> None:
    """Use the buffers for embedding and output weight of a ``TreeGPTModel`` made of such layers, too."""
    chunk.adds_to_main_grad = True
    if chunk.pre_process:
        # Megatron builds its embedding without a spec; only the forward differs.
        chunk.embedding.word_embeddings.__class__ = MainGradEmbedding
    if chunk.share_embeddings_and_output_weights and (chunk.pre_process or chunk.post_process):
        # Otherwise Megatron would add autograd's gradient of a weight with two uses to the buffer.
        chunk.shared_embedding_or_output_weight().zero_out_wgrad = False
