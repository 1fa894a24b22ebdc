"""Models on the fused layer kernels against Megatron's modules: losses, logprobs, every gradient, and what is kept."""

import pytest
import torch

pytest.importorskip("triton")

from conftest import seed_all
from fused_layers_cases import layer_bytes, segment_context
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ParallelConfig
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.kernels import choose_fused_layers
from megatron_dta.core.model.layers import rematerialize
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.extras.parity import compare_outcomes, random_training_samples, run_tree
from mesh_cases import joined
from mesh_worker import MeshCase, run_cases, run_on_ranks
from tree_engine_cases import (
    GRPO,
    LLAMA,
    QWEN2,
    QWEN3,
    TEMPERATURE,
    branching_sequences,
    model_config,
    tree_config,
    weights_of,
)
from triton_device import interpreter

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PARTLY = QWEN3 | {"rotary_percent": 0.5, "position_embedding_type": "yarn", "rotary_scaling_factor": 4.0}
BIASED = {"disable_bias_linear": False, "qk_layernorm": True}
GPT = {"disable_bias_linear": False, "normalization": "LayerNorm", "swiglu": False, "qk_layernorm": True}
EXPERTS = QWEN3 | {"num_experts": 4, "moe_ffn_hidden_size": 16, "moe_layer_freq": "[0,1]"}


@interpreter
@pytest.mark.parametrize(
    ("settings", "mode", "segment_tokens", "activation_tokens"),
    [
        (QWEN3, "packed", 20, 12),
        (QWEN3, "dense", 16, None),
        (QWEN2, "dta", 13, None),
        (LLAMA, "dta", 15, 0),
        (PARTLY, "dta", 16, None),
        (BIASED, "dta", 16, None),
        (GPT, "dta", 16, None),
        (EXPERTS, "dta", 16, None),
        (QWEN3 | {"recompute_granularity": "selective"}, "dta", 16, None),
        (QWEN3 | {"recompute_granularity": "full"}, "dta", 16, None),
    ],
    ids=["packed", "dense", "qwen2", "llama", "partly", "biased", "gpt", "experts", "selective", "full"],
)  # fmt: skip
def test_a_step_equals_that_of_megatrons_modules(settings, mode, segment_tokens, activation_tokens):
    samples = random_training_samples(branching_sequences(seed_all(25), count=6, longest=8), seed=25)
    reference = model_config(torch.float32, **settings, fused_layer_impl="reference")
    weights = weights_of(reference, seed=3)
    tree = tree_config(mode, segment_tokens, activation_tokens)
    expected, _ = run_tree(reference, weights, samples, GRPO, tree, TEMPERATURE)
    fused = model_config(torch.float32, **settings, fused_layer_impl="triton")
    outcome, result = run_tree(fused, weights, samples, GRPO, tree, TEMPERATURE)
    assert result.segments > 1
    assert outcome.gradients.keys() == expected.gradients.keys()
    errors = compare_outcomes(outcome, expected)
    assert errors.largest() < 5e-6, errors


def _forward(model_settings: dict, tokens: int, keep: bool = False) -> tuple[torch.nn.Module, torch.Tensor, int]:
    """A fused model, its output and the bytes of the storages that autograd keeps, but for parameters and the pool."""
    device = initialize_parallel(7)
    model = build_model(model_config(**model_settings, fused_layer_impl="triton"), device)
    context = segment_context(model, tokens, device)
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        if keep:
            patch.setattr(rematerialize, "empty_until_backward", lambda *_: None)
            patch.setattr("megatron_dta.core.model.layers.fused_attention.empty_until_backward", lambda *_: None)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            hidden = model(torch.randint(0, 7, (1, tokens)), context)
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    return model, hidden, sum(storage.nbytes() for key, storage in kept.items() if key not in parameters)


@interpreter
@pytest.mark.parametrize(
    "settings", [QWEN3 | {"dtype": torch.bfloat16}, LLAMA | {"dtype": torch.float32}], ids=["bfloat16", "llama"]
)
def test_a_layer_keeps_what_the_formula_says(settings):
    tokens = 12
    kept = [_forward(settings | {"num_layers": layers}, tokens)[2] for layers in (1, 3)]
    assert kept[1] - kept[0] == tokens * 2 * layer_bytes(model_config(**settings))


@interpreter
@pytest.mark.parametrize("settings", [QWEN3, BIASED], ids=["qwen3", "biased"])
def test_computing_again_changes_no_bit(settings):
    gradients, kept_bytes = [], []
    for keep in (False, True):
        seed_all(9)
        model, hidden, kept = _forward(settings | {"dtype": torch.float32}, 11, keep)
        (hidden * torch.randn(hidden.shape)).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        kept_bytes.append(kept)
    assert kept_bytes[0] < 0.75 * kept_bytes[1]
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())


def test_auto_takes_triton_on_a_gpu_for_what_it_takes():
    assert choose_fused_layers("auto", torch.bfloat16, CUDA)
    assert not choose_fused_layers("auto", torch.bfloat16, CPU)
    assert not choose_fused_layers("auto", torch.float64, CUDA)
    assert not choose_fused_layers("reference", torch.bfloat16, CUDA)
    with pytest.raises(InputError, match="fused_layer_impl triton takes float32, bfloat16 and float16, not float64"):
        choose_fused_layers("triton", torch.float64, CUDA)
    with pytest.raises(InputError, match="fused_layer_impl liger: choose one of"):
        choose_fused_layers("liger", torch.float32, CUDA)


@interpreter
def test_tensor_and_sequence_parallelism_equal_one_process(tmp_path):
    objective = {"objective": "grpo", "kl_loss_coef": 0.05, "entropy_coef": 0.02, "dual_clip": 3.0}
    samples = random_training_samples(branching_sequences(seed_all(29), count=6, longest=8), seed=29)
    reference = model_config(torch.float32, **QWEN3, fused_layer_impl="reference")
    weights = weights_of(reference, seed=3)
    # Odd segments, which sequence parallelism must fill up.
    cuts = {"dta": tree_config("dta", 13, None), "recomputed": tree_config("dta", 17, 0)}
    partition = [list(range(len(samples)))]
    meshes = {
        "tp2": ParallelConfig(tensor_model_parallel_size=2),
        "tp2-sp": ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True),
    }
    fused = model_config(torch.float32, **QWEN3, fused_layer_impl="triton")
    cases = {
        f"{mesh} {cut}": MeshCase(fused, parallel, cuts[cut], samples, partition, weights, objective, TEMPERATURE)
        for (mesh, parallel), cut in zip(meshes.items(), cuts, strict=True)
    }
    pipeline = ParallelConfig(pipeline_model_parallel_size=2)
    staged = {
        impl: MeshCase(model, pipeline, cuts["dta"], samples, partition, weights, objective, TEMPERATURE)
        for impl, model in (("reference", reference), ("triton", fused))
    }
    ranks = run_on_ranks(run_cases, cases | staged, 2, tmp_path)
    for name in cases:
        expected, _ = run_tree(reference, weights, samples, GRPO, cuts[name.split()[1]], TEMPERATURE)
        errors = compare_outcomes(joined([rank[name] for rank in ranks], reference, partition), expected)
        assert errors.largest() < 5e-6, (name, errors)
    for rank in ranks:
        assert rank["triton"].loss == pytest.approx(rank["reference"].loss, rel=1e-5)
        for name, gradient in rank["reference"].gradients.items():
            error = (rank["triton"].gradients[name] - gradient).abs().max()
            assert error < 5e-6 * gradient.abs().max(), (name, error)
