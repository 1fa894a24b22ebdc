"""``tools/report_run.py``: the page shows a run's data in a real browser and requests nothing from elsewhere."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from conftest import REPOSITORY, seed_all
from forked import run_python
from headless_browser import Page
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.planning.pipeline.timeline import TimelineEvent, write_timeline
from megatron_dta.core.rollouts import Rollout, write_rollouts
from megatron_dta.core.tree import build_prefix_tree
from megatron_dta.extras.report import read_run, report_html
from megatron_dta.extras.report.line_chart import MOST_POINTS, Series, line_chart, series_of
from megatron_dta.extras.report.markup import VOID, linear_ticks, log_ticks, tag, tick_labels
from megatron_dta.extras.report.tree_picture import color_of, node_figures
from trainer_cases import run as train

STEPS = 37


def made_up_run(folder: Path, rng: np.random.Generator) -> tuple[list[dict], list[Rollout], list[TimelineEvent]]:
    """A run with every kind of file and known figures."""
    records = []
    for step in range(1, STEPS + 1):
        seconds = rng.random(3).tolist()
        records.append(
            {
                "iteration": step,
                "reward": step / STEPS,
                "loss": None if step == 5 else float(rng.standard_normal()),
                "tokens": 300 + step,
                "unique_tokens": 100,
                "token_reuse": 3 + step / 100,
                "sampler_logprob_gap": 10.0 ** -int(rng.integers(1, 7)),
                "sampler_mismatch_alarm": step in (7, 9),
                "skipped": step == 5,
                "timing": {
                    "collect_seconds": 0.5,
                    "train_seconds": max(seconds),
                    "rank_train_seconds": seconds,
                    "rank_balance": sum(seconds) / 3 / max(seconds),
                    "speculation_acceptance": 0.5,
                },
            }
        )
    rollouts = []
    for group in "ab":
        prompt = rng.integers(0, 50, 12)
        for i in range(6):
            response = np.concatenate([rng.integers(0, 2, 3), rng.integers(0, 50, rng.integers(1, 9))])
            tokens = np.concatenate([prompt, response])
            mask = np.arange(len(tokens)) >= 12
            advantage = np.where(mask, 1.5 if i % 2 else -0.5, 0.0)
            rollouts.append(
                Rollout(tokens, mask, reward=float(i % 2), advantages=advantage, group_id=f"{group}<script>&\x00")
            )
    # One answer that came many times, with figures as long as they get: its label must fit.
    alike = Rollout(tokens, mask, reward=-123.4567, advantages=advantage * -0.01234567, group_id="c")
    rollouts += [alike] * 60
    events = []
    for stage in range(3):
        at = stage * 0.1
        for segment in range(5):
            for kind in "FB":
                length = float(rng.uniform(0.05, 0.2))
                events.append(TimelineEvent(stage, kind, segment, 0, at, at + length))
                at += length
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "settings.json").write_text(json.dumps({"--lr": 0.5, "--bf16": False, "--save": "<b>"}))
    (folder / "best_checkpoint.json").write_text(
        json.dumps({"checkpoint": "iter_0000030", "iteration": 30, "metric": "eval_reward", "value": 0.875})
    )
    for name in ("rollouts", "timeline"):
        (folder / name).mkdir(exist_ok=True)
    write_rollouts(folder / "rollouts" / "step_0000020.jsonl", rollouts)
    texts = {str(token): f" w{token}" if token else "</script>\n" for token in range(50)}
    (folder / "rollouts" / "step_0000020_tokens.json").write_text(json.dumps(texts))
    write_timeline(folder / "timeline" / "step_2.json", events)
    write_timeline(folder / "timeline" / "step_2_planned.json", events[:7])
    return records, rollouts, events


CURVE = """
JSON.stringify([...document.querySelectorAll(`section > .figures svg.chart[aria-label="%s"] g.series`)].map(
    s => [s.dataset.name, [...s.querySelectorAll('circle')].map(c => [c.cx.baseVal.value, c.cy.baseVal.value])]))
"""
BOX = "n => (({x, y, width, height}) => ({x, y, width, height}))(n.getBBox())"


def test_a_browser_shows_the_data(tmp_path: Path) -> None:
    """Checked are positions, sizes and colours of what was drawn, not only that there is something."""
    records, rollouts, events = made_up_run(tmp_path / "run", seed_all(1))
    page = tmp_path / "report.html"
    page.write_text(report_html(read_run(tmp_path / "run")), encoding="utf-8")
    with Page(page, height=1500) as shown:
        assert shown.complaints == []
        assert shown.requests == [page.resolve().as_uri()]
        assert shown.evaluate("document.title") == "Run run"
        assert shown.evaluate("document.querySelectorAll('script').length") == 1

        curves = dict(json.loads(shown.evaluate(CURVE % "reward")))
        assert set(curves) == {"sampled, each step", "sampled, mean of 10 steps"}
        spots = np.array(curves["sampled, each step"])
        assert spots.shape == (STEPS, 2)
        # Rewards rise evenly: so must the spots, in equal steps.
        assert np.ptp(np.diff(spots[:, 0])) < 0.05
        assert np.ptp(np.diff(spots[:, 1])) < 0.05
        assert spots[-1, 1] < spots[0, 1] - 100
        loss = dict(json.loads(shown.evaluate(CURVE % "loss")))["loss"]
        known = np.array([record["loss"] for record in records if record["loss"] is not None])
        assert len(loss) == STEPS - 1
        assert abs(np.corrcoef(np.array(loss)[:, 1], known)[0, 1] + 1) < 1e-4
        pieces = "section > .figures svg.chart[aria-label='loss'] path.curve"
        assert shown.evaluate(f'document.querySelectorAll("{pieces}").length') == 2
        gap = dict(json.loads(shown.evaluate(CURVE % "|trainer's - sampler's logprob|, mean and maximum")))
        logs = np.log10([record["sampler_logprob_gap"] for record in records])
        assert abs(np.corrcoef(np.array(gap["sampler_logprob_gap"])[:, 1], logs)[0, 1] + 1) < 1e-4

        trees = [build_prefix_tree([r.token_ids for r in rollouts[i : i + 6]]) for i in (0, 6)]
        trees.append(build_prefix_tree([rollouts[-1].token_ids]))
        for index, tree in enumerate(trees):
            nodes = f"document.querySelectorAll('svg.tree')[{index}].querySelectorAll('rect.node')"
            assert shown.evaluate(f"{nodes}.length") == tree.num_nodes
            boxes = json.loads(shown.evaluate(f"JSON.stringify([...{nodes}].map({BOX}))"))
            assert all(box["x"] >= 0 and box["x"] + box["width"] <= 1130 and box["width"] > 0 for box in boxes)
            fills = json.loads(shown.evaluate(f"JSON.stringify([...{nodes}].map(n => getComputedStyle(n).fill))"))
            colors = [tuple(int(part) for part in fill[4:-1].split(",")) for fill in fills]
            figures = node_figures(tree, rollouts[6 * index : 6 * index + tree.num_sequences])
            for (red, _, blue), figure in zip(colors, figures, strict=True):
                if figure.advantage is None:
                    assert red == blue
                elif abs(figure.advantage) > 0.1:
                    assert (blue > red) == (figure.advantage > 0)
        texts = f"JSON.stringify([...document.querySelectorAll('svg.tree text')].map({BOX}))"
        assert all(box["x"] + box["width"] <= 1130 for box in json.loads(shown.evaluate(texts)))
        leaves = json.loads(
            shown.evaluate("JSON.stringify([...document.querySelectorAll('svg.tree .leaf')].map(t => t.textContent))")
        )
        assert len(leaves) == sum(tree.num_leaves for tree in trees)
        assert any("reward 1  advantage +1.5" in text for text in leaves)

        ops = "document.querySelectorAll('svg.timeline')[1].querySelectorAll('rect.op')"
        boxes = json.loads(shown.evaluate(f"JSON.stringify([...{ops}].map({BOX}))"))
        lengths = [event.end - event.start for event in events]
        assert len(boxes) == len(events)
        assert abs(np.corrcoef([box["width"] for box in boxes], lengths)[0, 1] - 1) < 1e-4
        assert len({round(box["y"]) for box in boxes}) == 3
        ranks = json.loads(
            shown.evaluate(f"JSON.stringify([...document.querySelectorAll('svg.ranks rect')].map({BOX}))")
        )
        assert len(ranks) == 24 * 3
        assert shown.evaluate("document.querySelector('svg.phases').dataset.bars") == str(STEPS)
        assert "2 alarms (--sampler-mismatch-alarm), at steps 7, 9." in shown.evaluate("document.body.innerText")

        shown.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert shown.evaluate("document.documentElement.scrollWidth <= 1250")
        shown.screenshot(tmp_path / "page.png")
        assert shown.complaints == []
    from matplotlib.image import imread

    pixels = (imread(tmp_path / "page.png")[..., :3] * 255).round().astype(int)
    assert pixels.shape[0] > 3000
    for color in ((0x2F, 0x6F, 0xAB), (0xD9, 0x82, 0x2B), (0x4C, 0x9A, 0x4C)):
        assert (np.abs(pixels - color).sum(-1) < 12).sum() > 500, color


def test_the_browser_test_would_notice(tmp_path: Path) -> None:
    """A script, a picture from elsewhere and a style sheet: each is seen, and none gets past the page's policy."""
    made_up_run(tmp_path / "run", seed_all(2))
    text = report_html(read_run(tmp_path / "run"))
    bad = '<script>document.title = "changed"</script><img src="http://127.0.0.1:9/a.png">'
    bad += "<link rel=stylesheet href=b.css>"
    page = tmp_path / "bad.html"
    page.write_text(text.replace("<body>", f"<body>{bad}"), encoding="utf-8")
    with Page(page) as shown:
        assert shown.evaluate("document.title") == "Run run"
        assert len(shown.complaints) >= 3
        assert any("script" in complaint for complaint in shown.complaints)


class _Balance(HTMLParser):
    """Every element that is opened is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, name: str, attributes: list) -> None:
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name


def test_a_real_run_has_every_section(tmp_path: Path) -> None:
    seed_all(3)
    task = "--task arithmetic --arithmetic-max-operand 3 --rollout-batch-size 4 --n-samples-per-prompt 4"
    train(
        f"{task} --rollout-max-response-len 4 --train-iters 4 --save {tmp_path}/run --save-rollouts-interval 2 "
        f"--timeline-dir {tmp_path}/elsewhere --eval-interval 2 --keep-best-checkpoint eval_reward "
        "--rollout-speculation das --tree-segment-tokens 16"
    )
    command = [str(REPOSITORY / "tools" / "report_run.py"), f"{tmp_path}/run", "--prompts", "2"]
    done = run_python(command)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    checker = _Balance()
    checker.feed(text)
    assert checker.open == []
    assert text.count('class="tree"') == 6  # steps 1, 2, 4
    assert text.count('class="timeline"') == 1
    for missing in ("no timelines", "no rollouts", "nothing was drafted", "no times", "no step"):
        assert missing not in text
    assert "one data-parallel rank" in text
    assert "--arithmetic-max-operand" in text


def test_what_is_missing_is_told_with_its_flag(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "loss": 0.5, "timing": {}}\n')
    text = report_html(read_run(tmp_path))
    for flag in ("--timeline-dir", "--save-rollouts-interval", "--rollout-speculation das"):
        assert flag in text
    assert text.count('class="chart"') == 2  # the loss, and the loss among all metrics
    # What is missing takes a line each, and no headings.
    assert re.findall("<h2>(.*?)</h2>", text) == ["Loss and update", "Not in this run", "Every metric"]
    assert text.count("<li>") == 11


def tool(*arguments: str) -> str:
    command = [str(REPOSITORY / "tools" / "report_run.py"), *arguments]
    done = run_python(command)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    assert "no such folder" in tool(f"{tmp_path}/nothing")
    assert "--steps must be at least 1" in tool(f"{tmp_path}", "--steps", "0")
    with pytest.raises(InputError, match="contains no metrics"):
        read_run(tmp_path)
    made_up_run(tmp_path / "run", seed_all(4))
    with pytest.raises(InputError, match="contains no timelines"):
        read_run(tmp_path / "run", timeline_dir=tmp_path)
    (tmp_path / "run" / "rollouts" / "step_0000020_tokens.json").write_text("[1]")
    with pytest.raises(InputError, match="must contain one JSON object"):
        read_run(tmp_path / "run")
    (tmp_path / "run" / "rollouts" / "step_0000020_tokens.json").unlink()
    (tmp_path / "run" / "rollouts" / "step_0000020.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match="row 1: field 'token_ids'"):
        read_run(tmp_path / "run")


def test_long_runs_are_means() -> None:
    rng = seed_all(5)
    values = [(step, float(value)) for step, value in enumerate(rng.standard_normal(2 * MOST_POINTS + 7))]
    picture = line_chart("x", [Series("x", values)])
    assert f'data-points="{-(-len(values) // 3)}"' in picture
    assert line_chart("x", [series_of([{"iteration": 1, "a": None}], "a"), None]) is None


def test_axes_have_round_figures_that_differ() -> None:
    rng = seed_all(6)
    for _ in range(200):
        low = float(rng.standard_normal() * 10.0 ** rng.integers(-6, 6))
        high = low + float(rng.random() * 10.0 ** rng.integers(-6, 6)) + 1e-9
        ticks = linear_ticks(low, high)
        assert 1 <= len(ticks) <= 6 or high - low < 1e-6 * abs(low)
        assert all(low - 1e-6 * (high - low) <= t <= high + 1e-6 * (high - low) for t in ticks)
    assert tick_labels([1.0, 1.0000001, 1.0000002]) == ["1", "1.0000001", "1.0000002"]
    assert log_ticks(0.05, 2000) == [0.1, 1.0, 10.0, 100.0, 1000.0]


def test_everything_is_escaped() -> None:
    assert tag("b", "<i>&\x07", title='"<') == '<b title="&quot;&lt;">&lt;i&gt;&amp;\\x07</b>'
    assert color_of(None, 1.0) == "#d5d5d5"
    assert color_of(0.0, 1.0) == "#ffffff"


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text(json.dumps({"iteration": 1, "loss": 1.0}) + "\n")
    (tmp_path / "file").touch()
    done = run_python(["tools/report_run.py", str(run), "--output", str(tmp_path / "file" / "report.html")])
    message = f"error: {tmp_path}/file/report.html: cannot be written: Not a directory\n"
    assert (done.returncode, done.stderr) == (2, message)
