"""All models and forests on all pipeline meshes, each compared with one process."""

import numpy as np

from conftest import seed_all
from megatron_dta.extras.parity import random_training_samples
from mesh_cases import FULL_RECOMPUTE, MeshSuite, sizes
from mesh_worker import MeshCase
from moe_cases import QWEN3_MOE, moe_weights
from tree_engine_cases import QWEN2, QWEN3, VOCABULARY, branching_sequences, model_config

UNTIED = QWEN3 | {"untie_embeddings_and_output_weights": True}
ARCHITECTURES = {
    "tied": QWEN2 | {"untie_embeddings_and_output_weights": False, "num_layers": 4},
    "untied": UNTIED | {"num_layers": 4},
    "recompute": QWEN3 | FULL_RECOMPUTE | {"num_layers": 4},
    "experts": QWEN3_MOE
    | {
        "num_layers": 4,
        "moe_layer_freq": "[0]*1+[1]*3",
        "moe_aux_loss_coeff": 0.3,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
}
MESHES = {
    "pp2": (2, sizes(pp=2), [0]),
    "pp2-vpp2": (2, sizes(pp=2, vpp=2), [0]),
    "pp2-uneven": (2, sizes(pp=2, layout="Ettt|tL"), [0]),
    "pp2-embedding-alone": (2, sizes(pp=2, vpp=2, layout="E|tt|tt|L"), [0]),
    "pp4": (4, sizes(pp=4), [0]),
    "pp2-tp2": (4, sizes(pp=2, tp=2), [0]),
    "pp2-tp2-sp-vpp2": (4, sizes(pp=2, tp=2, sp=True, vpp=2), [0]),
    "pp2-ep2-overlap": (4, sizes(pp=2, ep=2, overlap_grad_reduce=True, ddp_bucket_size=900), [2, 0]),
    "pp2-vpp2-ep2-idle": (4, sizes(pp=2, vpp=2, ep=2), [99, 0]),
    "pp2-ep2-over-tp2": (4, sizes(pp=2, tp=2, sp=True, ep=2, etp=1), [0]),
    "pp2-dp2-idle-overlap": (4, sizes(pp=2, overlap_grad_reduce=True, ddp_bucket_size=900), [99, 0]),
}


# (mode, tokens of a segment, in-flight tokens kept); "one" is fewer segments than stages.
CUTS = {
    "dense": ("dense", 9, None),
    "packed": ("packed", 45, 0),
    "dta": ("dta", 6, None),
    "dta-mixed": ("dta", 7, 12),
    "dta-recomputed": ("dta", 9, 0),
    "one": ("dta", 1000, None),
}
SEED = 23


def _samples(forest: str) -> list:
    generator = seed_all(SEED)
    if forest == "bushy":
        sequences = branching_sequences(generator, count=6, longest=8)
    elif forest == "deep":
        trunk = generator.integers(0, VOCABULARY, size=33)
        sequences = [np.append(trunk[:n], generator.integers(0, VOCABULARY, size=3)) for n in (31, 22, 13, 3)]
    else:
        trunk = generator.integers(0, VOCABULARY, size=5)
        sequences = [np.append(trunk, generator.integers(0, VOCABULARY, size=n)) for n in range(2, 12, 2)]
    return random_training_samples([sequence.astype(np.int32) for sequence in sequences], seed=SEED)


def pipeline_suite() -> MeshSuite:
    """All models and forests on all meshes."""
    models = {name: model_config(**settings) for name, settings in ARCHITECTURES.items()}
    samples = {forest: _samples(forest) for forest in ("bushy", "deep", "wide")}
    return MeshSuite(models, MESHES, samples, CUTS, moe_weights)


def pipeline_case(mesh: str = "pp2") -> MeshCase:
    """One step of the tied model on a mesh of stages."""
    models = {"tied": model_config(**ARCHITECTURES["tied"])}
    return MeshSuite(models, MESHES, {"bushy": _samples("bushy")}, CUTS).case(mesh, "tied", "dta", "bushy")
