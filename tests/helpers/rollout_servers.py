"""Local servers with the request and response forms of vLLM and SGLang, strict, and with faults on demand.

Unlike the real servers, which ignore most unknown fields, any field that the real schema does not have is refused, and
so is a missing or mistyped one, in the form of each server. How they sample is in ``rollout_server_base``.
"""

import asyncio
import base64
import io
import pickle
import time
from typing import Any

import numpy as np
from aiohttp import web

from rollout_server_base import RolloutServer, experts_of
from rollout_server_forms import (
    NUMBER,
    SGLANG_FROM_DISK,
    SGLANG_GENERATE,
    SGLANG_SAMPLING,
    SGLANG_TRANSFER,
    VLLM_COMPLETION,
    VLLM_INIT,
    VLLM_TRANSFER,
    BadRequestError,
    check,
    check_mode,
    log_softmax,
)
from weight_receiver import place_in


class VllmServer(RolloutServer):
    """The forms of vLLM 0.33 in development mode; ``labels=False`` for a version that knows no weight versions."""

    kind, generate_path = "vllm", "/v1/completions"
    labels = True

    def refusal(self, message: str) -> dict[str, Any]:
        return {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}

    def returned(self, raw: np.ndarray, scaled: np.ndarray, kept: np.ndarray) -> np.ndarray:
        return kept if self.temperature_scaled else raw

    async def answer(self, path: str, request: web.Request, body: Any) -> web.Response:
        if path == "/health" and request.method == "GET":
            return web.Response()
        if path == "/get_world_size" and request.method == "GET":
            return web.json_response({"world_size": self.receiver.processes})
        if self.labels and path == "/weight_info" and request.method == "GET":
            return web.json_response({"weight_version": self.label})
        if request.method != "POST":
            return web.json_response({"detail": "Method Not Allowed"}, status=405)
        if path == self.generate_path:
            if self.paused:
                return web.json_response(self.refusal("paused"), status=503)
            return await self._complete(check(body, VLLM_COMPLETION, ("prompt",)))
        if path == "/pause":
            check_mode(request.query, ("abort", "wait", "keep"))
            self.paused = True
            if request.query["mode"] == "abort":
                await self.abort_running()
            return web.json_response({"status": "paused"})
        if path == "/resume":
            self.paused = False
            return web.json_response({"status": "resumed"})
        if path == "/reset_prefix_cache":
            self.flush()
            return web.json_response({"success": True})
        if path == "/collective_rpc":
            check(body, {"method": str, "args": list, "kwargs": dict, "timeout": NUMBER}, ("method",))
            if body["method"] != "reload_weights" or set(body.get("kwargs", {})) != {"weights_path"}:
                return web.json_response(self.refusal("unexpected call"), status=500)
            self.load(body["kwargs"]["weights_path"])
            return web.json_response({"results": [None]})
        if path in VLLM_TRANSFER:
            return await self._transfer(path, check(body or {}, VLLM_TRANSFER[path], VLLM_TRANSFER[path]))
        if self.labels and path == "/update_weight_version":
            self.label = check(body, {"new_version": str}, ("new_version",))["new_version"]
            return web.json_response({"success": True, "new_version": self.label})
        return web.json_response({"detail": "Not Found"}, status=404)

    def _experts(self, context: list[int], tokens: list[int]) -> str | None:
        if self.routing is None:
            return None
        file = io.BytesIO()
        np.save(file, experts_of(context, tokens, *self.routing).astype(np.int16))
        return base64.b64encode(file.getvalue()).decode()

    async def _transfer(self, path: str, body: dict[str, Any]) -> web.Response:
        active = self.receiver.received is not None
        if path == "/shutdown_weight_transfer_engine":
            if active:
                return web.json_response(self.refusal("an update is active"), status=500)
            self.receiver.leave()
            return web.json_response({"message": "done"})
        if (path == "/start_weight_update") == active and path != "/init_weight_transfer_engine":
            return web.json_response(self.refusal(f"{path} with an update active: {active}"), status=500)
        if path == "/init_weight_transfer_engine":
            if body["init_info"].keys() == {"packed"}:
                assert body["init_info"]["packed"] is True
                self.receiver.groups += 1
                return web.json_response({"message": "done"})
            info = check(body["init_info"], VLLM_INIT, ("rank_offset", "world_size"))
            where = place_in(info["nccl_unique_id_b64"])
            assert info["packed"] is True
            self.bucket_bytes = info["packed_buffer_size_bytes"]
            await self.in_thread(self.receiver.join, *where, info["rank_offset"], info["world_size"])
        elif path == "/start_weight_update":
            self.begin_transfer()
        elif path == "/update_weights":
            info = body["update_info"]
            tensors = (info["names"], info["dtype_names"], info["shapes"])
            if "ipc_handles_pickled" in info:
                assert info.keys() == {"names", "dtype_names", "shapes", "tensor_sizes", "ipc_handles_pickled"}
                handles = pickle.loads(base64.b64decode(info["ipc_handles_pickled"]))
                await self.in_thread(self.receiver.map, *tensors, info["tensor_sizes"], handles)
                return web.json_response({"message": "done"})
            assert info.keys() == {"names", "dtype_names", "shapes"}
            await self.in_thread(self.receiver.receive, *tensors, self.bucket_bytes)
        else:
            self.end_transfer()
        return web.json_response({"message": "done"})

    async def _complete(self, body: dict[str, Any]) -> web.Response:
        self.bodies.append(body)
        if not body["prompt"]:
            raise BadRequestError("Either prompt or prompt_embeds must be provided and non-empty.")
        label = self.label
        stops = set(body.get("stop_token_ids", []))
        if not body.get("ignore_eos", False) and self.model_eos is not None:
            stops.add(self.model_eos)
        tokens, logprobs, reason, _ = await self.sample(
            body["prompt"], body.get("max_tokens", 16), body.get("temperature", 1.0), body.get("top_p", 1.0),
            body.get("seed", 0), stops, body.get("allowed_token_ids"),
        )  # fmt: skip
        names = [f"token_id:{token}" for token in tokens]
        choice = {
            "index": 0,
            "text": "?" * len(tokens),
            "logprobs": {
                "text_offset": list(range(len(tokens))),
                "token_logprobs": [max(logprob, -9999.0) for logprob in logprobs],
                "tokens": names,
                "top_logprobs": [{name: logprob} for name, logprob in zip(names, logprobs, strict=True)],
            }
            if body.get("logprobs") is not None
            else None,
            "finish_reason": reason,
            "stop_reason": tokens[-1] if reason == "stop" and tokens[-1] != self.model_eos else None,
            "token_ids": tokens if body.get("return_token_ids") else None,
            "prompt_logprobs": None,
            "prompt_token_ids": body["prompt"] if body.get("return_token_ids") else None,
            "routed_experts": self._experts(body["prompt"], tokens),
            "weight_versions": [{"version": label, "start": 0, "end": len(tokens)}]
            if self.labels and body.get("return_weight_versions")
            else None,
        }
        usage = {
            "prompt_tokens": len(body["prompt"]),
            "total_tokens": len(body["prompt"]) + len(tokens),
            "completion_tokens": len(tokens),
            "prompt_tokens_details": None,
        }
        return web.json_response(
            {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": "m", "choices": [choice]}
            | {"service_tier": None, "system_fingerprint": None, "usage": usage, "kv_transfer_params": None}
        )

    def damaged(self, reply: dict[str, Any], fault: str) -> dict[str, Any]:
        choice = reply["choices"][0]
        if fault == "short":
            choice["logprobs"]["token_logprobs"].pop()
        elif fault == "long":
            choice["token_ids"] += [1] * 1000
        else:
            choice["finish_reason"] = "abort"
        return reply


class SglangServer(RolloutServer):
    """The forms of SGLang 0.5.23."""

    kind, generate_path = "sglang", "/generate"

    def refusal(self, message: str) -> dict[str, Any]:
        return {"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400}

    def returned(self, raw: np.ndarray, scaled: np.ndarray, kept: np.ndarray) -> np.ndarray:
        return raw if self.temperature_scaled is False else scaled

    async def answer(self, path: str, request: web.Request, body: Any) -> web.Response:
        if path in ("/health", "/health_generate") and request.method == "GET":
            # It samples a token, and gives up after 20 s.
            end = time.monotonic() + 20
            while self.paused and time.monotonic() < end:
                await asyncio.sleep(0.01)
            return web.Response(status=503 if self.paused else 200)
        if path == "/model_info" and request.method == "GET":
            return web.json_response({"model_path": "m", "is_generation": True, "weight_version": self.label})
        if path == "/server_info" and request.method == "GET":
            sizes = {"tp_size": self.receiver.processes, "pp_size": 1, "dp_size": 1}
            return web.json_response(sizes | {"speculative_algorithm": None})
        if path == "/flush_cache":
            if self.running:
                return web.Response(text="Flush cache failed.\n", status=400)
            self.flush()
            return web.Response(text="Cache flushed.\nPlease check backend logs for more details.\n")
        if request.method != "POST":
            return web.json_response({"detail": "Method Not Allowed"}, status=405)
        if path == self.generate_path:
            while self.paused:
                await asyncio.sleep(0.01)
            return await self._generate(check(body, SGLANG_GENERATE))
        if path == "/pause_generation":
            check_mode(check(body, {"mode": str}), ("abort", "retract", "in_place"))
            self.paused = True
            if body["mode"] == "abort":
                await self.abort_running()
            return web.json_response({"message": "Generation paused successfully.", "status": "ok"})
        if path == "/continue_generation":
            check(body, {"torch_empty_cache": bool})
            self.paused = False
            return web.json_response({"message": "Generation continued successfully.", "status": "ok"})
        if path in SGLANG_TRANSFER:
            success, message = await self._transfer(path, check(body, *SGLANG_TRANSFER[path]))
            content = {"success": success, "message": message}
            return web.json_response(content, status=200 if success else 400)
        if path == "/update_weights_from_disk":
            check(body, SGLANG_FROM_DISK, ("model_path",))
            try:
                self.load(body["model_path"])
            except BadRequestError as error:
                content = {"success": False, "message": str(error), "num_paused_requests": 0}
                return web.json_response(content, status=400)
            self.label = body.get("weight_version", self.label)
            return web.json_response({"success": True, "message": "Succeeded.", "num_paused_requests": 0})
        return web.json_response({"detail": "Not Found"}, status=404)

    async def _transfer(self, path: str, body: dict[str, Any]) -> tuple[bool, str]:
        active = self.receiver.received is not None
        if path == "/init_weights_update_group":
            where = (body["master_address"], body["master_port"], body["group_name"])
            await self.in_thread(self.receiver.join, *where, body["rank_offset"], body["world_size"])
        elif path == "/destroy_weights_update_group":
            self.receiver.leave()
        elif path == "/update_weight_version":
            self.label = body["new_version"]
        elif (path == "/begin_weight_update") == active:
            return False, f"{path} with a session: {active}"
        elif path == "/begin_weight_update":
            self.begin_transfer()
        elif path == "/update_weights_from_distributed":
            assert body["load_format"] == "flattened_bucket"
            await self.in_thread(self.receiver.receive, body["names"], body["dtypes"], body["shapes"], None)
        else:
            self.end_transfer()
        return True, "Succeeded."

    async def _generate(self, body: dict[str, Any]) -> web.Response:
        self.bodies.append(body)
        if not body.get("input_ids"):
            return web.json_response({"error": {"message": "input_ids cannot be empty."}}, status=400)
        settings = check(body.get("sampling_params", {}), SGLANG_SAMPLING)
        label, context = self.label, body["input_ids"]
        stops = set(settings.get("stop_token_ids", [])) | ({self.model_eos} - {None})
        if settings.get("ignore_eos", False):
            stops = set()
        tokens, logprobs, reason, cached = await self.sample(
            context, settings.get("max_new_tokens", 128), settings.get("temperature", 1.0),
            settings.get("top_p", 1.0), settings.get("sampling_seed", 42), stops, None,
        )  # fmt: skip
        finish = {
            "stop": {"type": "stop", "matched": tokens[-1] if tokens else None},
            "length": {"type": "length", "length": len(tokens)},
            "abort": {"type": "abort", "message": "Aborted", "status_code": None},
        }[reason]
        meta: dict[str, Any] = {
            "id": "0",
            "finish_reason": finish,
            "prompt_tokens": len(context),
            "weight_version": label,
            "num_retractions": 0,
            "completion_tokens": len(tokens),
            "cached_tokens": cached,
        }
        if body.get("return_routed_experts") and self.routing is not None:
            experts = experts_of(context, tokens, *self.routing).astype("<i4")
            meta["routed_experts"] = base64.b64encode(experts.tobytes()).decode()
        if body.get("return_logprob"):
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [[p, t, None] for p, t in zip(logprobs, tokens, strict=True)]
            meta["output_token_logprobs_length"] = len(tokens)
            if body.get("token_ids_logprob"):
                row = self.table[context[-1]]
                scale = 1.0 if self.temperature_scaled is False else settings.get("temperature", 1.0)
                named = log_softmax(row / scale)
                meta["output_token_ids_logprobs"] = [[[float(named[t]), t, None] for t in body["token_ids_logprob"]]]
        return web.json_response({"text": "?", "output_ids": tokens, "meta_info": meta})

    def damaged(self, reply: dict[str, Any], fault: str) -> dict[str, Any]:
        if fault == "short":
            reply["meta_info"]["output_token_logprobs"].pop()
        elif fault == "long":
            reply["output_ids"] += [1] * 1000
            reply["meta_info"]["output_token_logprobs"] += [[-1.0, 1, None]] * 1000
        else:
            reply["meta_info"]["finish_reason"] = {"type": "abort", "message": "Aborted", "status_code": None}
        return reply


SERVERS = {"vllm": VllmServer, "sglang": SglangServer}
