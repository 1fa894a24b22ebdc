"""vLLM's server: ``vllm serve``, with the forms of version 0.33.

Tokens come from ``/v1/completions`` with a list of ids as the prompt. The workers' ``reload_weights`` loads weights
from a folder; the NCCL engine of its weight transfer receives them from the trainer's GPU, its IPC engine reads them
there. The control endpoints exist in the server's development mode:

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --port 8000 --weight-transfer-config '{"backend": "nccl"}'

``{"backend": "ipc"}`` also needs VLLM_ALLOW_INSECURE_SERIALIZATION=1, because the handles of memory are pickled.

Other settings, such as parallelism and memory, are given there as usual. ``megatron-dta rollout-server-command`` prints
the command for speculative decoding. A drafter with weights of its own keeps the weights it was started with.

**Experts.** For ``--moe-routing-replay`` the server is started with ``--enable-return-routed-experts`` (0.22 or newer).
A reply then holds a NumPy file in base64: of every token but the last, by layer, its experts.

**Logprobs.** By default (``--logprobs-mode raw_logprobs``) they are computed before temperature and nucleus, as in the
trainer at temperature 1. With ``processed_logprobs`` they are computed after temperature and nucleus, as in the trainer
at any temperature without a nucleus. No mode covers both a temperature and a nucleus. To find out the mode, a request
allows only one token, whose processed logprob is 0.
"""

from __future__ import annotations

import base64
import contextlib
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_dta.common.http.replies import TransientFailureError, field_of
from megatron_dta.extras.servers.http_client import Server, ServerError
from megatron_dta.extras.servers.protocol import (
    NEUTRAL_SAMPLING,
    Asked,
    Piece,
    ServerProtocol,
    check_prompt_length,
    make_piece,
    refuse_logprobs,
)
from megatron_dta.extras.servers.routing import array_of, with_routing
from megatron_dta.sampling.params import SamplingParams

if TYPE_CHECKING:
    from megatron_dta.extras.servers.protocol import Bucket, Meeting

_RAW, _PROCESSED = "raw_logprobs", "processed_logprobs"
_DEV_MODE = "start vLLM with the environment variable VLLM_SERVER_DEV_MODE=1"
_TRANSFER = "--weight-transfer-config (rollout-server-command prints it)"


class VllmProtocol(ServerProtocol):
    """Requests and replies of vLLM."""

    name = "vLLM"
    generate_path = "/v1/completions"
    health_path = "/health"
    label_path = "/weight_info"
    meets_by_unique_id = receives_many = True

    def body(self, token_ids: np.ndarray, max_tokens: int, params: SamplingParams, seed: int) -> dict[str, Any]:
        return {
            "prompt": token_ids.tolist(),
            "max_tokens": max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            # Parameters that are left out come from the model's generation_config.json.
            **NEUTRAL_SAMPLING,
            "seed": seed,
            "ignore_eos": True,
            "stop_token_ids": sorted(params.eos_ids),
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "return_weight_versions": True,
            "add_special_tokens": False,
        }

    def read(self, reply: Any, asked: Asked) -> Piece:
        prompt = field_of(reply, "choices", 0, "prompt_token_ids", kind=list, optional=True)
        if prompt is not None and prompt != asked.token_ids.tolist():
            raise TransientFailureError("the reply is to another prompt: its choices.0.prompt_token_ids were not sent")
        check_prompt_length(reply, asked, "usage", "prompt_tokens")
        spans = field_of(reply, "choices", 0, "weight_versions", kind=list, optional=True) or []
        indices = range(len(spans))
        piece = make_piece(
            field_of(reply, "choices", 0, "token_ids"),
            field_of(reply, "choices", 0, "logprobs", "token_logprobs"),
            field_of(reply, "choices", 0, "finish_reason", kind=str),
            asked,
            ("choices.0.token_ids", "choices.0.logprobs.token_logprobs"),
            field_of(reply, "usage", "prompt_tokens_details", "cached_tokens", kind=int, optional=True),
            [field_of(reply, "choices", 0, "weight_versions", index, "version") for index in indices],
        )
        if asked.routing is None:
            return piece
        text = field_of(reply, "choices", 0, "routed_experts", kind=str, optional=True)
        return with_routing(piece, array_of(text, "choices.0.routed_experts"), asked, self.name)

    async def check_logprobs(self, server: Server, params: SamplingParams) -> None:
        if params.temperature in (0, 1) and params.top_p == 1:
            return
        mode = await self._logprobs_mode(server, params)
        if params.top_p < 1 and params.temperature not in (0, 1):
            fix = "add --old-logprobs recompute: vLLM has no mode for a temperature and a nucleus at once"
        elif params.top_p < 1:
            fix = None if mode == _RAW else f"start it with --logprobs-mode {_RAW}"
        else:
            fix = None if mode == _PROCESSED else f"start it with --logprobs-mode {_PROCESSED}"
        if fix is not None:
            raise refuse_logprobs(server, params, f"of --logprobs-mode {mode}", fix)

    async def _logprobs_mode(self, server: Server, params: SamplingParams) -> str:
        # At most one of two tokens has a raw logprob of about 0; a processed one is always 0.
        for token in (params.eos_id, params.eos_id + 1 if params.eos_id == 0 else 0):
            asked = Asked(np.array([token]), 1)
            body = self.body(asked.token_ids, 1, params, seed=0) | {"allowed_token_ids": [token]}
            piece = await server.ask(
                "POST", self.generate_path, body, read=lambda reply, asked=asked: self.read(reply, asked)
            )
            if piece.logprobs[0] < -1e-4:
                return _RAW
        return _PROCESSED

    async def update_weights(self, server: Server, folder: Path, label: str, running: bool = False) -> None:
        await self._pause(server, running)
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self._control(server, "/collective_rpc", body)
        await self._continue(server, label)

    async def _pause(self, server: Server, running: bool) -> None:
        await self._control(server, f"/pause?mode={'abort' if running else 'wait'}")

    async def _continue(self, server: Server, label: str) -> None:
        """Sample with weights that were just loaded."""
        reset = await self._control(server, "/reset_prefix_cache")
        if isinstance(reset, dict) and reset.get("success") is False:
            raise ServerError(f"{server}: could not forget its prefix cache, which is of the weights before")
        # Older versions have no labels.
        with contextlib.suppress(_MissingError):
            await self._control(server, "/update_weight_version", {"new_version": label})
        await self._control(server, "/resume")

    async def world_size(self, server: Server) -> int:
        return await server.ask("GET", "/get_world_size", read=lambda reply: field_of(reply, "world_size", kind=int))

    async def join_group(self, server: Server, meeting: Meeting, rank_offset: int, bucket_bytes: int) -> None:
        if meeting.backend == "ipc":
            await self._transfer(server, "/init_weight_transfer_engine", {"init_info": {"packed": True}})
            return
        info: dict[str, Any] = {"rank_offset": rank_offset, "world_size": meeting.world_size}
        if meeting.unique_id is None:
            info |= {"master_address": meeting.address, "master_port": meeting.port}
        else:
            info["nccl_unique_id_b64"] = base64.b64encode(meeting.unique_id).decode()
        info |= {"packed": True, "packed_buffer_size_bytes": bucket_bytes}
        await self._transfer(server, "/init_weight_transfer_engine", {"init_info": info})

    async def leave_group(self, server: Server, meeting: Meeting) -> None:
        # Otherwise the next group takes the place of this one, whose communicator keeps its memory.
        await self._transfer(server, "/shutdown_weight_transfer_engine")

    async def begin_update(self, server: Server, running: bool) -> None:
        await self._pause(server, running)
        await self._transfer(server, "/start_weight_update")

    async def receive(self, server: Server, buckets: Sequence[Bucket], meeting: Meeting) -> None:
        info: dict[str, Any] = {
            "names": [name for bucket in buckets for name in bucket.shapes],
            "dtype_names": [bucket.dtype_name for bucket in buckets for _ in bucket.shapes],
            "shapes": [list(shape) for bucket in buckets for shape in bucket.shapes.values()],
        }
        if meeting.handles is not None:
            info["tensor_sizes"] = [values.nbytes for bucket in buckets for values in bucket.tensors.values()]
            info["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(dict(meeting.handles))).decode()
        await self._transfer(server, "/update_weights", {"update_info": info})

    async def end_update(self, server: Server, label: str) -> None:
        await self._transfer(server, "/finish_weight_update")
        await self._continue(server, label)

    async def give_up_update(self, server: Server) -> None:
        await self._transfer(server, "/finish_weight_update")

    async def _transfer(self, server: Server, path: str, body: dict[str, Any] | None = None) -> None:
        """A step of weight transfer, which must not be repeated."""
        await self._control(server, path, body, transfers=True)

    async def _control(
        self, server: Server, path: str, body: dict[str, Any] | None = None, transfers: bool = False
    ) -> Any:
        try:
            return await server.ask("POST", path, body, attempts=1 if transfers else None)
        except ServerError as error:
            if "refused with 404" not in str(error):
                raise
            fix = f"{_DEV_MODE} and {_TRANSFER}" if transfers else _DEV_MODE
            raise _MissingError(f"{error}; {fix}") from error


class _MissingError(ServerError):
    """The server has no such endpoint."""
