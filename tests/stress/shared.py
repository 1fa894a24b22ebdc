"""Makes the tests' helpers importable for the programs of this folder, which are started by hand."""

import sys
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]
sys.path[1:1] = [str(_TESTS / name) for name in (".", "helpers", "cases", "cases/kernels", "cases/mesh")]
