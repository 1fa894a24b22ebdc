"""Pipeline parallelism against one process that trains each sequence alone: float64, every mode, mixed meshes."""

from __future__ import annotations

import pytest

from mesh_cases import MeshSuite
from mesh_worker import RankResult
from pipeline_shared import CUTS, MESHES, pipeline_suite

DENSE = [mesh for mesh in MESHES if "ep2" not in mesh]
# (mesh, architecture, cut, forest): all cuts on the meshes whose schedules differ most, the others' on each mesh.
COMBINATIONS = [
    *((mesh, "tied", cut, "bushy") for mesh in ("pp2", "pp2-vpp2", "pp2-tp2-sp-vpp2") for cut in CUTS),
    *((mesh, "tied", cut, "bushy") for mesh in DENSE if mesh not in ("pp2", "pp2-vpp2", "pp2-tp2-sp-vpp2")
      for cut in ("dense", "dta-mixed", "one")),
    *((mesh, name, "dta-mixed", "bushy") for mesh in DENSE for name in ("untied", "recompute")),
    *(("pp2-ep2", "experts", cut, "bushy") for cut in CUTS),
    *(("pp2-vpp2-ep2-idle", "experts", cut, "bushy") for cut in ("dta", "dta-recomputed", "one")),
    *((mesh, "experts", "dta-mixed", "bushy") for mesh in ("pp2", "pp2-vpp2", "pp4", "pp2-dp2")),
    *((mesh, "tied", "dta", forest) for mesh in ("pp2", "pp2-vpp2", "pp4", "pp2-dp2-idle-overlap")
      for forest in ("deep", "wide")),
]  # fmt: skip


@pytest.fixture(scope="module")
def suite() -> MeshSuite:
    return pipeline_suite()


@pytest.fixture(scope="module")
def results(suite, tmp_path_factory) -> dict[str, list[RankResult]]:
    return suite.run(COMBINATIONS, tmp_path_factory.mktemp("pipeline"))


@pytest.mark.parametrize(("mesh", "name", "cut", "forest"), COMBINATIONS)
def test_equals_one_process(suite, results, mesh, name, cut, forest):
    suite.check(results[f"{mesh} {name} {cut} {forest}"], mesh, name, forest)
