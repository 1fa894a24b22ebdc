"""Maps the names of settings in slime and verl to the flags here, for the documentation and for unknown flags.

A new row belongs into ``other_names.md`` beside this file, and into docs/from_verl_and_slime.md, which shows the same
table.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

_NOISE = "sequences that share a prefix would share its noise, unlike sequences trained separately; leave it out"
_DROPS = "the dropped tokens would depend on the other tokens of a segment; leave it out"
_DECIDED = "there is one that does not depend on how a batch is cut into segments; leave it out"
# Flags of Megatron that do not exist here, and why.
REFUSED = {
    "--fp16": "float16 needs loss scaling; use --bf16",
    **dict.fromkeys(("--attention-dropout", "--hidden-dropout", "--lora-dropout", "--moe-input-jitter-eps"), _NOISE),
    **dict.fromkeys(
        ("--moe-expert-capacity-factor", "--moe-pad-expert-input-to-capacity", "--moe-token-drop-policy"), _DROPS
    ),
    "--group-query-attention": "--num-query-groups says it; leave it out",
    "--moe-grouped-gemm": "experts always run as grouped products; leave it out",
    **dict.fromkeys(("--recompute-method", "--recompute-num-layers"), "each layer is recomputed; leave it out"),
    **dict.fromkeys(("--moe-router-load-balancing-type", "--moe-token-dispatcher-type"), _DECIDED),
}
_CODE = re.compile(r"`([^`]+)`")


def markdown_table() -> str:
    """The table of other_names.md: a row for each setting, with its name in slime, in verl and here."""
    return Path(__file__).with_suffix(".md").read_text(encoding="utf-8").rstrip()


def name_here(word: str) -> str | None:
    """What to use for ``word``, a flag of Megatron or slime or a setting of verl (``name=value``); None if unknown."""
    key = word.lstrip("+-").partition("=")[0] if not word.startswith("--") else word.partition("=")[0]
    if key in REFUSED:
        return f"{key} is refused: {REFUSED[key]}"
    for row in markdown_table().splitlines()[2:]:
        slime, verl, here = (cell.strip() for cell in row.strip("|").split("|"))
        for program, cell in (("slime", slime), ("verl", verl)):
            if any(_is_named(key, name.partition("=")[0]) for code in _CODE.findall(cell) for name in code.split()):
                return f"{key} is a name from {program}; here: {here.replace('`', '')}"
    return None


def _is_named(key: str, name: str) -> bool:
    """Whether ``key`` matches ``name``, which may contain a star and omit the first parts of a dotted name."""
    if not (name.startswith("--") or "." in name):
        return False
    return fnmatchcase(key, name) or (not name.startswith(("-", ".")) and fnmatchcase(key, f"*.{name}"))
