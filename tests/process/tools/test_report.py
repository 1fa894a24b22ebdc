"""``megatron-dta report-run``: the page of a run in a real browser, its texts, and damaged files."""

import html
import json
import math
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import REPOSITORY, seed_all
from forked import run_python
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.planning.pipeline.timeline import TimelineEvent
from megatron_dta.core.rollouts.load import write_rollouts
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.extras.report import page as report_page
from megatron_dta.extras.report import read_run, report_html
from megatron_dta.extras.report.run_files import SavedStep
from megatron_dta.extras.report.transcripts import runs_of_ids, transcripts, turns_of
from megatron_dta.sampling.prompts.tokenizer import HuggingFaceTokenizer
from megatron_dta.training.data.saved_rollouts import text_runs
from megatron_dta.training.monitor.timeline_files import write_timelines
from trainer_cases import run as train

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>")
HOSTILE = "</span><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">\x07"
STEPS = 37
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def browse(page: Path) -> tuple[str, list[str]]:
    """The document after its scripts have run, and what the console complains about."""
    wanted = os.environ.get("DTA_BROWSER")
    browser = next((path for name in ([wanted] if wanted else BROWSERS) if (path := shutil.which(name))), None)
    if browser is None:
        pytest.skip("no browser: install chromium, or let DTA_BROWSER name one")
    with tempfile.TemporaryDirectory(prefix="dta-browser-") as profile:
        flags = (
            f"--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --user-data-dir={profile}"
        )
        flags += " --window-size=1250,1000 --enable-logging=stderr --virtual-time-budget=5000 --dump-dom"
        command = [browser, *flags.split(), page.resolve().as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, re.findall(r":CONSOLE:\d+\] (.*)", done.stderr)


def evaluate(page: Path, script: str) -> Any:
    """What the body of an asynchronous JavaScript function returns, as JSON has it, in a copy without policy."""
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text(encoding="utf-8"))
    probe = "<script>(async () => {%s})().then(r => document.body.replaceChildren(JSON.stringify(r)));</script></body>"
    copy = page.with_name(f"probe_{page.name}")
    copy.write_text(text.replace("</body>", probe % script), encoding="utf-8")
    document, complaints = browse(copy)
    assert complaints == []
    return json.loads(html.unescape(re.search("<body>(.*)</body>", document, re.DOTALL)[1]))


def byte_tokenizer(folder: Path) -> HuggingFaceTokenizer:
    """A token a byte, so that single tokens are parts of characters, and the special tokens of chat templates."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return HuggingFaceTokenizer(folder, eos_ids=[len(alphabet) + 1])


def chat(tokenizer: HuggingFaceTokenizer, *turns: tuple[str, str], **fields: object) -> Rollout:
    """Turns in ChatML; the assistant's, with their end, are trained."""
    ids: list[int] = []
    mask: list[bool] = []
    for role, text in turns:
        parts = [(f"<|im_start|>{role}\n", False), (f"{text}<|im_end|>", role == "assistant"), ("\n", False)]
        for part, trained in parts:
            new = tokenizer.encode(part).tolist()
            ids, mask = ids + new, mask + [trained] * len(new)
    last = max(i for i, trained in enumerate(mask) if trained)
    return Rollout(np.array(ids[: last + 1]), np.array(mask[: last + 1]), **fields)


def made_up_rollouts(tokenizer: HuggingFaceTokenizer) -> list[Rollout]:
    """Groups with tools, hostile texts, answers inside others, and many equal answers with long figures."""
    rollouts = []
    for i in range(4):
        turns = [("system", "You can search.\tUse tools."), ("user", "Where is 東京 \N{ROCKET}?")]
        for turn in range(3):
            turns += [("assistant", f"call search({i}, {turn})" + " and think" * 40), ("tool", f"found {turn * 17}")]
        turns.append(("assistant", f"In Japan. NEEDLE{i}" + " 日本語" * 30))
        rollout = chat(tokenizer, *turns, group_id="geography", reward=float(i % 2))
        rollouts.append(replace(rollout, advantages=np.where(rollout.loss_mask, 1.5 if i % 2 else -0.5, 0.0)))
    rollouts.append(chat(tokenizer, ("user", HOSTILE), ("assistant", f"system\n{HOSTILE}"), group_id="<b>" + HOSTILE))
    tokens = np.array([5])
    for i in range(60):
        tokens = np.append(tokens, [i % 7, 50 + i])
        rollouts.append(Rollout(tokens, np.arange(len(tokens)) > 0, group_id="deep", reward=i / 7))
    return rollouts + [Rollout(tokens, np.arange(len(tokens)) > 0, reward=-123.4567, group_id="equal")] * 60


def save_rollouts(folder: Path, tokenizer: HuggingFaceTokenizer, rollouts: list[Rollout]) -> None:
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    write_rollouts(folder / "rollouts" / "step_0000020.jsonl", rollouts)
    ids = np.unique(np.concatenate([rollout.token_ids for rollout in rollouts])).tolist()
    files = {
        "tokens": {token: tokenizer.decode([token]) for token in ids},
        "texts": [text_runs(rollout, tokenizer) for rollout in rollouts],
    }
    for name, content in files.items():
        (folder / "rollouts" / f"step_0000020_{name}.json").write_text(json.dumps(content))


def save_metrics(folder: Path, rng: np.random.Generator) -> None:
    lines = []
    for step in range(1, STEPS + 1):
        seconds = rng.random(3).tolist()
        record = {
            "iteration": step,
            "reward": step / STEPS,
            "loss": None if step == 5 else float(rng.standard_normal()),
            "tokens": 300 + step,
            "unique_tokens": 100,
            "sampler_logprob_gap": 10.0 ** -int(rng.integers(1, 7)),
            "skipped": step == 5,
            HOSTILE: 1.0,
            "timing": {"collect_seconds": 0.5, "train_seconds": max(seconds), "rank_train_seconds": seconds},
        }
        lines.append(json.dumps(record) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run with every kind of file; texts of all kinds are hostile."""
    folder, rng = tmp_path_factory.mktemp("report") / "run", seed_all(1)
    tokenizer = byte_tokenizer(folder.parent / "tokenizer")
    save_rollouts(folder, tokenizer, made_up_rollouts(tokenizer))
    save_metrics(folder, rng)
    (folder / "settings.json").write_text(json.dumps({"--lr": 0.5, "--bf16": False, "--save": [HOSTILE]}))
    best = {"checkpoint": HOSTILE, "iteration": 30, "metric": "eval_reward", "value": 0.875}
    (folder / "best_checkpoint.json").write_text(json.dumps(best))
    (folder / "sessions").mkdir()
    call = {"parent": None, "prompt_length": 3, "context": [1], "output": [2], "context_text": HOSTILE}
    call |= {"output_text": HOSTILE, "finish": "stop", "branch": None, "reward": None, "seconds": 0.5, "tools": []}
    session = {"session": HOSTILE, "group_id": "g", "reward": 1.0, "failure": None, "calls": [call]}
    retry = call | {"branch": "again", "tools": [HOSTILE], "context_text": "NEEDLE"}
    others = [session | {"reward": i / 4, "calls": [call] * i + [retry] * (i > 1)} for i in range(1, 4)]
    lines = [session, *others, session | {"reward": math.nan, "failure": "time-out"}]  # NaN is no JSON in a browser
    (folder / "sessions" / "batch_0000001.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "timeline").mkdir()
    events = [TimelineEvent(i % 3, "FB"[i % 2], i, 0, float(i), i + 0.5) for i in range(20)]
    write_timelines(folder / "timeline" / "step_2.json", {"planned": events[:7], "measured": events})
    path = folder / "report.html"
    path.write_text(report_html(read_run(folder), most_prompts=4), encoding="utf-8")
    return path


class _Elements(HTMLParser):
    """Checks that elements are closed in order, and counts them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, name: str, attributes: list) -> None:
        self.names.append(name)
        assert not any(key.startswith("on") for key, _ in attributes)
        if name not in ("input", "meta"):
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name


def test_texts_become_neither_markup_nor_code(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    names = _Elements(text).names
    assert names.count("script") == 1
    assert "img" not in names
    # Group, transcript, tree, metric, setting, checkpoint and session, each shown as it is.
    assert text.count("document.title=&#39;taken&#39;") >= 10
    assert "\x07" not in text


# Bodies of asynchronous JavaScript functions, which one browser runs one after the other.
PROBES = {
    "layout": """const boxes = (root, names) => [...root.querySelectorAll(names)].map(n => {
    const {left, right, top, bottom} = n.getBoundingClientRect();
    return [n.textContent, left, right, top, bottom, getComputedStyle(n).backgroundColor];});
return {titles: [...document.querySelectorAll('h2')].map(h => h.textContent), text: document.body.innerText,
    width: document.documentElement.scrollWidth,
    trees: [...document.querySelectorAll('.tree')].map(t => boxes(t, '.bar, .leaf, .mean')),
    charts: boxes(document, 'figure svg'), labels: boxes(document, 'figure svg text')};""",
    "search": """const find = text => { field.value = text; search(); return rollouts.filter(r => !r.hidden).length; };
const key = () => field.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter'}));
const result = {
    texts: rollouts.slice(0, 5).map(r => [...r.querySelectorAll('.text')].map(t => t.textContent).join('')),
    roles: [...rollouts[0].querySelectorAll('.turn > b')].map(b => b.textContent).join(' '),
    trained: rollouts[0].querySelector('.trained').textContent, was_open: rollouts[0].open};
field.value = 'needle1'; field.dispatchEvent(new Event('input'));
await new Promise(done => setTimeout(done, 300));
result.typed = hits.textContent;
result.counts = ['needle2', 'reward 1, adv', '東京', '<script>', 'nowhere', ''].map(find);
find('needle2'); key();
const top = places[0].getBoundingClientRect().top;
Object.assign(result, {opened: rollouts[2].open, place: hits.textContent, visible: 0 < top && top < 1000,
    marked: CSS.highlights.get('here').size});
find(''); document.getElementById('all').click();
return {...result, all: rollouts.every(r => r.open), title: document.title};""",
    "sessions": """const set = (id, value) => { document.getElementById(id).value = value; filterSessions(); };
const shown = () => [...document.querySelectorAll('.session:not([hidden])')].map(s => sessions.indexOf(s));
const only = (id, value) => { set(id, value); const result = shown(); set(id, ''); return result; };
const tool = document.getElementById('tool').options[1].value;
return [only('text', 'needle'), only('text', 'nowhere'), only('tool', tool), only('branch', 'again'),
    only('state', 'failed'), only('state', 'complete'), only('low', '0.5'), only('high', '0.5'),
    only('order', 'reward'), only('order', 'calls'), shown(), found.textContent];""",
}


@pytest.fixture(scope="module")
def shown(page: Path) -> dict[str, Any]:
    """What each probe returns."""
    calls = ", ".join(f"{name}: await (async () => {{{probe}}})()" for name, probe in PROBES.items())
    return evaluate(page, f"return {{{calls}}};")


def test_a_browser_shows_the_page(shown: dict[str, Any]) -> None:
    layout = shown["layout"]
    assert "Not in this run" in layout["titles"]
    assert layout["width"] <= 1250
    assert len(layout["charts"]) > 6
    assert all(right - left > 500 for _, left, right, *_ in layout["charts"])
    assert all(left >= 0 and right <= 1250 for _, left, right, *_ in layout["labels"])
    assert len(layout["trees"]) == 4
    for tree in layout["trees"]:
        for i, (label, left, right, top, bottom, _) in enumerate(tree):
            assert 0 <= left < right <= 1250, label
            for other, begin, end, high, low, _ in tree[:i]:
                apart = right <= begin + 1 or end <= left + 1 or bottom <= high + 1 or low <= top + 1
                assert apart, f"{label} on {other}"
    geography, hostile, deep, equal = layout["trees"]
    labels = {text: color for text, *_, color in geography}
    assert {"reward 0  advantage -0.5", "reward 1  advantage +1.5", "⌀ 0.5"} <= labels.keys()
    channels = [[int(c) for c in re.findall(r"\d+", color)] for text, color in labels.items() if " and think" in text]
    assert sorted(blue > red for red, _, blue, *_ in channels) == [False, False, True, True]
    assert len(hostile) == 2
    assert sum(text.startswith("reward") for text, *_ in deep) == 60
    assert "60 times  reward -123.5" in [text for text, *_ in equal]


def test_the_policy_stops_what_does_not_belong_to_the_page(page: Path) -> None:
    """And nothing else: the page itself loads nothing."""
    bad = page.with_name("bad.html")
    bad.write_text(
        page.read_text(encoding="utf-8").replace(
            "<body>",
            '<body><script>document.title = "changed"</script><img src="http://127.0.0.1:9/a.png">'
            "<link rel=stylesheet href=b.css>",
        ),
        encoding="utf-8",
    )
    document, complaints = browse(bad)
    assert "<title>Run run</title>" in document
    assert len(complaints) == 3


def test_a_browser_searches_the_transcripts(shown: dict[str, Any], tmp_path: Path) -> None:
    searched = shown["search"]
    tokenizer = byte_tokenizer(tmp_path / "t")
    rollouts = made_up_rollouts(tokenizer)[:5]
    texts = ["".join(text for _, text, _ in text_runs(rollout, tokenizer)) for rollout in rollouts]
    assert searched.pop("texts") == [text.replace("\x07", "\\x07") for text in texts]
    assert searched.pop("trained").startswith("call search(0, 0)")
    assert searched == {
        "roles": "system user" + " assistant tool" * 3 + " assistant",
        "was_open": False,
        "typed": "in 1 of 125 rollouts",
        "counts": [1, 2, 4, 1, 0, 125],
        "opened": True,
        "place": "place 1 of 1",
        "visible": True,
        "marked": 1,
        "all": True,
        "title": "Run run",
    }


def test_a_browser_filters_and_sorts_sessions(shown: dict[str, Any]) -> None:
    filters = [[2, 3], [], [2, 3], [2, 3], [4], [0, 1, 2, 3], [0, 2, 3], [1, 2]]
    assert shown["sessions"] == [*filters, [0, 3, 2, 1, 4], [3, 2, 0, 1, 4], [0, 1, 2, 3, 4], "5 of 5 sessions"]


def test_turns_have_their_roles_and_exact_texts(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t")
    rollout = chat(tokenizer, ("system", "be 東"), ("user", "hé"), ("assistant", "ü \N{ROCKET}"), ("assistant", ""))
    turns = turns_of(rollout, text_runs(rollout, tokenizer))
    assert [turn.role for turn in turns] == ["system", "user", "assistant", "assistant"]
    trained = [text for turn in turns for text, is_trained, _ in turn.pieces if is_trained]
    assert trained == ["ü \N{ROCKET}", "<|im_end|>", "<|im_end|>"]
    # Llama's template names the role between two special tokens.
    ids = tokenizer.encode(
        "<|start_header_id|>user<|end_header_id|>\n\nhi<|start_header_id|>assistant<|end_header_id|>ok"
    )
    llama = Rollout(ids, np.arange(len(ids)) >= len(ids) - 2)
    assert [turn.role for turn in turns_of(llama, text_runs(llama, tokenizer))] == ["user", "assistant"]
    # Without roles the mask tells the turns, and without texts the ids are shown.
    plain = Rollout(np.arange(23), np.arange(23) % 10 > 4, reward=0.5)
    roles = [turn.role for turn in turns_of(plain, runs_of_ids(plain))]
    assert roles == ["prompt", "model", "environment", "model", "environment"]
    ((title, turns),), used = transcripts(SavedStep(1, [plain], None), [plain.group_id], 100)
    assert "reward 0.5, 23 tokens, 10 trained" in title
    assert turns[0].pieces == [("0 1 2 3 4 ", False, False)]
    assert used == sum(len(str(i)) + 1 for i in range(23))


def test_a_page_has_a_limit_of_texts_and_chooses_groups(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = read_run(page.parent)
    monkeypatch.setattr(report_page, "MOST_CHARACTERS", 3 * sum(len(text) for _, text, _ in run.steps[0].runs[0]) + 10)
    sections = report_page._rollouts(run, 3, "geo")
    assert [len(section.rollouts) for section in sections] == [0, 3]
    assert sections[0].trees[0].title.startswith("step 20, group geography: 4 rollouts of")
    assert "The page contains the first 3 of 4" in sections[1].note
    assert report_page._rollouts(run, 3, "nothing")[1].missing == "no group matches --prompt"
    monkeypatch.setattr(report_page, "MOST_CHARACTERS", 3 * 2 * len(HOSTILE))
    assert "The page contains the first 2 of 5 sessions" in report_page._sessions(run, None).note


def test_what_is_missing_is_told_with_its_flag(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "loss": 0.5, "timing": {}}\n')
    text = report_html(read_run(tmp_path))
    for flag in ("--timeline-dir", "--save-rollouts-interval", "--rollout-speculation das"):
        assert flag in text
    # What is missing takes a line each, and no headings.
    assert re.findall("<h2>(.*?)</h2>", text) == ["Loss and update", "Not in this run", "Every metric"]
    assert text.count("<li>") == 11


def test_a_real_run_has_every_section(tmp_path: Path) -> None:
    seed_all(3)
    task = "--task arithmetic --arithmetic-max-operand 3 --rollout-batch-size 4 --n-samples-per-prompt 4"
    train(
        f"{task} --rollout-max-response-len 4 --train-iters 2 --save {tmp_path}/run --save-rollouts-interval 2 "
        f"--timeline-dir {tmp_path}/elsewhere --eval-interval 2 --keep-best-checkpoint eval_reward "
        "--rollout-speculation das --tree-segment-tokens 16"
    )
    done = run_python([str(REPOSITORY / "tools" / "report_run.py"), f"{tmp_path}/run", "--prompts", "2"])
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    _Elements(text)
    assert text.count('class="wide tree"') == 4  # steps 1 and 2
    for missing in ("no timelines", "no rollouts", "nothing was drafted", "no times", "no step"):
        assert missing not in text
    assert "one data-parallel rank" in text
    assert "--arithmetic-max-operand" in text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metrics.jsonl", "", "contains no metrics"),
        ("rollouts/step_0000020.jsonl", "{}\n", "row 1: field 'token_ids'"),
        ("rollouts/step_0000020_texts.json", '[[[true, "a", 1]]]', "entry 1 must contain"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t")
    save_rollouts(tmp_path, tokenizer, made_up_rollouts(tokenizer)[:1])
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "loss": 0.5, "timing": {}}\n')
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        read_run(tmp_path)
