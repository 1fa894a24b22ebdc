"""Decoding on pipeline stages of two GPUs (or four): CUDA graphs on each stage, with messages between them."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from decode_mesh_cases import Job, assert_reproducible, check_moved_weights, compare
from hybrid_cases import HYBRID
from megatron_dta.core.config import ParallelConfig
from rollout_forest import PARAMS

pytestmark = pytest.mark.two_gpus

STAGES = partial(ParallelConfig, pipeline_model_parallel_size=2)
LAYERS = dict(num_layers=4)
TIED = dict(untie_embeddings_and_output_weights=False)
# The kernels draw only without a nucleus.
DRAWN_BY_KERNELS = replace(PARAMS, top_p=1.0)
TWO = {
    "graphs": Job(STAGES()),
    "again": Job(STAGES()),
    "eager": Job(STAGES(), settings=dict(static_passes=False)),
    "small pages": Job(STAGES(), settings=dict(block_size=3, max_requests=5, max_tokens=11)),
    "one row": Job(STAGES(), settings=dict(max_requests=1)),
    "drafts": Job(STAGES(), drafts=True),
    "uneven": Job(STAGES(pipeline_model_parallel_layout="Ettt|tL")),
    "no layers": Job(STAGES(pipeline_model_parallel_layout="E|ttttL")),
    "virtual stages": Job(STAGES(num_virtual_stages_per_pipeline_rank=2)),
    "modules": Job(STAGES(), changes=dict(fused_layer_impl="reference")),
}
STATES = HYBRID | dict(
    num_layers=4, mixer_layer_freq="[1,1,1,0]", recurrence_impl="reference", disable_bias_linear=True
)
# One stage without attention, one without states.
APART = STAGES(pipeline_model_parallel_layout="Ettt|tL")
BOTH = STAGES(tensor_model_parallel_size=2)
FOUR = {
    "PP 4": Job(ParallelConfig(pipeline_model_parallel_size=4)),
    "PP 2 x TP 2": Job(BOTH),
    "sequence parallel": Job(replace(BOTH, sequence_parallel=True)),
    "drafts": Job(BOTH, drafts=True),
    "PP 2 x DP 2": Job(STAGES()),
}


def test_two_stages_give_the_samples_of_one_gpu_in_float32(tmp_path):
    ranks = compare(TWO, DRAWN_BY_KERNELS, 2, tmp_path / "mesh", **LAYERS)
    assert_reproducible(ranks)


def test_stages_with_states_give_the_samples_of_one_gpu_in_float32(tmp_path):
    names = ("graphs", "again", "eager", "small pages", "drafts", "virtual stages", "modules")
    jobs = {name: TWO[name] for name in names} | {"apart": Job(APART)}
    ranks = compare(jobs, DRAWN_BY_KERNELS, 2, tmp_path / "mesh", **STATES)
    assert_reproducible(ranks)


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA GPUs")
def test_four_gpus_give_the_samples_of_one_in_float32(tmp_path):
    compare(FOUR, DRAWN_BY_KERNELS, 4, tmp_path / "mesh", **LAYERS | TIED)


def test_groups_of_many_rows_see_the_present_weights(tmp_path):
    check_moved_weights(STAGES(), 37, tmp_path / "mesh", dict(static_passes=False), **LAYERS)
