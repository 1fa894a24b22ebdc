"""The short version of ``fuzz_checkpoints.py``: some mutated files of each kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import seed_all
from fuzz_checkpoints import KINDS, fuzz

pytest.importorskip("transformers", reason="makes the good checkpoints (extra 'test')")


@pytest.mark.parametrize("kind", KINDS)
def test_every_file_is_read_or_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    seed = int(seed_all(20261122).integers(1 << 30))
    outcomes, wrong = fuzz(kind, 120, seed, tmp_path)
    print(outcomes)
    assert wrong == []
    assert outcomes["refused"] > 20
    assert outcomes["read"] > 2, "a file that is never right tests little"
