"""SGLang's server: ``python -m sglang.launch_server``, with the forms of version 0.5.23.

Tokens come from ``/generate`` with ``input_ids``, weights through ``/update_weights_from_disk`` or, from a process
group with the trainer, ``/update_weights_from_distributed``.

    python -m sglang.launch_server --model-path MODEL --port 30000

Other settings are given there as usual; ``megatron-dta rollout-server-command`` prints the command for speculative
decoding. Seeds of requests have an effect only with ``--enable-deterministic-inference``.

**Experts.** For ``--moe-routing-replay`` the server is started with ``--enable-return-routed-experts``. A reply then
holds 32-bit integers in base64: of every token but the last, by layer, its experts.

**Logprobs** are those of softmax(logits / temperature) before the nucleus, as in the trainer. With
SGLANG_RETURN_ORIGINAL_LOGPROB=1 in the server's environment they are those of temperature 1. To tell the two apart, the
logprobs of some tokens are compared at temperatures 1 and 2: halving the logits halves their distances.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_dta.common.http.replies import TransientFailureError, as_float, field_of, list_of, shown
from megatron_dta.extras.servers.http_client import Server, ServerError
from megatron_dta.extras.servers.protocol import (
    NEUTRAL_SAMPLING,
    Asked,
    LogprobsError,
    Piece,
    ServerProtocol,
    check_prompt_length,
    make_piece,
    refuse_logprobs,
)
from megatron_dta.extras.servers.routing import integers_of, with_routing
from megatron_dta.sampling.params import SamplingParams

if TYPE_CHECKING:
    from megatron_dta.extras.servers.protocol import Bucket, Meeting

_PROBED_TOKENS = 8
_SIZES = ("tp_size", "pp_size", "dp_size")


class SglangProtocol(ServerProtocol):
    """Requests and replies of SGLang."""

    name = "SGLang"
    generate_path = "/generate"
    # The scheduler answers it. /health and /health_generate send a request, which waits while the server is paused.
    health_path = "/server_info"
    label_path = "/model_info"

    def body(self, token_ids: np.ndarray, max_tokens: int, params: SamplingParams, seed: int) -> dict[str, Any]:
        return {
            "input_ids": token_ids.tolist(),
            "sampling_params": {
                "max_new_tokens": max_tokens,
                "temperature": params.temperature,
                "top_p": params.top_p,
                **NEUTRAL_SAMPLING,
                # ignore_eos would ignore these too; the engine handles the model's own end tokens.
                "stop_token_ids": sorted(params.eos_ids),
                "skip_special_tokens": False,
                "sampling_seed": seed,
            },
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            "stream": False,
            **({} if self.routing is None else {"return_routed_experts": True}),
        }

    def read(self, reply: Any, asked: Asked) -> Piece:
        check_prompt_length(reply, asked, "meta_info", "prompt_tokens")
        name = "meta_info.output_token_logprobs"
        entries = list_of(field_of(reply, "meta_info", "output_token_logprobs"), list, name)
        short = next((index for index, entry in enumerate(entries) if len(entry) < 2), None)
        if short is not None:
            raise TransientFailureError(f"the reply's {name}.{short} must be a logprob and a token id")
        token_ids = list_of(field_of(reply, "output_ids"), int, "output_ids")
        if list_of([entry[1] for entry in entries], int, f"{name}, its token ids") != token_ids:
            raise TransientFailureError(
                f"the reply's {len(token_ids)} output_ids are not those of its {len(entries)} output_token_logprobs"
            )
        spans = field_of(reply, "meta_info", "weight_versions", kind=list, optional=True) or []
        labels = [field_of(reply, "meta_info", "weight_versions", index, "version") for index in range(len(spans))]
        label = field_of(reply, "meta_info", "weight_version", optional=True)
        piece = make_piece(
            token_ids,
            [entry[0] for entry in entries],
            field_of(reply, "meta_info", "finish_reason", "type", kind=str),
            asked,
            ("output_ids", f"{name}, its logprobs"),
            field_of(reply, "meta_info", "cached_tokens", kind=int, optional=True),
            labels or ([] if label is None else [label]),
        )
        if asked.routing is not None:
            text = field_of(reply, "meta_info", "routed_experts", kind=str, optional=True)
            piece = with_routing(piece, integers_of(text, "meta_info.routed_experts"), asked, self.name)
        return piece

    async def check_logprobs(self, server: Server, params: SamplingParams) -> None:
        if params.temperature in (0, 1):
            return
        apart = [await self._distance(server, params, temperature) for temperature in (1.0, 2.0)]
        if apart[0] < 1e-3:
            raise LogprobsError(
                f"{server}: gives all tokens the same logprob, so nothing shows whether they are tempered; load a "
                "trained model, or use --rollout-temperature 1"
            )
        if apart[1] > 0.75 * apart[0]:
            raise refuse_logprobs(server, params, "of temperature 1", "start it without SGLANG_RETURN_ORIGINAL_LOGPROB")

    async def _distance(self, server: Server, params: SamplingParams, temperature: float) -> float:
        """Difference of the largest and the smallest logprob of a few tokens."""
        body = self.body(np.array([params.eos_id]), 1, params, seed=0)
        body["sampling_params"] |= {"temperature": temperature, "top_p": 1.0}
        body["token_ids_logprob"] = list(range(_PROBED_TOKENS))
        reply = await server.ask("POST", self.generate_path, body)
        path = ("meta_info", "output_token_ids_logprobs", 0)
        try:
            entries = field_of(reply, *path, kind=list)
            values = [field_of(reply, *path, index, 0, kind=(int, float)) for index in range(len(entries))]
            logprobs = [as_float(value) for value in values]
            if not logprobs or not all(map(math.isfinite, logprobs)):
                raise TransientFailureError(f"got {shown(values)}")
        except TransientFailureError as error:
            raise LogprobsError(f"{server}: gives no logprobs of named tokens ({error})") from error
        return max(logprobs) - min(logprobs)

    async def update_weights(self, server: Server, folder: Path, label: str, running: bool = False) -> None:
        await self._pause(server, running)
        body = {
            "model_path": str(folder),
            # A server that was started with dummy weights would load dummy weights again.
            "load_format": "auto",
            "flush_cache": True,
            "abort_all_requests": False,
            "weight_version": label,
        }
        await _post(server, "/update_weights_from_disk", body)
        await server.ask("POST", "/flush_cache")
        await server.ask("POST", "/continue_generation", {})

    async def _pause(self, server: Server, running: bool) -> None:
        await server.ask("POST", "/pause_generation", {"mode": "abort" if running else "retract"})

    async def world_size(self, server: Server) -> int:
        sizes = await server.ask(
            "GET",
            "/server_info",
            read=lambda reply: [field_of(reply, name, kind=int, optional=True) or 1 for name in _SIZES],
        )
        if sizes[1:] != [1, 1]:
            raise ServerError(
                f"{server}: receives weights from a process group only with tensor parallelism, not with --pp-size "
                f"{sizes[1]} --dp-size {sizes[2]}; use --rollout-weight-transfer folder"
            )
        return sizes[0]

    async def join_group(self, server: Server, meeting: Meeting, rank_offset: int, bucket_bytes: int) -> None:
        body = {
            "master_address": meeting.address,
            "master_port": meeting.port,
            "rank_offset": rank_offset,
            "world_size": meeting.world_size,
            "group_name": meeting.name,
            "backend": meeting.backend,
        }
        await self._transfer(server, "/init_weights_update_group", body)

    async def leave_group(self, server: Server, meeting: Meeting) -> None:
        await self._transfer(server, "/destroy_weights_update_group", {"group_name": meeting.name})

    async def begin_update(self, server: Server, running: bool) -> None:
        await self._pause(server, running)
        await self._transfer(server, "/begin_weight_update", {})

    async def receive(self, server: Server, buckets: Sequence[Bucket], meeting: Meeting) -> None:
        (bucket,) = buckets
        body = {
            "names": list(bucket.shapes),
            "dtypes": [bucket.dtype_name] * len(bucket.shapes),
            "shapes": [list(shape) for shape in bucket.shapes.values()],
            "group_name": meeting.name,
            "flush_cache": False,
            "load_format": "flattened_bucket",
        }
        await self._transfer(server, "/update_weights_from_distributed", body)

    async def end_update(self, server: Server, label: str) -> None:
        await self._transfer(server, "/end_weight_update", {})
        await server.ask("POST", "/flush_cache")
        body = {"new_version": label, "abort_all_requests": False}
        await server.ask("POST", "/update_weight_version", body)
        await server.ask("POST", "/continue_generation", {})

    async def give_up_update(self, server: Server) -> None:
        await self._transfer(server, "/end_weight_update", {})

    async def _transfer(self, server: Server, path: str, body: dict[str, Any]) -> None:
        """A step of a transfer, which must not be repeated."""
        await _post(server, path, body, attempts=1)


async def _post(server: Server, path: str, body: dict[str, Any], attempts: int | None = None) -> None:
    """POST to an endpoint whose reply says whether it has succeeded."""
    reply = await server.ask("POST", path, body, attempts=attempts)
    if not isinstance(reply, dict) or reply.get("success") is not True:
        raise ServerError(f"{server}: POST {path}: {shown(reply)}")
