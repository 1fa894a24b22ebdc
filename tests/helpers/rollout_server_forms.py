"""What vLLM's and SGLang's servers take: the fields of their requests; and the numbers of a table they sample from."""

from collections.abc import Iterable
from typing import Any

import numpy as np

NUMBER = (int, float)
VLLM_COMPLETION: dict[str, Any] = {
    "model": str, "prompt": list, "echo": bool, "frequency_penalty": NUMBER, "logit_bias": dict, "logprobs": int,
    "max_tokens": int, "n": int, "presence_penalty": NUMBER, "seed": int, "stop": list, "stream": bool,
    "temperature": NUMBER, "top_p": NUMBER, "top_k": int, "min_p": NUMBER, "repetition_penalty": NUMBER,
    "stop_token_ids": list, "ignore_eos": bool, "min_tokens": int, "skip_special_tokens": bool,
    "allowed_token_ids": list, "add_special_tokens": bool, "request_id": str, "return_tokens_as_token_ids": bool,
    "return_token_ids": bool, "return_weight_versions": bool, "cache_salt": str, "priority": int,
}  # fmt: skip
SGLANG_GENERATE: dict[str, Any] = {
    "rid": str, "input_ids": list, "sampling_params": dict, "return_logprob": bool, "logprob_start_len": int,
    "top_logprobs_num": int, "token_ids_logprob": list, "return_text_in_logprobs": bool, "stream": bool,
    "return_routed_experts": bool,
}  # fmt: skip
SGLANG_SAMPLING: dict[str, Any] = {
    "max_new_tokens": int, "stop": list, "stop_token_ids": list, "temperature": NUMBER, "top_p": NUMBER,
    "top_k": int, "min_p": NUMBER, "frequency_penalty": NUMBER, "presence_penalty": NUMBER,
    "repetition_penalty": NUMBER, "min_new_tokens": int, "n": int, "ignore_eos": bool, "skip_special_tokens": bool,
    "sampling_seed": int, "no_stop_trim": bool,
}  # fmt: skip
SGLANG_FROM_DISK: dict[str, Any] = {
    "model_path": str, "load_format": str, "abort_all_requests": bool, "weight_version": str, "is_async": bool,
    "torch_empty_cache": bool, "keep_pause": bool, "recapture_cuda_graph": bool, "token_step": int,
    "flush_cache": bool, "manifest": dict,
}  # fmt: skip

VLLM_TRANSFER: dict[str, dict[str, Any]] = {
    "/init_weight_transfer_engine": {"init_info": dict}, "/start_weight_update": {},
    "/update_weights": {"update_info": dict}, "/finish_weight_update": {}, "/shutdown_weight_transfer_engine": {},
}  # fmt: skip
VLLM_INIT: dict[str, Any] = {
    "master_address": str, "master_port": int, "rank_offset": int, "world_size": int, "nccl_unique_id_b64": str,
    "packed": bool, "packed_buffer_size_bytes": int, "packed_num_buffers": int,
}  # fmt: skip
# Fields, and those that must be given.
SGLANG_TRANSFER: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "/init_weights_update_group": (
        {
            "master_address": str, "master_port": int, "rank_offset": int, "world_size": int, "group_name": str,
            "backend": str,
        },
        ("master_address", "master_port", "rank_offset", "world_size"),
    ),
    "/destroy_weights_update_group": ({"group_name": str}, ()),
    "/begin_weight_update": ({"selector": str}, ()),
    "/update_weights_from_distributed": (
        {
            "names": "list", "dtypes": "list", "shapes": "list", "group_name": str, "flush_cache": bool,
            "abort_all_requests": bool, "weight_version": str, "load_format": str, "selector": str,
            "torch_empty_cache": bool,
        },
        ("names", "dtypes", "shapes"),
    ),
    "/end_weight_update": ({}, ()),
    "/update_weight_version": ({"new_version": str, "abort_all_requests": bool}, ("new_version",)),
}  # fmt: skip


class BadRequestError(Exception):
    """What pydantic would refuse."""


def check(body: Any, schema: dict[str, Any], required: Iterable[str] = ()) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise BadRequestError("Input should be a valid dictionary")
    for name in required:
        if name not in body:
            raise BadRequestError(f"{name}: Field required")
    for name, value in body.items():
        if name not in schema:
            raise BadRequestError(f"{name}: Extra inputs are not permitted")
        if schema[name] == "list":
            continue
        if not isinstance(value, schema[name]) or (isinstance(value, bool) and schema[name] is not bool):
            raise BadRequestError(f"{name}: Input should be a valid {schema[name]}, got {value!r}")
        if schema[name] is list and not all(isinstance(item, int) for item in value):
            raise BadRequestError(f"{name}: Input should be a list of integers")
    return body


def check_mode(options: Any, modes: tuple[str, ...]) -> None:
    if options.get("mode", "abort") not in modes:
        raise BadRequestError(f"mode: Input should be one of {modes}")


def log_softmax(row: np.ndarray) -> np.ndarray:
    row = row - row.max()
    return row - np.log(np.exp(row).sum())


def nucleus_logprobs(row: np.ndarray, top_p: float) -> np.ndarray:
    """Renormalized over the nucleus; -inf outside of it."""
    order = np.argsort(-row, kind="stable")
    before = np.cumsum(np.exp(row[order])) - np.exp(row[order])
    keep = order[(before < top_p) | (np.arange(len(order)) == 0)] if top_p < 1 else order
    kept = np.full(len(row), -np.inf)
    kept[keep] = row[keep]
    return kept - np.log(np.exp(kept).sum())


def shared(left: list[int], right: tuple[int, ...]) -> int:
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return length
