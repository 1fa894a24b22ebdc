"""Cases and helpers that tests of moe checkpoint share."""

from __future__ import annotations

from dataclasses import replace

import torch

from checkpoint_worker import MODEL

EXPERTS = replace(
    MODEL,
    num_experts=4,
    moe_ffn_hidden_size=20,
    moe_shared_expert_intermediate_size=16,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
)


HALF = replace(EXPERTS, bf16=True, params_dtype=torch.bfloat16)
