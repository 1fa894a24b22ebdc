"""The pages in docs/: flags, files and tools that they name exist, their Python runs, their pictures are current."""

import json
import re
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import draw_concepts
import pytest

from conftest import REPOSITORY, seed_all
from megatron_dta.sampling.config.sampling import RewardConfig
from megatron_dta.sampling.environment import load_environment
from megatron_dta.sampling.prompts import load as prompts
from megatron_dta.sampling.prompts.chat_template import ChatTemplate
from megatron_dta.sampling.prompts.load import PromptReader
from megatron_dta.sampling.prompts.tokenizer import HuggingFaceTokenizer
from megatron_dta.sampling.rewards.code_reward import CodeTests
from megatron_dta.sampling.rewards.registry import Response, load_reward_function
from megatron_dta.sampling.rewards.scoring import Scorer
from megatron_dta.training.arguments import build_parser
from megatron_dta.training.config.checks.other_names import markdown_table
from megatron_dta.training.monitor.metric_names import METRICS
from one_reward import compute_reward

BESIDE_DOCS = ("README.md", "CONTRIBUTING.md", "slurm/README.md", "benchmarks/results/README.md")
PAGES = sorted((REPOSITORY / "docs").rglob("*.md")) + [REPOSITORY / name for name in BESIDE_DOCS]
# These name flags of other programs, pip and servers among them, and those of plan-run, which are made in a loop.
OTHERS = ("latent_attention", "one_node_70b", "planning_runs", "reference", "rollout_servers", "transformer_engine")
FLAG_PAGES = [page for page in PAGES if page.parent.name == "docs" and page.stem not in OTHERS]
# Flags of other programs that pages name: servers, torchrun, pip, Slurm; and slime's, which a table translates.
FOREIGN = {"--standalone", "--nproc-per-node", "--nnodes", "--max-restarts", "--port", "--model-path", "--tp"}
FOREIGN |= {"--tensor-parallel-size", "--allowedTools", "--disable"}


@cache
def flags_of_this_project() -> set[str]:
    flags = {action.option_strings[0] for action in build_parser()._actions}
    for folder in ("benchmarks", "examples", "megatron_dta", "tools"):
        for file in (REPOSITORY / folder).rglob("*.py"):
            flags |= set(re.findall(r'\badd(?:_argument)?\(\s*"(--[\w-]+)"', file.read_text()))
    return flags


@pytest.mark.parametrize("page", FLAG_PAGES, ids=lambda page: page.name)
def test_flags_exist(page: Path) -> None:
    text = page.read_text()
    if page.name == "from_verl_and_slime.md":
        # Only the last column of the table is ours.
        text = "\n".join(line.split("|")[-2] if line.startswith("|") else line for line in text.splitlines())
        text = text.replace("--apply-chat-template", "")
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*\b(?!-)", text))
    assert named - flags_of_this_project() - FOREIGN == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        if "://" not in target:
            linked = page.parent / target if target else page
            assert linked.exists(), target
            assert not anchor or anchor in anchors_of(linked), f"{target}#{anchor}"


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_lines_to_read_are_counted() -> None:
    page = REPOSITORY / "docs" / "reading_the_core.md"
    counted = re.findall(r"\]\(([^)]+)\) \| (\d+) \|", page.read_text())
    assert len(counted) > 20
    for file, lines in counted:
        length = len((page.parent / file).read_text().splitlines())
        assert abs(length - int(lines)) <= 0.1 * length, f"{file} has {length} lines, the page says {lines}"
    assert sum(int(lines) for _, lines in counted) <= 12_000


def test_named_files_exist() -> None:
    folders = ("benchmarks", "docs", "examples", "kernels", "megatron_dta", "slurm", "tests", "tools")
    paths = [str(path) for folder in folders for path in (REPOSITORY / folder).rglob("*.*")]
    for page in PAGES:
        for name in re.findall(r"`([\w.-]+/[\w./-]+\.(?:py|json|args|sh))`", page.read_text()):
            assert any(path.endswith(f"/{name}") for path in paths), f"{page.name} names {name}"


# Keys and tensors of other programs.
FOREIGN_NAMES = {"experts.gate_up_proj", "experts.down_proj"}
FOREIGN_FILES = ("integrations", "other_names.py")


def test_named_modules_exist() -> None:
    """``megatron_dta.x.y`` in documents, and ``x.y`` in docstrings: the end of a module's name, or a name in one."""
    modules = {_dotted(path): path for path in (REPOSITORY / "megatron_dta").rglob("*.py")}
    folders = {part for name in modules for part in name.split(".")[:-1]}
    texts = [(page, re.findall(r"`(megatron_dta(?:\.\w+)+)\b", page.read_text())) for page in PAGES]
    for path in modules.values():
        if not {path.name, *path.parts} & {*FOREIGN_FILES}:
            texts.append((path, re.findall(r"``([a-z_]+(?:\.\w+)+)``", path.read_text())))
    faults = []
    for text, names in texts:
        for name in {*names} - FOREIGN_NAMES:
            package, _, last = name.rpartition(".")
            if name.split(".")[0] not in folders or last in ("json", "html", "safetensors"):
                continue
            is_module = any(f".{module}".endswith(f".{name}") for module in modules)
            files = [path for module, path in modules.items() if f".{module}".endswith(f".{package}")]
            if not is_module and not any(re.search(rf"\b{last}\b", path.read_text()) for path in files):
                faults.append(f"{text.relative_to(REPOSITORY)} names {name}")
    assert not faults, "\n".join(faults)


def _dotted(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_metrics_exist() -> None:
    known = {name for metrics in METRICS.values() for name in metrics}
    for name in ("custom_reward.md", "custom_environment.md"):
        text = (REPOSITORY / "docs" / name).read_text()
        for metric in re.findall(r"`((?:reward|code|environment)_(?:failures|timeouts|retries|steps))`", text):
            assert metric in known


def python_in(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / name).read_text(), re.DOTALL)


def test_the_reward_works(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(python_in("custom_reward.md")[0])
    function = load_reward_function(f"{tmp_path}/r.py:reward")
    assert compute_reward(function, "p", {"answer": 5}, "it is 5", [1, 2]) == 1 - 0.002
    for line in re.findall(
        r'^\{"prompt": "W.*|^\{"prompt": "R.*', (REPOSITORY / "docs/custom_reward.md").read_text(), re.M
    ):
        record = json.loads(line)
        right = "def add(a, b): return a + b" if "add" in line else "print(sum(map(int, input().split())))"
        tests = CodeTests(RewardConfig(code_unconfined=True))
        assert compute_reward(tests, "p", record, f"```python\n{right}\n```", []) == 1
        assert compute_reward(tests, "p", record, "```python\nprint(1)\n```", []) == 0


def test_the_environments_work(tmp_path: Path) -> None:
    for number, code in enumerate(python_in("custom_environment.md")):
        (tmp_path / f"e{number}.py").write_text(code)
    game = load_environment(f"{tmp_path}/e0.py:GuessNumber")()
    assert game.reset({"answer": "7"}) is None
    assert game.step(" 3 ") == (" higher: ", 0.0, False)
    assert game.step("nine")[1:] == (-0.1, False)
    assert game.step("7") == ("", 1.0, True)
    tools = load_environment(f"{tmp_path}/e1.py:Calculator")()
    tools.reset({"answer": 3})
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    assert tools.step(call) == ("<tool_response>3</tool_response>", 0.0, False)
    assert tools.step("3") == ("", 1.0, True)


def test_the_table_of_names_is_that_of_the_command_line() -> None:
    """A new row belongs into ``checks.other_names``; the document shows what ``markdown_table`` returns."""
    assert markdown_table() in (REPOSITORY / "docs" / "from_verl_and_slime.md").read_text()


def test_verls_rows_become_prompts(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(("[END]", "user", "abc", "now"))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[END]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="[END]")
    turns = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    fast.chat_template = turns + "{% if add_generation_prompt %}now{% endif %}"
    fast.save_pretrained(tmp_path / "model")
    rows = [{"prompt": [{"role": "user", "content": "abc"}], "reward_model": {"ground_truth": "5"}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "v.parquet")
    tokenizer, template = HuggingFaceTokenizer(tmp_path / "model"), ChatTemplate(tmp_path / "model")
    (prompt,) = PromptReader(tokenizer, template=template).read(tmp_path / "v.parquet")
    assert (prompt.token_ids.tolist(), prompt.record["answer"]) == ([1, 2, 3], "5")
    (tmp_path / "r.py").write_text(python_in("from_verl_and_slime.md")[0])
    scorer = Scorer(load_reward_function(f"{tmp_path}/r.py:compute_score"))
    assert scorer.score([Response("p", prompt.record, "so 5", [])]) == [1.0]
    assert scorer.tally.components == {"characters": (4.0, 1)}


def test_the_batched_reward_works(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(python_in("custom_reward.md")[1])
    scorer = Scorer(load_reward_function(f"{tmp_path}/r.py:rewards"))
    rewards = scorer.score([Response("p", {"answer": 5}, text, []) for text in ("5", "12")])
    assert rewards == pytest.approx([1.05, 0.1 / 3])
    assert scorer.tally.components["right"] == (1.0, 2)


def test_the_prompt_fields_are_all_told() -> None:
    table = (REPOSITORY / "docs" / "data.md").read_text()
    for name in (*prompts._FIELDS, "answer", "reward_model", "tools", "id", "tests", "code_prefix"):
        assert f"`{name}`" in table


def test_pictures_are_up_to_date_and_say_what_the_text_says() -> None:
    seed_all(1)
    for name, content in draw_concepts.pictures().items():
        assert (REPOSITORY / "docs" / name).read_text() == content, "run python docs/scripts/draw_concepts.py"
        ElementTree.fromstring(content)
    plan, words = draw_concepts.example()
    text = (REPOSITORY / "docs" / "concepts.md").read_text()
    total = sum(len(draw_concepts.PROMPT) + len(answer) for answer in draw_concepts.ANSWERS)
    assert f"computes {total} tokens, the tree {len(words)}" in text
    assert f"{total} / {len(words)} = {total / len(words):.2f}" in text
    assert plan.peak_in_flight_tokens == draw_concepts.MEMORY_TOKENS == 11
    assert draw_concepts.SEGMENT_TOKENS == 5
