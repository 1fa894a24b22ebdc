"""A model that vLLM's CPU kernels can run, what its servers must have of it, and what they must sample from it."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_dta.extras.servers.engine import HttpEngine
from megatron_dta.extras.servers.http_client import HttpSettings
from megatron_dta.sampling.host_weights import HostWeights, empty_weights
from megatron_dta.sampling.interface import GenerationRequest, GenerationResult, generate
from megatron_dta.sampling.params import SamplingParams

VOCABULARY, EOS = 64, 3
# vLLM computes in other kernels than transformers, both in float32.
LOGPROB_ERROR = 2e-5
SETTINGS = HttpSettings(timeout_s=120, connect_timeout_s=10, attempts=4, backoff_s=0.1, backoff_limit_s=1)
PARAMS = SamplingParams(max_response_tokens=12, eos_id=EOS, seed=7)
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_COLUMNS = ("o_proj.weight", "down_proj.weight")


def random_model(seed: int) -> torch.nn.Module:
    """A small Qwen3; the CPU kernels need heads of 32 channels."""
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=None,
    )
    model = transformers.Qwen3ForCausalLM(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for values in model.parameters():
            values.normal_(0, 0.2, generator=generator)
            if values.ndim == 1:
                values.add_(1)
    return model


def write_model(folder: Path, seed: int) -> Path:
    random_model(seed).save_pretrained(folder)
    (folder / "tokenizer.model").write_bytes(bytes(range(256)))
    return folder


def host_weights(model: torch.nn.Module, bucket_bytes: int = 1 << 14) -> HostWeights:
    """The model as the trainer holds it for servers; some of its tensors are larger than a bucket."""
    shapes = {name: (tuple(values.shape), values.dtype) for name, values in model.state_dict().items()}
    weights = empty_weights(shapes, bucket_bytes)
    for name, values in model.state_dict().items():
        weights.tensors[name].copy_(values)
    return weights


def check_parameters(digests: Mapping[str, str], tensors: Mapping[str, Tensor], processes: int, plain: bool) -> None:
    """Every parameter that a server names has the bytes of the trainer's, or of the part that its process holds.

    Args:
        found: the server's checksums.
        plain: whether its linear layers are as they were loaded; the others are left out.
    """
    seen: dict[int, int] = {}
    for name, digest in digests.items():
        rank, suffix = re.fullmatch(r"(?:.*tp(\d+):)?([^:]+)", name).groups()
        if plain or not suffix.endswith("_proj.weight"):
            content = _part(suffix, tensors, int(rank or 0), processes).contiguous().view(torch.uint8)
            assert digest == hashlib.sha256(content.numpy().tobytes()).hexdigest(), name
            seen[int(rank or 0)] = seen.get(int(rank or 0), 0) + 1
    layers = sum(name.endswith("input_layernorm.weight") for name in tensors)
    assert seen == dict.fromkeys(range(processes), (8 if plain else 4) * layers + 3)


def _part(name: str, tensors: Mapping[str, Tensor], rank: int, processes: int) -> Tensor:
    """What a process holds of a parameter, by the server's name."""
    for fused, parts in _FUSED.items():
        if f".{fused}." in name:
            return torch.cat([tensors[name.replace(fused, part)].chunk(processes)[rank] for part in parts])
    if name.endswith(_COLUMNS):
        return tensors[name].chunk(processes, dim=1)[rank]
    return tensors[name].chunk(processes)[rank] if tensors[name].ndim == 2 else tensors[name]


def logprobs_of(model: torch.nn.Module, tokens: Sequence[int]) -> Tensor:
    """[T - 1]: of every token but the first."""
    ids = torch.tensor([list(tokens)])
    with torch.no_grad():
        rows = model(ids).logits[0, :-1].log_softmax(-1)
    return rows.gather(1, ids[0, 1:, None])[:, 0]


def sample(engine: HttpEngine, iteration: int, count: int = 8) -> list[tuple[GenerationRequest, GenerationResult]]:
    """Responses to prompts that differ, so that they are spread over the servers."""
    rng = np.random.default_rng(iteration)
    requests = [
        GenerationRequest(i, rng.integers(4, VOCABULARY, rng.integers(1, 20)).astype(np.int32), 12, key=i)
        for i in range(count)
    ]
    engine.start(PARAMS, iteration)
    return list(zip(requests, generate(engine, requests), strict=True))


def largest_error(model: torch.nn.Module, pairs: Sequence[tuple[GenerationRequest, GenerationResult]]) -> float:
    """Between the logprobs of responses and the model's own."""
    errors = []
    for request, result in pairs:
        logprobs = logprobs_of(model, [*request.token_ids, *result.token_ids])[len(request.token_ids) - 1 :]
        errors.append((logprobs - torch.from_numpy(result.logprobs)).abs().max().item())
    return max(errors)
