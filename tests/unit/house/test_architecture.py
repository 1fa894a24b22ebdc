"""Rules of the code base that a program can check: layers, file and function lengths, docstrings, formatting."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from conftest import LONGEST_FIRST, REPOSITORY

PYTHON_FILES = sorted(
    path
    for folder in ("megatron_dta", "kernels", "tools", "benchmarks", "docs", "tests", "examples")
    for path in (REPOSITORY / folder).rglob("*.py")
)

MOST_PARAMETERS = 7


def run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


def test_imports_go_downward_only():
    result = run(str(Path(sys.executable).parent / "lint-imports"), "--no-cache")
    assert result.returncode == 0, result.stdout + result.stderr


def test_ruff_finds_nothing():
    result = run(sys.executable, "-m", "ruff", "check", ".")
    assert result.returncode == 0, result.stdout + result.stderr


def test_files_are_formatted():
    result = run(sys.executable, "-m", "ruff", "format", "--check", ".")
    assert result.returncode == 0, result.stdout + result.stderr


def test_files_are_short_and_explained():
    faults = [f"{path.relative_to(REPOSITORY)}: {fault}" for path in PYTHON_FILES for fault in _faults(path)]
    assert not faults, "\n".join(faults)


def _faults(path: Path) -> Iterator[str]:
    source = path.read_text()
    if source.count("\n") > 400:
        yield "a file of over 400 lines holds more than one idea"
    tree = ast.parse(source)
    if tree.body and not ast.get_docstring(tree):
        yield "a module says on top what it is and why"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= 80:
            yield f"{node.name} has 80 lines or more"


def test_files_that_run_first_exist():
    listed = LONGEST_FIRST.read_text().split()
    assert [path for path in listed if not (REPOSITORY / path).is_file()] == []
    assert len(set(listed)) == len(listed)


def test_functions_have_few_parameters():
    """Kernels, and the rival with their contract, are exempt: they take pointers, sizes and strides one by one."""
    found = set()
    for path in PYTHON_FILES:
        name = str(path.relative_to(REPOSITORY))
        if name.startswith(("kernels/", "tests/", "benchmarks/common/flash_attention/")):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                if sum(argument.arg not in ("self", "cls") for argument in arguments) > MOST_PARAMETERS:
                    found.add((name, node.name))
    assert not found


def test_only_the_compatibility_module_patches_megatron_and_torch():
    """No assignment to an attribute of a torch or megatron module outside ``cpu_compat``."""
    for path in PYTHON_FILES:
        if path.name == "cpu_compat.py" or "tests" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                root = target
                while isinstance(root, ast.Attribute):
                    root = root.value
                patched = isinstance(target, ast.Attribute) and isinstance(root, ast.Name)
                assert not (patched and root.id in ("torch", "megatron", "parallel_state", "tensor_parallel")), path


def test_torch_distributed_stays_out_of_the_pure_packages():
    for package in ("tree", "planning", "rollouts", "objectives"):
        for path in (REPOSITORY / "megatron_dta" / package).rglob("*.py"):
            assert "torch.distributed" not in path.read_text(), path
