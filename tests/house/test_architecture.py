"""Rules of the code base that a program can check: imports, lengths, docstrings, formatting, parameters and names."""

import ast
import gc
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class File:
    """A file's place in the repository, its text and all nodes of its tree, the module first."""

    name: str
    text: str
    nodes: list[ast.AST]


@pytest.fixture(scope="module")
def findings() -> dict[str, list[str]]:
    """What each rule finds fault with; ``imports``: a line for each module of the package, and what it imports."""
    gc.disable()  # The collector would look through all nodes again and again; they end without it.
    faults: dict[str, list[str]] = {rule.__name__: [] for rule in (*RULES, imports)}
    for path in PYTHON_FILES:
        text = path.read_text(encoding="utf-8")
        file = File(str(path.relative_to(REPOSITORY)), text, list(ast.walk(ast.parse(text))))
        for rule in (*RULES, imports):
            faults[rule.__name__] += [f"{file.name}: {fault}" for fault in rule(file)]
    gc.enable()
    return faults


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


def short_and_explained(file: File) -> Iterator[str]:
    if file.text.count("\n") > 400:
        yield "a file of over 400 lines holds more than one idea"
    module = file.nodes[0]
    if module.body and not ast.get_docstring(module):
        yield "a module says on top what it is and why"
    for node in file.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= 80:
            yield f"{node.name} has 80 lines or more"


def text_is_utf8(file: File) -> Iterator[str]:
    """Without ``encoding`` Python uses that of the user's locale. Tests are exempt."""
    for call in () if file.name.startswith("tests/") else calls_without_encoding(file.nodes):
        yield f"line {call.lineno}: {ast.unparse(call)[:80]}"


def test_calls_without_encoding_are_seen():
    bad = ["open(p)", "p.read_text()", "p.open('a')", "open(p, mode='w')", "subprocess.run(c, text=True)"]
    good = ["open(p, 'rb')", "p.read_bytes()", "p.read_text(encoding='utf-8')", "run(c, encoding='utf-8')"]
    good += ["pool.open(i)"]
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


def few_parameters(file: File) -> Iterator[str]:
    """Kernels, and the rival with their contract, are exempt: they take pointers, sizes and strides one by one."""
    if file.name.startswith(("kernels/", "tests/", "benchmarks/common/flash_attention/")):
        return
    for node in file.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            if sum(argument.arg not in ("self", "cls") for argument in arguments) > MOST_PARAMETERS:
                yield node.name


def only_the_compatibility_module_patches(file: File) -> Iterator[str]:
    """No assignment to an attribute of a torch or megatron module outside ``megatron_patches``."""
    if file.name.endswith("/megatron_patches.py") or "tests" in Path(file.name).parts:
        return
    for node in file.nodes:
        for target in node.targets if isinstance(node, ast.Assign) else []:
            root = target
            while isinstance(root, ast.Attribute):
                root = root.value
            patched = isinstance(target, ast.Attribute) and isinstance(root, ast.Name)
            if patched and root.id in ("torch", "megatron", "parallel_state", "tensor_parallel"):
                yield f"line {node.lineno}"


def no_wait_on_a_simple_queue_has_a_limit(file: File) -> Iterator[str]:
    """Before Python 3.13 it never ends if a signal comes and its handler takes as long as is left of it."""
    if "SimpleQueue(" in file.text:
        for name in re.findall(r"(\w+)(?:: [^=]*)? = (?:queue\.)?SimpleQueue\(", file.text):
            if re.search(rf"\b{name}\.get\(.*timeout", file.text):
                yield f"take queue.Queue for {name}"


def no_vague_names(file: File) -> Iterator[str]:
    """Variables and arguments are named by what they hold."""
    for node in file.nodes if file.name.startswith(("megatron_dta/", "kernels/")) else ():
        is_variable = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        name = node.id if is_variable else node.arg if isinstance(node, ast.arg) else None
        if name in VAGUE_NAMES:
            yield f"line {node.lineno}: {name}"


RULES = (
    *(short_and_explained, text_is_utf8, few_parameters, only_the_compatibility_module_patches),
    *(no_wait_on_a_simple_queue_has_a_limit, no_vague_names),
)


@pytest.mark.parametrize("rule", [rule.__name__ for rule in RULES])
def test_all_files_keep_the_rule(findings: dict[str, list[str]], rule: str) -> None:
    assert findings[rule] == []


def test_torch_distributed_stays_out_of_the_pure_packages():
    for package in ("tree", "planning", "rollouts", "objectives"):
        for path in (REPOSITORY / "megatron_dta" / "core" / package).rglob("*.py"):
            assert "torch.distributed" not in path.read_text(), path


def imports(file: File) -> Iterator[str]:
    """Imports under ``TYPE_CHECKING`` and within functions count, too."""
    if file.name.startswith("megatron_dta/"):
        for node in file.nodes:
            if isinstance(node, ast.ImportFrom) and node.module:
                yield from (f"{node.module}.{alias.name} {node.module}" for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from (f"{alias.name} {alias.name}" for alias in node.names)


def test_no_files_import_each_other_in_a_circle(findings: dict[str, list[str]]) -> None:
    names = [str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "megatron_dta").rglob("*.py")]
    modules = {name: name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in names}
    imported: dict[str, set[str]] = {module: set() for module in modules.values()}
    for line in findings["imports"]:
        name, _, pair = line.partition(": ")
        whole, package = pair.split()
        imported[modules[name]] |= {whole if whole in imported else package} & imported.keys() - {modules[name]}
    assert sum(map(len, imported.values())) > len(imported)
    while leaves := {module for module, others in imported.items() if not others & imported.keys()}:
        for module in leaves:
            del imported[module]
    assert {module: sorted(others & imported.keys()) for module, others in imported.items()} == {}
