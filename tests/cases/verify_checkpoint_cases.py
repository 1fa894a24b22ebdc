"""Runs ``tools/verify_checkpoint.py`` in the test's process, and plants faults in models of transformers."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tool_runs import load_script


def verify(monkeypatch, capsys, hf: Path, megatron: Path, *flags: str) -> tuple[int, dict[str, Any], str]:
    command = ["verify", "--hf-checkpoint", str(hf), "--load", str(megatron), "--json", *flags]
    monkeypatch.setattr(sys, "argv", command)
    capsys.readouterr()
    status = load_script("tools/verify_checkpoint.py").main()
    out = capsys.readouterr().out
    return status, json.loads(out.strip().splitlines()[-1]), out


def swap_heads(model: torch.nn.Module) -> None:
    attention = model.model.layers[1].self_attn
    heads = attention.q_proj.weight.data.unflatten(0, (-1, attention.head_dim))
    heads[[0, 1]] = heads[[1, 0]]


def transpose(model: torch.nn.Module) -> None:
    weight = model.model.layers[0].self_attn.o_proj.weight.data
    size = min(weight.shape)
    weight[:size, :size] = weight[:size, :size].t().clone()


def change_row(model: torch.nn.Module) -> None:
    model.model.embed_tokens.weight.data[5] *= 1.001


def round_tensor(model: torch.nn.Module) -> None:
    """To three digits in binary less than bfloat16 has."""
    weight = model.model.layers[1].mlp.down_proj.weight.data
    scale = 2.0 ** (torch.floor(torch.log2(weight.abs().clamp(min=1e-30))) - 4)
    weight.copy_(torch.round(weight / scale) * scale)


def change_epsilon(model: torch.nn.Module) -> None:
    model.model.layers[1].post_attention_layernorm.variance_epsilon = 1e-6


# The changed tensor by fault; None: a setting.
FAULTS = {
    transpose: "model.layers.0.self_attn.o_proj.weight",
    swap_heads: "model.layers.1.self_attn.q_proj.weight",
    change_row: "model.embed_tokens.weight",
    round_tensor: "model.layers.1.mlp.down_proj.weight",
    change_epsilon: None,
}
