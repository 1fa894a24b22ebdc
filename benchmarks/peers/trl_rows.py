"""TRL's two row formats on transformers' layers: tree rows by TRL's own file, and padding-free rows without sharing.

``packing.py`` (``TreeRow`` and the tree attention) and ``chunked_logprob.py`` (the head in tiles) are imported
unmodified from an installed or unpacked TRL 1.16, without its package: that would need its trainers' dependencies. The
order of calls is that of ``AsyncGRPOTrainer.compute_loss``. The kernel is set from here, because the one that TRL
downloads is on no package registry.
"""

from __future__ import annotations

import importlib.util
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor

from megatron_dta.core.common.errors import InputError
from peers.attention import Varlen
from peers.workload import Sequence, num_trained

# Columns of the vocabulary in a tile of the head, as in TRL.
VOCABULARY_TILE = 32768
FLAT_ATTENTION = "flat_varlen"
Row = dict[str, Tensor]


def trl_folder() -> Path | None:
    """The folder of TRL's package; None without it."""
    spec = importlib.util.find_spec("trl")
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def _load(name: str, path: str) -> ModuleType:
    folder = trl_folder()
    if folder is None:
        raise InputError("TRL is not installed: pip install --no-deps 'trl==1.16.*'")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, folder / path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def load_packing(varlen: Varlen) -> ModuleType:
    """TRL's ``packing.py`` with its attention registered in transformers, calling ``varlen``."""
    packing = _load("trl_files.packing", "experimental/async_grpo/packing.py")
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen)
    packing.register_tree_attention()
    return packing


def load_head() -> Any:
    """TRL's ``ChunkedLogProbFunction``."""
    # Its backward asks the trainers' utilities for a context that gathers weights under DeepSpeed.
    utilities = ModuleType("trl_files.trainer.utils")
    utilities.maybe_gather_lm_head_ctx = lambda *weights: nullcontext()
    sys.modules.setdefault(utilities.__name__, utilities)
    return _load("trl_files.kernels.chunked_logprob", "kernels/chunked_logprob.py").ChunkedLogProbFunction


class TrlStep:
    """Forward and backward of a policy-gradient step by rows of a token budget.

    Args:
        is_tree: rows are TRL's tree rows; otherwise sequences one after the other.
    """

    def __init__(self, folder: Path, is_tree: bool, varlen: Varlen, dtype: torch.dtype, device: torch.device) -> None:
        self.is_tree, self.device = is_tree, device
        self.packing, self.head = load_packing(varlen), load_head()
        _register_flat_attention(varlen)
        implementation = self.packing.TREE_ATTENTION if is_tree else FLAT_ATTENTION
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=implementation
        )
        self.model.to(device).train()

    def checkpoint_layers(self, is_on: bool) -> None:
        """Whether the backward recomputes every layer from its input."""
        if is_on:
            self.model.gradient_checkpointing_enable()
        else:
            self.model.gradient_checkpointing_disable()

    def rows(self, sequences: list[Sequence], budget: int) -> list[Row]:
        """Rows in the order of the sequences, closed like those of ``TokenBudgetBatcher`` with one process."""
        longest = max(len(row.token_ids) for row in sequences)
        if longest > budget:
            raise InputError(f"a row of {budget} tokens cannot hold a sequence of {longest}")
        rows = [self._new_row()]
        for sequence in sequences:
            sample = {
                "input_ids": torch.as_tensor(sequence.token_ids),
                "completion_mask": torch.as_tensor(sequence.mask).long(),
                "old_log_probs": torch.zeros(len(sequence.mask)),
                "advantage": sequence.advantage,
                "group_id": sequence.group,
            }
            if not rows[-1].fits(sample, budget):
                rows.append(self._new_row())
            rows[-1].add(sample)
        return [{name: values.to(self.device) for name, values in row.pack().items()} for row in rows]

    def _new_row(self) -> Any:
        return self.packing.TreeRow() if self.is_tree else FlatRow()

    def step(self, rows: list[Row], sequences: list[Sequence]) -> float:
        """Add the gradient of the mean loss over trained tokens; returns the loss."""
        total, losses = num_trained(sequences), []
        for row in rows:
            loss = -(row["advantages"] * self._logprobs(row)).sum() / total
            loss.backward()
            losses.append(loss.detach())
        return float(torch.stack(losses).sum())

    def _logprobs(self, row: Row) -> Tensor:
        arguments = {name: values for name, values in row.items() if name.startswith(("tree_", "flat_"))}
        longest = arguments.pop("tree_max_seqlens", None)
        if longest is not None:
            arguments["tree_max_seqlen_q"], arguments["tree_max_seqlen_k"] = longest.tolist()
        tokens, positions, labels = (row[name] for name in ("input_ids", "position_ids", "shift_labels"))
        outputs = self.model.model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, **arguments)
        hidden, is_trained = outputs.last_hidden_state[0], labels != -100
        logprobs = self.head.apply(
            hidden[is_trained], self.model.lm_head.weight, None, labels[is_trained], 1.0, VOCABULARY_TILE,
            None, 1.0, ("log_probs", "entropy"),
        )[0]  # fmt: skip
        return logprobs.new_zeros(labels.shape).masked_scatter(is_trained, logprobs)[row["token_index"]]


class FlatRow:
    """Sequences one after the other, with the interface of ``TreeRow``."""

    def __init__(self) -> None:
        self.samples: list[dict[str, Any]] = []
        self.num_tokens = 0

    def fits(self, sample: dict[str, Any], budget: int) -> bool:
        """Whether the row stays within ``budget`` tokens."""
        return self.num_tokens + len(sample["input_ids"]) <= budget

    def add(self, sample: dict[str, Any]) -> None:
        """Append a sequence."""
        self.samples.append(sample)
        self.num_tokens += len(sample["input_ids"])

    def pack(self) -> Row:
        """The tensors that the step reads."""
        labels, advantages, bounds = [], [], [0]
        for sample in self.samples:
            ids, mask = sample["input_ids"], sample["completion_mask"].bool()
            following = torch.where(mask[1:], ids[1:], -100)
            labels.append(torch.cat([following, following.new_tensor([-100])]))
            advantages.append(torch.full((int(mask[1:].sum()),), sample["advantage"]))
            bounds.append(bounds[-1] + len(ids))
        shift_labels = torch.cat(labels)
        return {
            "input_ids": torch.cat([sample["input_ids"] for sample in self.samples]),
            "position_ids": torch.cat([torch.arange(len(sample["input_ids"])) for sample in self.samples]),
            "shift_labels": shift_labels,
            "token_index": torch.nonzero(shift_labels != -100).flatten(),
            "advantages": torch.cat(advantages),
            "flat_bounds": torch.tensor(bounds, dtype=torch.int32),
        }


def _register_flat_attention(varlen: Varlen) -> None:
    def attention(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **settings: Any
    ) -> tuple[Tensor, None]:
        bounds = settings["flat_bounds"]
        # The longest length sets the kernel's grid only; all tokens are an upper bound without a copy to the host.
        longest = query.shape[2]
        tensors = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
        scale = settings.get("scaling")
        return varlen(*tensors, bounds, bounds, longest, longest, softmax_scale=scale, causal=True)[None], None

    transformers.AttentionInterface.register(FLAT_ATTENTION, attention)
    transformers.masking_utils.AttentionMaskInterface.register(FLAT_ATTENTION, lambda **settings: None)
