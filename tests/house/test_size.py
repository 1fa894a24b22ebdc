"""Ceilings of lines and modules, and of what a first day needs."""

from collections import Counter
from pathlib import Path

from conftest import REPOSITORY
from forked import run_python

PACKAGE = REPOSITORY / "megatron_dta"
MOST_LINES = {"megatron_dta/core": 20_000, "megatron_dta": 61_740, "kernels": 6_910, "tests": 42_000}
MOST_MODULES = 16
# Loaded by a loop with a dense model on one device.
FIRST_DAY_LINES = 12_000


def lines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def test_rings_are_below_their_ceilings():
    sizes = {folder: sum(map(lines, (REPOSITORY / folder).rglob("*.py"))) for folder in MOST_LINES}
    assert {folder: size for folder, size in sizes.items() if size > MOST_LINES[folder]} == {}
    assert lines(REPOSITORY / "README.md") <= 130


def test_folders_hold_few_modules():
    modules = [path for folder in (PACKAGE, REPOSITORY / "benchmarks") for path in folder.rglob("*.py")]
    counts = Counter(path.parent for path in modules if path.name != "__init__.py")
    assert {str(folder): count for folder, count in counts.items() if count > MOST_MODULES} == {}


# In a forked process, which finds this project imported, too.
LOOP = """
import sys
for name in [name for name in sys.modules if name.partition(".")[0] == "megatron_dta"]:
    del sys.modules[name]
sys.argv = ["grpo_on_trees.py", "--steps", "1"]
import contextlib, runpy
with contextlib.suppress(SystemExit):
    runpy.run_path("examples/grpo_on_trees.py", run_name="__main__")
print(*(module.__file__ for name, module in sys.modules.items() if name.startswith("megatron_dta")), sep="\\n")
"""


def test_a_dense_model_on_one_device_loads_little(tmp_path: Path):
    program = tmp_path / "loop.py"
    program.write_text(LOOP)
    done = run_python([program])
    loaded = [Path(line) for line in done.stdout.splitlines() if line.startswith(str(PACKAGE))]
    assert 5_000 < sum(map(lines, loaded)) <= FIRST_DAY_LINES
    others = {path.relative_to(PACKAGE).parts[0] for path in loaded} - {"core", "__init__.py"}
    assert others == {"common"}  # for the script's own entry point
