"""Rules of the code base that a program can check: imports, lengths, docstrings, formatting, parameters and names."""

import ast
import gc
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from conftest import LONGEST_FIRST, REPOSITORY

PYTHON_FILES = sorted(
    path
    for folder in ("megatron_dta", "kernels", "tools", "benchmarks", "docs", "tests", "examples")
    for path in (REPOSITORY / folder).rglob("*.py")
)

MOST_PARAMETERS = 7
VAGUE_NAMES = {"own", "found", "each", "place", "places", "room", "rooms"}


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All nodes of a file, the module first."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@pytest.fixture(autouse=True, scope="module")
def _files_are_parsed_once() -> Iterator[None]:
    """The collector would look through a million nodes again and again."""
    gc.disable()
    yield
    nodes.cache_clear()
    gc.enable()


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
    if path.read_text(encoding="utf-8").count("\n") > 400:
        yield "a file of over 400 lines holds more than one idea"
    module = nodes(path)[0]
    if module.body and not ast.get_docstring(module):
        yield "a module says on top what it is and why"
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= 80:
            yield f"{node.name} has 80 lines or more"


def test_text_is_read_and_written_as_utf8():
    """Without ``encoding`` Python uses that of the user's locale. Tests are exempt."""
    faults = [
        f"{path.relative_to(REPOSITORY)}, line {call.lineno}: {ast.unparse(call)[:80]}"
        for path in PYTHON_FILES
        if not path.is_relative_to(REPOSITORY / "tests")
        for call in calls_without_encoding(nodes(path))
    ]
    assert not faults, "\n".join(faults)
    bad = ["open(p)", "p.read_text()", "p.open('a')", "open(p, mode='w')", "subprocess.run(c, text=True)"]
    good = [
        "open(p, 'rb')",
        "p.read_bytes()",
        "p.read_text(encoding='utf-8')",
        "run(c, encoding='utf-8')",
        "pool.open(i)",
    ]
    counts = [len(list(calls_without_encoding(ast.walk(ast.parse(code))))) for code in (*bad, *good)]
    assert counts == [1] * len(bad) + [0] * len(good)


def calls_without_encoding(nodes_of_file: Iterable[ast.AST]) -> Iterator[ast.Call]:
    """The calls that open a file or a pipe as text and leave the encoding to the locale."""
    for call in nodes_of_file:
        if not isinstance(call, ast.Call):
            continue
        is_method = isinstance(call.func, ast.Attribute)
        name = call.func.attr if is_method else getattr(call.func, "id", "")
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        if "encoding" in keywords or None in keywords:
            continue
        mode = next((ast.unparse(m) for m in (keywords.get("mode"), *call.args[not is_method :][:1]) if m), None)
        opens = name == "open" and (not is_method or (mode is not None and set(mode) <= set("'rwxabt+")))
        opens = opens and "b" not in (mode or "")
        if opens or name in ("read_text", "write_text") or keywords.keys() & {"text", "universal_newlines"}:
            yield call


def test_files_that_run_first_exist():
    listed = LONGEST_FIRST.read_text().split()
    assert [path for path in listed if not (REPOSITORY / path).is_file()] == []
    assert len(set(listed)) == len(listed)


def test_functions_have_few_parameters():
    """Kernels, and the rival with their contract, are exempt: they take pointers, sizes and strides one by one."""
    defined = set()
    for path in PYTHON_FILES:
        name = str(path.relative_to(REPOSITORY))
        if name.startswith(("kernels/", "tests/", "benchmarks/common/flash_attention/")):
            continue
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                if sum(argument.arg not in ("self", "cls") for argument in arguments) > MOST_PARAMETERS:
                    defined.add((name, node.name))
    assert not defined


def test_only_the_compatibility_module_patches_megatron_and_torch():
    """No assignment to an attribute of a torch or megatron module outside ``megatron_patches``."""
    for path in PYTHON_FILES:
        if path.name == "megatron_patches.py" or "tests" in path.parts:
            continue
        for node in nodes(path):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                root = target
                while isinstance(root, ast.Attribute):
                    root = root.value
                patched = isinstance(target, ast.Attribute) and isinstance(root, ast.Name)
                assert not (patched and root.id in ("torch", "megatron", "parallel_state", "tensor_parallel")), path


def test_no_wait_on_a_simple_queue_has_a_limit():
    """Before Python 3.13 it never ends if a signal comes and its handler takes as long as is left of it."""
    for path in PYTHON_FILES:
        text = path.read_text(encoding="utf-8")
        if "SimpleQueue(" not in text:
            continue
        for name in re.findall(r"(\w+)(?:: [^=]*)? = (?:queue\.)?SimpleQueue\(", text):
            assert re.search(rf"\b{name}\.get\(.*timeout", text) is None, f"{path}: take queue.Queue for {name}"


def test_torch_distributed_stays_out_of_the_pure_packages():
    for package in ("tree", "planning", "rollouts", "objectives"):
        for path in (REPOSITORY / "megatron_dta" / "core" / package).rglob("*.py"):
            assert "torch.distributed" not in path.read_text(), path


def test_no_variable_has_a_vague_name():
    """Variables and arguments are named by what they hold."""
    hits = []
    for path in PYTHON_FILES:
        if path.relative_to(REPOSITORY).parts[0] not in ("megatron_dta", "kernels"):
            continue
        for node in nodes(path):
            is_variable = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            name = node.id if is_variable else node.arg if isinstance(node, ast.arg) else None
            if name in VAGUE_NAMES:
                hits.append(f"{path.relative_to(REPOSITORY)}:{node.lineno}: {name}")
    assert hits == []


def test_no_files_import_each_other_in_a_circle():
    """Imports under ``TYPE_CHECKING`` and within functions count, too."""
    files = {_module(path): path for path in (REPOSITORY / "megatron_dta").rglob("*.py")}
    imports = {module: _imported(path, files) - {module} for module, path in files.items()}
    while leaves := {module for module, others in imports.items() if not others & imports.keys()}:
        for module in leaves:
            del imports[module]
    assert {module: sorted(others & imports.keys()) for module, others in imports.items()} == {}


def _module(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(path: Path, files: dict[str, Path]) -> set[str]:
    modules = set()
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            modules.update(name if name in files else node.module for name in names)
        elif isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
    return modules & files.keys()
