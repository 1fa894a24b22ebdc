"""Draws the pictures of docs/concepts.md, by the planner itself: docs/concepts_tree.svg, _mask.svg, _segments.svg.

    python docs/scripts/draw_concepts.py [--output docs]

Three answers to one question, a few tokens each, so that every number in the pictures can be checked by hand.
"""

from __future__ import annotations

import html
from pathlib import Path

import numpy as np

from megatron_dta.common.command_line import CommandLineParser
from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.core.common.files import replacing
from megatron_dta.core.planning.segments.plan import OpKind, SegmentPlan, depth_first_schedule, plan_segments
from megatron_dta.core.tree import build_prefix_tree

PROMPT = ["2", "+", "3", "=", "?"]
ANSWERS = [["I", "add", ":", "5", "."], ["I", "add", ":", "6", "?", "no"], ["5", "!"]]
REWARDS = (1.0, 0.0, 1.0)
SEGMENT_TOKENS, MEMORY_TOKENS = 5, 11
# Segments in order; light enough for black text.
COLORS = ("#9fc3e6", "#f2bd86", "#a9d3a3", "#cdb1dc", "#e8a79d", "#d9cf8f")
FONT = {"font_family": "sans-serif", "fill": "#222222"}
CELL, GAP = 40, 4


def example() -> tuple[SegmentPlan, list[str]]:
    """The plan of the three answers and the text of each token of its stream."""
    sequences = [PROMPT + answer for answer in ANSWERS]
    words = sorted({word for sequence in sequences for word in sequence})
    tree = build_prefix_tree([np.array([words.index(word) for word in sequence], np.int32) for sequence in sequences])
    plan = plan_segments(tree, SEGMENT_TOKENS, MEMORY_TOKENS)
    return plan, [words[token] for token in plan.tree.token_ids]


def segment_of(plan: SegmentPlan) -> list[int]:
    """Segment of each token of the stream."""
    return np.repeat(np.arange(plan.num_segments), plan.lengths).tolist()


def tag(name: str, content: str = "", **attributes: object) -> str:
    """An element; in names of attributes underscores stand for dashes."""
    values = {key: f"{value:g}" if isinstance(value, float) else value for key, value in attributes.items()}
    written = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in values.items())
    return f"<{name}{written}>{html.escape(content, quote=False)}</{name}>"


def svg(width: float, height: float, parts: list[str], title: str) -> str:
    """A picture on white; ``title`` describes it to screen readers."""
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    background = tag("rect", width="100%", height="100%", fill="#ffffff")
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{title}">'
    return f"{head}{background}{''.join(parts)}</svg>\n"


def text(x: float, y: float, content: str, size: float = 13, anchor: str = "middle", **more: object) -> str:
    """A line of text; ``y`` is its base line."""
    return tag("text", content, x=x, y=y, font_size=size, text_anchor=anchor, **{**FONT, **more})


def box(x: float, y: float, content: str, color: str, width: float = CELL) -> list[str]:
    """A token."""
    rect = tag("rect", x=x, y=y, width=width, height=CELL - 8, rx=4, fill=color, stroke="#777777")
    return [rect, text(x + width / 2, y + 21, content)]


def draw_tree(plan: SegmentPlan, words: list[str]) -> str:
    """Above the three sequences as they were sampled, below the forest that they share."""
    parts, y = [], 26.0
    width = 90 + 11 * (CELL + GAP) + 160
    parts.append(
        text(10, y - 8, "sampled: every answer has the question in front of it", anchor="start", font_weight="bold")
    )
    for number, answer in enumerate(ANSWERS):
        parts.append(text(10, y + 21, f"answer {number + 1}", anchor="start"))
        sequence = PROMPT + answer
        for i, word in enumerate(sequence):
            parts += box(90 + i * (CELL + GAP), y, word, "#e4e4e4" if i < len(PROMPT) else "#ffffff")
        parts.append(text(98 + len(sequence) * (CELL + GAP), y + 21, f"reward {REWARDS[number]:g}", anchor="start"))
        y += CELL
    count = sum(len(PROMPT) + len(answer) for answer in ANSWERS)
    y += 40
    head = f"trained: {plan.tree.num_tokens} tokens stand for {count}; the number is the place in the stream"
    parts.append(text(10, y - 8, head, anchor="start", font_weight="bold"))
    tree = plan.tree
    rows = leaf_rows(plan)
    centre = []
    for token in range(tree.num_tokens):
        x, top = 90 + int(tree.position[token]) * (CELL + GAP), y + rows[token] * 52
        centre.append((x, top))
        parent = int(tree.parent[token])
        if parent >= 0 and rows[parent] != rows[token]:
            start = centre[parent]
            (x1, y1), y2 = (start[0] + CELL, start[1] + 16), top + 16
            path = f"M{x1},{y1}C{x1 + 8},{y1} {x - 10},{y2} {x},{y2}"
            parts.insert(0, tag("path", d=path, fill="none", stroke="#777777"))
        parts += box(x, top, words[token], "#e4e4e4" if tree.position[token] < len(PROMPT) else "#ffffff")
        parts.append(text(x + CELL / 2, top + 44, str(token), 10, fill="#777777"))
    return svg(width, y + 3 * 52 + 6, parts, title="three answers as sequences and as one tree")


def leaf_rows(plan: SegmentPlan) -> list[float]:
    """Row of each token: that of the first leaf below it."""
    tree, rows, row = plan.tree, [0.0] * plan.tree.num_tokens, 0
    for token in range(tree.num_tokens):
        rows[token] = float(row)
        if int(tree.subtree_end[token]) == token + 1:
            row += 1
    return rows


def draw_mask(plan: SegmentPlan, words: list[str]) -> str:
    """Who sees whom: query q (row) sees key k (column) exactly when k <= q < subtree_end[k]."""
    tree, cell, left, top = plan.tree, 26, 96, 62
    parts = [text(10, 18, "query q sees key k exactly when k ≤ q < subtree_end[k]", anchor="start", font_weight="bold")]
    for token in range(tree.num_tokens):
        parts.append(text(left - 40, top + token * cell + 17, f"{token}  {words[token]}", 12))
        parts.append(text(left + token * cell + 13, top - 22, words[token], 12))
        parts.append(text(left + token * cell + 13, top - 6, str(int(tree.subtree_end[token])), 10, fill="#777777"))
        for key in range(tree.num_tokens):
            sees = key <= token < int(tree.subtree_end[key])
            color = "#7fa8d1" if sees else "#f4f4f4"
            parts.append(
                tag("rect", x=left + key * cell, y=top + token * cell, width=cell - 2, height=cell - 2, fill=color)
            )
    parts.append(text(left - 6, top - 6, "subtree_end", 10, "end", fill="#777777"))
    size = tree.num_tokens * cell
    return svg(left + size + 12, top + size + 10, parts, title="which tokens see which")


def draw_segments(plan: SegmentPlan, words: list[str]) -> str:
    """The cut of the stream, the ops in order, and the tokens in flight while each runs."""
    owner, parts = segment_of(plan), []
    head = f"the stream, cut into segments of at most {SEGMENT_TOKENS} tokens"
    parts.append(text(10, 18, head, anchor="start", font_weight="bold"))
    for token, word in enumerate(words):
        parts += box(10 + token * (CELL + GAP), 28, word, COLORS[owner[token] % len(COLORS)])
    for segment in range(plan.num_segments):
        first = int(plan.segment_start[segment])
        parent = int(plan.segment_parent[segment])
        label = f"S{segment}" + (f" (after S{parent})" if parent >= 0 else "")
        parts.append(text(10 + first * (CELL + GAP), 78, label, 11, "start"))
    ops = depth_first_schedule(plan)
    parts.append(
        text(10, 116, "the ops: F forward, B backward once all children are done", anchor="start", font_weight="bold")
    )
    step, base, unit = 62, 182 + 8 * plan.peak_in_flight_tokens, 8
    alive = 0
    for index, op in enumerate(ops):
        x, color = 10 + index * step, COLORS[op.segment % len(COLORS)]
        forward = op.kind is OpKind.FORWARD
        parts += box(x, 126, f"{op.kind.value} S{op.segment}", color if forward else "#ffffff", step - 8)
        if not forward:
            parts.append(tag("rect", x=x, y=126, width=6, height=CELL - 8, fill=color))
        length = int(plan.lengths[op.segment])
        alive += length if forward else 0
        parts.append(tag("rect", x=x, y=base - alive * unit, width=step - 8, height=alive * unit, fill=color))
        parts.append(text(x + (step - 8) / 2, base - alive * unit - 4, str(alive), 11))
        alive -= 0 if forward else length
    total = sum(len(PROMPT) + len(answer) for answer in ANSWERS)
    most = f"at most {plan.peak_in_flight_tokens} of {plan.tree.num_tokens} ({total} sampled)"
    note = f"tokens in flight while each runs: {most}; the budget is {MEMORY_TOKENS}"
    parts.append(text(10, base + 20, note, anchor="start"))
    width = max(10 + len(ops) * step, 10 + len(words) * (CELL + GAP)) + 10
    return svg(width, base + 32, parts, title="segments, their order, and the tokens in flight")


def pictures() -> dict[str, str]:
    """File names and contents."""
    plan, words = example()
    drawn = {"concepts_tree.svg": draw_tree, "concepts_mask.svg": draw_mask, "concepts_segments.svg": draw_segments}
    return {name: draw(plan, words) for name, draw in drawn.items()}


def main() -> None:
    parser = CommandLineParser(__doc__)
    default = Path(__file__).resolve().parent.parent
    parser.add_argument("--output", type=Path, default=default, help="folder of the pictures (default: docs)")
    arguments = parser.parse_args()
    for name, content in pictures().items():
        with replacing(arguments.output / name) as temporary:
            temporary.write_text(content, encoding="utf-8")
        print(f"wrote {arguments.output / name}")


if __name__ == "__main__":
    run_entry_point(main)
