"""A stand-in for verl's rollout servers: transformers on the CPU behind ``rollout.name=transformers``.

Registered with verl by ``VERL_USE_EXTERNAL_MODULES``. As verl's servers do, it forgets its weights when it sleeps. With
``+actor_rollout_ref.rollout.custom.record=FOLDER`` every server writes the weights that it receives to that folder.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import torch
import transformers
from torch import Tensor
from verl.workers.rollout import base
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

NAME = "transformers"
SHORTEST = 4  # tokens of a response


def _server_name(replica_rank: int) -> str:
    return f"transformers_server_{replica_rank}"


def recorded(folder: Path, replica_rank: int, step: int) -> Path:
    """The file with the weights that a server received after a training step; step 0 is before the first."""
    return folder / f"replica{replica_rank}_step{step}.pt"


class TransformersRollout(BaseRollout):
    """The part of the rollout in the trainer's processes: passes the weights to the server of this rank."""

    def __init__(self, *args: Any, replica_rank: int = -1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank < 0 else replica_rank
        self.is_leader_rank = True

    async def resume(self, tags: list[str]) -> None:
        """See ``BaseRollout``."""

    async def release(self) -> None:
        """See ``BaseRollout``."""

    async def update_weights(
        self,
        weights: Iterator[tuple[str, Tensor]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Send all weights to the server."""
        assert wire_format == "named_tensors"
        # One tensor at a time may live in the same memory, so each is copied.
        copies = {name: tensor.detach().cpu().clone() for name, tensor in weights}
        server = ray.get_actor(_server_name(self.replica_rank))
        await server.set_weights.remote(copies, global_steps)


class TransformersReplica(RolloutReplica):
    """One server process per data-parallel rank."""

    async def launch_servers(self) -> None:
        """See ``RolloutReplica``."""
        assert self.world_size == 1
        name = _server_name(self.replica_rank)
        record = (self.config.custom or {}).get("record")
        server = TransformersServer.options(name=name, num_cpus=0).remote(
            self.model_config.path, self.config.response_length, self.config.seed + self.replica_rank
        )
        self.servers, self._server_handle, self._server_address = [server], server, name
        if record:
            await server.record.remote(record, self.replica_rank)


@ray.remote
class TransformersServer:
    """Samples token by token; its logprobs are those of the distribution that it samples from."""

    def __init__(self, path: str, response_length: int, seed: int) -> None:
        torch.set_num_threads(1)
        config = transformers.AutoConfig.from_pretrained(path)
        # Weights come from the trainer only, as with verl's load_format=dummy.
        self._model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        self._end = transformers.AutoTokenizer.from_pretrained(path).eos_token_id
        self._length, self._generator = response_length, torch.Generator().manual_seed(seed)
        self._step: int | None = None
        self._folder: Path | None = None
        self._rank = 0
        self._forget()

    async def record(self, folder: str, replica_rank: int) -> None:
        """Write weights to ``folder`` from now on."""
        self._folder, self._rank = Path(folder), replica_rank

    async def set_weights(self, weights: dict[str, Tensor], step: int | None) -> None:
        """Replace all weights."""
        self._model.load_state_dict(weights, strict=True)
        self._step = step
        if self._folder is not None:
            torch.save(weights, recorded(self._folder, self._rank, step or 0))

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        """Sample one response, of at most a random number of tokens."""
        assert self._step is not None, "asked to sample before the weights came"
        token_ids, logprobs = self._sample(prompt_ids, sampling_params["temperature"])
        return TokenOutput(
            token_ids=token_ids,
            log_probs=logprobs,
            stop_reason="completed",
            num_preempted=0,
            extra_fields={"global_steps": self._step},
        )

    @torch.no_grad()
    def _sample(self, prompt_ids: list[int], temperature: float) -> tuple[list[int], list[float]]:
        token_ids, logprobs = list(prompt_ids), []
        for _ in range(int(torch.randint(SHORTEST, self._length + 1, (), generator=self._generator))):
            logits_V = self._model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0, -1]
            logprobs_V = torch.log_softmax(logits_V / (temperature or 1.0), dim=-1)
            drawn = torch.multinomial(logprobs_V.exp(), 1, generator=self._generator)
            chosen = int(drawn) if temperature else int(logprobs_V.argmax())
            token_ids.append(chosen)
            logprobs.append(float(logprobs_V[chosen]))
            if chosen == self._end:
                break
        return token_ids[len(prompt_ids) :], logprobs

    async def sleep(self) -> None:
        """Forget the weights."""
        self._forget()

    async def wake_up(self) -> None:
        """See ``RolloutReplica``."""

    async def clear_kv_cache(self) -> None:
        """See ``RolloutReplica``."""

    def _forget(self) -> None:
        self._step = None
        for parameter in self._model.parameters():
            parameter.data.fill_(float("nan"))


base._ROLLOUT_REGISTRY[NAME, "async"] = "cpu_rollout.TransformersRollout"
RolloutReplicaRegistry.register(NAME, lambda: TransformersReplica)
