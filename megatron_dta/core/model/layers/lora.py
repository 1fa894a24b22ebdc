"""LoRA adapters (arXiv 2106.09685) for Megatron's linear layers, whose own weights are frozen.

The adapter of a linear layer ``y = W x`` adds ``alpha / rank * B A x``. A [rank, inputs] is drawn at random and B
[outputs, rank] is zero at first, so the model of the first step equals the base model bit for bit. An adapter is a
child of the module that owns the linear layer (``linear_qkv_adapter`` beside ``linear_qkv``) and adds to the layer's
output in a forward hook. The linear layer keeps its class, its name and its place in checkpoints. Code that reads its
weight instead of calling it, as decoding of latent attention does, adds the adapter itself.

Tensor parallelism divides B's rows of a column-parallel layer and A's columns of a row-parallel layer, as it divides
the linear layer. The ranks exchange A x, which is ``rank`` numbers a token. The undivided matrix is the same on every
rank. Under sequence parallelism its gradient on a rank is that of the rank's tokens, and Megatron sums these gradients
(the mark ``sequence_parallel``). With ``disable_grad_reduce`` a linear layer does not sum the gradient of x over the
ranks, so its adapter does not sum that of A x either, but that of A. Megatron-Core itself has no LoRA.

Legend: R rank, I inputs, O outputs; for divided matrices, I and O are those of this rank.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_dta.core.config import ModelConfig

try:
    from megatron.core.ssm.utils import _split_tensor_factory
except ImportError:  # before Megatron-Core 0.19
    from megatron.core.ssm.gated_delta_net import _split_tensor_factory

SUFFIX = "_adapter"


def split_by_sections(shard: Any, sections: dict[str, int]) -> Any:
    """A parameter's shard for checkpoints that store its ``sections``, each with its number of rows, separately."""
    return _split_tensor_factory(shard, list(sections.values()), list(sections), 0)


class LoraAdapter(torch.nn.Module):
    """The adapter of one linear layer.

    Args:
        linear: the linear layer to adapt, Megatron's or Transformer Engine's.
        is_gated: whether the outputs are two stacked matrices (gate and up projection).
        seed: random seed of A.

    Attributes:
        lora_A, lora_B: the trained matrices [R, I] and [O, R].
        scale: factor of their product.
        enabled: False leaves the linear layer's output unchanged.
        sections: names and numbers of this rank's rows of the parts that checkpoints store separately; empty for one
            part.
    """

    def __init__(self, linear: torch.nn.Module, rank: int, alpha: float, is_gated: bool, seed: int) -> None:
        super().__init__()
        self.scale, self.enabled = alpha / rank, True
        self.sections: dict[str, int] = {}
        is_expert = getattr(linear, "is_expert", False)
        self._is_column, self._is_gated = bool(_is_column_parallel(linear)), is_gated
        self._group, size, tensor_rank = linear.tp_group, linear.tp_group.size(), linear.tp_group.rank()
        if is_expert and size > 1:
            raise ValueError("an expert that several ranks share cannot be adapted")
        # Experts receive their tokens from the dispatcher, not from the sequence-parallel ranks.
        self._is_divided = size > 1
        self._sequence_parallel = linear.sequence_parallel and self._is_divided
        self._sums_a = self._is_divided and getattr(linear, "disable_grad_reduce", False)
        outputs, inputs = linear.weight.shape
        unsharded = _uniform(rank, inputs if self._is_column else inputs * size, seed)
        first = unsharded if self._is_column else unsharded[:, tensor_rank * inputs : (tensor_rank + 1) * inputs]
        weight = linear.weight
        self.lora_A = torch.nn.Parameter(first.to(device=weight.device, dtype=weight.dtype, copy=True).contiguous())
        self.lora_B = torch.nn.Parameter(torch.zeros(outputs, rank, device=weight.device, dtype=weight.dtype))
        divided, same = (self.lora_B, self.lora_A) if self._is_column else (self.lora_A, self.lora_B)
        same.sequence_parallel = self._sequence_parallel
        for matrix in (divided, same):
            # Megatron assumes that parameters without the mark "parallel" are equal on all tensor ranks and counts them
            # once in the gradient norm. Undivided experts may differ between the ranks.
            is_parallel = is_expert or (self._is_divided and matrix is divided)
            tensor_parallel.set_tensor_model_parallel_attributes(matrix, is_parallel, 0 if self._is_column else 1, 1)
            # Megatron reduces the gradients of experts over the ranks that hold the same experts.
            matrix.allreduce = getattr(weight, "allreduce", True)

    def forward(self, inputs: Tensor) -> Tensor:
        """The addition to the linear layer's output for ``inputs`` [..., I], in the layout of that output."""
        if self._sums_a:
            first = tensor_parallel.copy_to_tensor_model_parallel_region(self.lora_A, group=self._group)
            return F.linear(F.linear(inputs, first) * self.scale, self.lora_B)
        inner = F.linear(inputs, self.lora_A)
        if self._is_divided:
            inner = self._exchange(inner)
        return F.linear(inner * self.scale, self.lora_B)

    def _exchange(self, inner: Tensor) -> Tensor:
        group = self._group
        if self._is_column and self._sequence_parallel:
            return tensor_parallel.gather_from_sequence_parallel_region(inner, group=group)
        if self._is_column:
            return tensor_parallel.copy_to_tensor_model_parallel_region(inner, group=group)
        if self._sequence_parallel:
            return tensor_parallel.reduce_scatter_to_sequence_parallel_region(inner, group=group)
        return tensor_parallel.reduce_from_tensor_model_parallel_region(inner, group=group)

    def add_to(self, linear: torch.nn.Module, arguments: tuple, output: tuple[Tensor, Tensor | None]) -> tuple | None:
        """Forward hook of the linear layer, which returns its output and a bias that its caller adds."""
        if not self.enabled:
            return None
        return output[0] + self(arguments[0]), output[1]

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """``weight`` [O, I] of the linear layer plus the adapter, in at least float32."""
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return torch.addmm(weight.to(dtype), self.lora_B.to(dtype), self.lora_A.to(dtype), alpha=self.scale)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """This rank's shards for Megatron's distributed checkpoints, which load on any mesh."""
        metadata = metadata or {}
        replicas = metadata.get("dp_cp_group") or parallel_state.get_data_parallel_group(with_context_parallel=True)
        state = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),  # the optimizer finds its parameters by identity
            prefix,
            {"lora_B": 0} if self._is_column else {"lora_A": 1},
            sharded_offsets,
            tp_group=self._group,
            dp_cp_group=replicas,
        )
        if self._is_gated:
            name, single = f"{prefix}lora_B", metadata.get("singleton_local_shards", False)
            state[name] = apply_swiglu_sharded_factory(state[name], sharded_offsets, single)
        if self.sections:
            state[f"{prefix}lora_B"] = split_by_sections(state[f"{prefix}lora_B"], self.sections)
        return state


def _is_column_parallel(linear: torch.nn.Module) -> bool | None:
    """True if the tensor ranks divide a linear layer's outputs, False if its inputs, None for any other module."""
    if isinstance(linear, ColumnParallelLinear | RowParallelLinear):
        return isinstance(linear, ColumnParallelLinear)
    # Transformer Engine's layers say it themselves.
    mode = getattr(linear, "parallel_mode", None)
    return None if mode is None else mode == "column"


def _uniform(rank: int, inputs: int, seed: int) -> Tensor:
    """Initial A, float32 [R, I], from the uniform distribution that PyTorch uses for linear layers and PEFT for A."""
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(rank, inputs).uniform_(-1, 1, generator=generator) / math.sqrt(inputs)


def add_adapters(part: torch.nn.Module, model: ModelConfig, seed: int) -> None:
    """Freeze the weights of ``part``, a model or a model chunk, and add the adapters that ``model`` describes.

    Initial weights depend only on ``seed`` and on the linear layer's name in the whole model, so they are the same on
    every mesh.
    """
    part.requires_grad_(False)
    for layer in part.decoder.layers:
        for path, linear in list(layer.named_modules()):
            owner, _, name = path.rpartition(".")
            if name not in model.lora_target_modules:
                continue
            if _is_column_parallel(linear) is None:
                raise TypeError(f"{path} is a {type(linear).__name__}; adapters do not support this class")
            key = f"{layer.layer_number - 1}.{_name_in_all_experts(path, part.config)}"
            digest = hashlib.sha256(f"{seed} {key}".encode()).digest()
            adapter = LoraAdapter(
                linear,
                model.lora_rank,
                model.lora_alpha,
                is_gated=model.swiglu and name == "linear_fc1",
                seed=int.from_bytes(digest[:7], "little"),
            )
            module = layer.get_submodule(owner)
            if name == "in_proj":
                adapter.sections = dict(zip(module.in_proj_split_names, module.in_proj_split_sections, strict=True))
            module.add_module(name + SUFFIX, adapter)
            linear.register_forward_hook(adapter.add_to)


def _name_in_all_experts(path: str, config: TransformerConfig) -> str:
    """``path`` with the expert's number in the whole model instead of the rank's."""
    before, separator, after = path.partition(".local_experts.")
    if not separator:
        return path
    number, _, rest = after.partition(".")
    local_experts = config.num_moe_experts // config.expert_model_parallel_size
    first = local_experts * parallel_state.get_expert_model_parallel_rank()
    return f"{before}{separator}{int(number) + first}.{rest}"


def adapters_of(model_chunks: Sequence[torch.nn.Module]) -> Iterator[LoraAdapter]:
    """All adapters of a rank's model chunks."""
    return (module for chunk in model_chunks for module in chunk.modules() if isinstance(module, LoraAdapter))


@contextmanager
def without_adapters(model_chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Disable the adapters, so that the model is its base model. For passes without gradients."""
    adapters = list(adapters_of(model_chunks))
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True
