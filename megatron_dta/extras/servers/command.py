"""Builds the command that starts a rollout server with the settings of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence

from megatron_dta.core.common.errors import InputError
from megatron_dta.extras.servers.speculation import ServerSpeculation
from megatron_dta.training.config import TrainConfig
from megatron_dta.training.config.checks.rollouts import SERVERS


def server_command(
    config: TrainConfig, model: str | None, port: int, host: str | None, more: Sequence[str] = ()
) -> tuple[dict[str, str], list[str]]:
    """The environment variables and the words of the command.

    Args:
        model: the model that the server loads first; None: that of ``--load-hf`` or ``--hf-checkpoint``.
        more: further options of the server.

    Raises:
        InputError: the engine has no servers, or no model is known.
    """
    sampling = config.sampling
    if sampling.rollout_engine not in SERVERS:
        raise InputError(f"--rollout-engine {sampling.rollout_engine} has no servers; give vllm or sglang")
    model = model or config.checkpoint.load_hf or config.checkpoint.hf_checkpoint
    if model is None:
        raise InputError("which model the server is to load is not known: give --load-hf, --hf-checkpoint or --model")
    drafts = ServerSpeculation.of(config) if config.speculation.rollout_speculation == "das" else None
    address = ["--port", str(port), *(() if host is None else ("--host", host))]
    experts = ["--enable-return-routed-experts"] if config.model.moe_routing_replay else []
    if sampling.rollout_engine == "vllm":
        words = ["vllm", "serve", model, *address]
        if sampling.temperature not in (0, 1) and sampling.rollout_top_p == 1:
            words += ["--logprobs-mode", "processed_logprobs"]
        if drafts is not None:
            words += ["--speculative-config", json.dumps(drafts.vllm())]
        environment = {"VLLM_SERVER_DEV_MODE": "1"}
        if sampling.rollout_weight_transfer in ("nccl", "ipc"):
            words += ["--weight-transfer-config", json.dumps({"backend": sampling.rollout_weight_transfer})]
        if sampling.rollout_weight_transfer == "ipc":
            environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        return environment, [*words, *experts, *more]
    words = ["python", "-m", "sglang.launch_server", "--model-path", model, *address]
    if drafts is not None:
        words += [word for name, value in drafts.sglang().items() for word in (_flag(name), str(value))]
    return {}, [*words, *experts, *more]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
