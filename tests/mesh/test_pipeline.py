"""Pipeline parallelism against one process that trains each sequence alone: float64, every mode, mixed meshes."""

import pytest
import torch

from mesh_cases import MeshSuite
from mesh_worker import RankResult
from moe_cases import updated_expert_biases
from pipeline_shared import CUTS, pipeline_suite

# (mesh, architecture, cut, forest): all cuts on two ranks, pairs of the rest on four.
COMBINATIONS = [
    *(("pp2-vpp2", "tied", cut, "bushy") for cut in CUTS),
    ("pp2-tp2-sp-vpp2", "untied", "dta-mixed", "bushy"),
    *((mesh, "tied", "dta-mixed", "bushy") for mesh in ("pp2-uneven", "pp2-embedding-alone")),
    ("pp2-tp2", "tied", "packed", "bushy"),
    *(("pp2-dp2-idle-overlap", "tied", "dta", "bushy"), ("pp2-vpp2", "recompute", "dta-mixed", "bushy")),
    ("pp2-vpp2-ep2-idle", "experts", "one", "bushy"),
    *((mesh, "experts", "dta-mixed", "bushy") for mesh in ("pp2-vpp2", "pp4")),
    ("pp2-ep2-over-tp2", "experts", "dta-recomputed", "wide"),
    ("pp2-ep2-overlap", "experts", "dta-mixed", "wide"),
    ("pp4", "tied", "dta", "deep"),
]


@pytest.fixture(scope="module")
def suite() -> MeshSuite:
    return pipeline_suite()


@pytest.fixture(scope="module")
def results(suite, tmp_path_factory) -> dict[str, list[RankResult]]:
    return suite.run(COMBINATIONS, tmp_path_factory.mktemp("pipeline"))


@pytest.mark.parametrize(("mesh", "name", "cut", "forest"), COMBINATIONS)
def test_equals_one_process(suite, results, mesh, name, cut, forest):
    suite.check(results[f"{mesh} {name} {cut} {forest}"], mesh, name, forest)


@pytest.mark.parametrize("mesh", ["pp2-vpp2", "pp4"])
def test_biases_of_experts_of_all_stages_move(suite, results, mesh):
    expected = updated_expert_biases(suite.models["experts"], suite.weights["experts"], suite.samples["bushy"])
    updated = {}
    for rank in results[f"{mesh} experts dta-mixed bushy"]:
        updated |= rank.expert_biases
    assert updated.keys() == expected.keys()
    for name, bias in updated.items():
        assert not torch.equal(bias, suite.weights["experts"][name])
        torch.testing.assert_close(bias, expected[name], rtol=0, atol=1e-7)
