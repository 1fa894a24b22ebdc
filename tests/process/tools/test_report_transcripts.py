"""Transcripts of rollouts in the report: roles, trained tokens, exact text, and a search, in a real browser."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from conftest import seed_all
from headless_browser import Page
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.rollouts import Rollout, write_rollouts
from megatron_dta.extras.report import page as report_page
from megatron_dta.extras.report import read_run, report_html
from megatron_dta.extras.report.line_chart import Series, line_chart
from megatron_dta.extras.report.run_files import SavedStep
from megatron_dta.extras.report.transcripts import runs_from_tokens, transcripts, turns_of
from megatron_dta.sampling.prompts.tokenizer import HuggingFaceTokenizer
from megatron_dta.training.data.saved_rollouts import text_runs

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>")
HOSTILE = "</span><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"


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


def saved_run(folder: Path, tokenizer: HuggingFaceTokenizer, rollouts: list[Rollout]) -> Path:
    (folder / "rollouts").mkdir(parents=True)
    record = {"iteration": 1, "tokens": 30, "unique_tokens": 10, "tree_tflop": 1.0, "dense_tflop": 2.5, "timing": {}}
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    write_rollouts(folder / "rollouts" / "step_0000001.jsonl", rollouts)
    ids = sorted({int(token) for rollout in rollouts for token in rollout.token_ids})
    (folder / "rollouts" / "step_0000001_tokens.json").write_text(
        json.dumps({token: tokenizer.decode([token]) for token in ids})
    )
    (folder / "rollouts" / "step_0000001_texts.json").write_text(
        json.dumps([text_runs(rollout, tokenizer) for rollout in rollouts])
    )
    return folder


def agent_rollouts(tokenizer: HuggingFaceTokenizer) -> list[Rollout]:
    """Two groups: tools and long answers, wide characters, markup, and text that looks like a role."""
    rollouts = []
    for i in range(4):
        turns = [("system", "You can search.\tUse tools."), ("user", "Where is 東京 \N{ROCKET}?")]
        for turn in range(3):
            turns += [("assistant", f"call search({i}, {turn})" + " and think" * 40), ("tool", f"found {turn * 17}")]
        turns.append(("assistant", f"In Japan. NEEDLE{i}" + " 日本語" * 30))
        rollouts.append(chat(tokenizer, *turns, group_id="geography", reward=float(i % 2)))
    fake = "<|im_start|>".replace("|", "|\u200b")
    rollouts.append(chat(tokenizer, ("user", HOSTILE), ("assistant", f"{fake}system\n{HOSTILE}"), group_id="<b>"))
    return rollouts


def test_turns_have_their_roles_and_exact_texts(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t")
    rollout = chat(
        tokenizer, ("system", "be 東"), ("user", "hé"), ("assistant", "ü \N{ROCKET}"), ("user", "no"), ("assistant", "")
    )
    turns = turns_of(rollout, text_runs(rollout, tokenizer))
    assert [turn.role for turn in turns] == ["system", "user", "assistant", "user", "assistant"]
    assert "".join(text for turn in turns for text, _, _ in turn.pieces) == (
        "<|im_start|>system\nbe 東<|im_end|>\n<|im_start|>user\nhé<|im_end|>\n"
        "<|im_start|>assistant\nü \N{ROCKET}<|im_end|>\n"
        "<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n<|im_end|>"
    )
    trained = [text for turn in turns for text, is_trained, _ in turn.pieces if is_trained]
    assert trained == ["ü \N{ROCKET}", "<|im_end|>", "<|im_end|>"]
    # Llama's template names the role between two special tokens.
    ids = tokenizer.encode(
        "<|start_header_id|>user<|end_header_id|>\n\nhi<|start_header_id|>assistant<|end_header_id|>ok"
    )
    llama = Rollout(ids, np.arange(len(ids)) >= len(ids) - 2)
    assert [turn.role for turn in turns_of(llama, text_runs(llama, tokenizer))] == ["user", "assistant"]
    # Text that spells a special token is no role; without roles the mask tells the turns.
    plain = Rollout(np.array([*b"<|im_start|>system\nabcd"]) * 0 + tokenizer.encode("x")[0], np.arange(23) % 10 > 4)
    roles = [turn.role for turn in turns_of(plain, runs_from_tokens(plain, None))]
    assert roles == ["prompt", "model", "environment", "model", "environment"]


def test_only_token_texts_or_ids_are_known() -> None:
    rollout = Rollout(np.array([3, 4, 5, 6]), np.array([False, False, True, True]), reward=0.5)
    assert runs_from_tokens(rollout, {3: "a", 4: "b", 5: "", 6: "d"}) == [(2, "ab", False), (2, "<5>d", False)]
    assert runs_from_tokens(rollout, None) == [(2, "3 4 ", False), (2, "5 6 ", False)]
    (shown,), used = transcripts(SavedStep(1, [rollout], None), [rollout.group_id], 100)
    assert "reward 0.5, 4 tokens, 2 trained" in shown
    assert used == 8


def test_a_browser_reads_and_searches_them(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t")
    rollouts = agent_rollouts(tokenizer)
    page = tmp_path / "report.html"
    page.write_text(report_html(read_run(saved_run(tmp_path / "run", tokenizer, rollouts))), encoding="utf-8")
    with Page(page) as shown:

        def search(text: str) -> list[bool]:
            shown.evaluate(f"field.value = {json.dumps(text)}; search(); 0")
            return json.loads(shown.evaluate("JSON.stringify(rollouts.map(r => !r.hidden))"))

        assert shown.evaluate("document.title") == "Run run"
        assert shown.evaluate("document.querySelectorAll('script, img').length") == 1
        texts = json.loads(
            shown.evaluate(
                "JSON.stringify(rollouts.map(r => [...r.querySelectorAll('.text')].map(t => t.textContent).join('')))"
            )
        )
        whole = ["".join(text for _, text, _ in text_runs(rollout, tokenizer)) for rollout in rollouts]
        assert [text.replace("\\t", "\t").replace("\\u200b", "\u200b") for text in texts] == whole
        roles = shown.evaluate("[...rollouts[0].querySelectorAll('.turn > b')].map(b => b.textContent).join(' ')")
        assert roles == "system user" + " assistant tool" * 3 + " assistant"
        assert shown.evaluate("rollouts[0].querySelector('.trained').textContent").startswith("call search(0, 0)")
        assert not shown.evaluate("rollouts[0].open")

        # Typing searches too, a moment later.
        shown.evaluate("field.value = 'needle1'; field.dispatchEvent(new Event('input')); 0")
        while shown.evaluate("hits.textContent") != "in 1 of 5 rollouts":
            time.sleep(0.05)
        assert search("needle2") == [False, False, True, False, False]
        assert shown.evaluate("hits.textContent") == "in 1 of 5 rollouts"
        shown.evaluate("field.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter'})); 0")
        assert shown.evaluate("rollouts[2].open")
        assert shown.evaluate("hits.textContent") == "place 1 of 1"
        top = shown.evaluate("places[0].getBoundingClientRect().top")
        assert 0 < top < 1000
        assert shown.evaluate("CSS.highlights.get('here').size") == 1
        assert search("reward 1,") == [False, True, False, True, False]
        assert search("東京") == [True] * 4 + [False]
        assert search("<script>") == [False] * 4 + [True]
        assert search("nowhere") == [False] * 5
        assert search("") == [True] * 5
        shown.evaluate("document.getElementById('all').click()")
        assert shown.evaluate("rollouts.every(r => r.open)")
        assert shown.evaluate("document.documentElement.scrollWidth <= 1250")
        assert shown.evaluate("document.title") == "Run run"
        # On top stands what trees were worth.
        header = shown.evaluate("document.querySelector('header').innerText")
        assert "Trees: 3.00x token reuse" in header
        assert shown.complaints == []
        assert shown.requests == [page.resolve().as_uri()]


def test_nothing_is_printed_over_anything(tmp_path: Path) -> None:
    """Texts end with their bars, also those of wide characters; trees of many levels and axes stay on the page."""
    tokenizer = byte_tokenizer(tmp_path / "t")
    rng = seed_all(1)
    deep = [Rollout(rng.integers(97, 122, 3), np.arange(3) > 0, group_id="deep", reward=1.0)]
    for _ in range(60):
        tokens = np.append(deep[-1].token_ids, rng.integers(97, 122, 2))
        deep.append(Rollout(np.append(tokens, 1), np.arange(len(tokens) + 1) > 0, group_id="deep", reward=0.0))
        deep[-1] = Rollout(tokens, np.arange(len(tokens)) > 0, group_id="deep", reward=0.0)
    wide = [
        Rollout(np.array([5, 6 + i, *[7 + i] * (1 + 40 * i)]), np.arange(3 + 40 * i) > 0, group_id="wide", reward=i / 7)
        for i in range(4)
    ]
    # One token before the branches split again: a bar that is shorter than its reward.
    short = [
        Rollout(
            np.array([1] * 400 + middle + [9 + i] * 90), np.arange(490 + len(middle)) > 0, group_id="short", reward=r
        )
        for i, (middle, r) in enumerate((([2], 1 / 3), ([2, 3], 0.5), ([2, 3], 1.0), ([4], 0.0)))
    ]
    saved_run(tmp_path / "run", tokenizer, [*deep, *wide, *short])
    names = {token: "漢字" if token < 20 else "w" for token in range(256)}
    (tmp_path / "run" / "rollouts" / "step_0000001_tokens.json").write_text(json.dumps(names))
    page = tmp_path / "report.html"
    numbers = [(step, 1e6 + step * 1e-5) for step in (99_999_998, 99_999_999, 100_000_000)]
    chart = line_chart("digits", [Series("x", numbers)])
    assert chart is not None
    text = report_html(read_run(tmp_path / "run")).replace("</header>", f"</header>{chart}")
    page.write_text(text, encoding="utf-8")
    with Page(page) as shown:
        boxes = json.loads(
            shown.evaluate(
                """JSON.stringify([...document.querySelectorAll('figure > svg text')].filter(t => !t.closest('svg svg'))
                .map(t => [t.textContent, t.getBBox(), t.ownerSVGElement.viewBox.baseVal.width])
                .map(([text, {x, width}, whole]) => [text, x, x + width, whole]))"""
            )
        )
        assert len(boxes) > 40
        for label, left, right, whole in boxes:
            assert left >= -0.5, label
            assert right <= whole + 0.5, label
        # No reward stands on a bar, or on another reward. Boxes of texts are a little higher than their figures.
        places = json.loads(
            shown.evaluate(
                """JSON.stringify([...document.querySelectorAll('svg.tree')].map(picture =>
                [...picture.querySelectorAll('.node, .leaf, .branch')].map(n => [n.textContent, n.tagName === 'rect',
                n.getBBox()]).map(([text, bar, {x, y, width, height}]) => [text, bar, x, x + width, y, y + height])))"""
            )
        )
        texts = 0
        for picture in places:
            for i, (label, is_bar, left, right, top, bottom) in enumerate(picture):
                texts += not is_bar
                for other, _, begin, end, high, low in picture[i + 1 :] + picture[:i] if not is_bar else []:
                    apart = right <= begin + 1 or end <= left + 1 or bottom - 4 <= high or low <= top + 4
                    assert apart, f"{label} on {other}"
        assert texts > 8
        # What is shown of a bar's text is cut where the bar ends, and the reward stands behind it.
        ends = json.loads(
            shown.evaluate(
                """JSON.stringify([...document.querySelectorAll('svg.tree g')].filter(g => g.querySelector('svg')).map(
                g => [g.querySelector('rect'), g.querySelector('svg'), g.querySelector('.leaf')].map(
                n => n && (n.tagName === 'text' ? n.getBBox().x : n.x.baseVal.value + n.width.baseVal.value))))"""
            )
        )
        assert len(ends) >= 4
        for bar, inside, leaf in ends:
            assert inside == pytest.approx(bar, abs=0.02)
            assert leaf is None or leaf > bar + 2
        assert "hidden" in shown.evaluate("getComputedStyle(document.querySelector('svg.tree svg')).overflow")
        overflow = shown.evaluate(
            """[...document.querySelectorAll('svg.tree svg')].filter(s =>
            s.querySelector('text').getBBox().width > s.width.baseVal.value + 12).length"""
        )
        assert overflow == 0


def test_a_page_has_room_for_so_much_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t")
    run = read_run(saved_run(tmp_path / "run", tokenizer, agent_rollouts(tokenizer)))
    monkeypatch.setattr(report_page, "MOST_CHARACTERS", 3 * sum(len(text) for _, text, _ in run.steps[0].runs[0]) + 10)
    text = report_html(run)
    assert text.count('class="rollout"') == 3
    assert "The page contains the first 3 of 5" in text
    assert report_html(run, prompt="geography").count('class="rollout"') == 3
    assert report_html(run, prompt="<b>").count('class="rollout"') == 1
    assert "<b>Rollouts</b>: no group matches --prompt" in report_html(run, prompt="nothing")


@pytest.mark.parametrize(
    "content", ["{}", "[]", "[1, 2]", '[[[1, "a", false]], []]', '[[[0, "a", false]], 1]', '[[[true, "a", 1]], [[1]]]']
)
def test_damaged_texts_are_one_line(tmp_path: Path, content: str) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t")
    rollouts = agent_rollouts(tokenizer)[:2]
    folder = saved_run(tmp_path / "run", tokenizer, rollouts)
    (folder / "rollouts" / "step_0000001_texts.json").write_text(content)
    with pytest.raises(InputError, match=r"step_0000001_texts.json: (must contain a list|entry 1 must contain)"):
        read_run(folder)
