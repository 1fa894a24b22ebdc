"""Variables and arguments are named by what they hold: no vague nouns."""

import ast

from conftest import REPOSITORY

VAGUE = {"own", "found", "each", "place", "places", "room", "rooms"}


def test_no_variable_has_a_vague_name():
    hits = []
    for folder in ("megatron_dta", "kernels"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                is_variable = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
                name = node.id if is_variable else node.arg if isinstance(node, ast.arg) else None
                if name in VAGUE:
                    hits.append(f"{path.relative_to(REPOSITORY)}:{node.lineno}: {name}")
    assert hits == []
