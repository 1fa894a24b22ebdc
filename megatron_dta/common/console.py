"""The console of all commands: rich's, which prints every text as it is.

Names, answers and paths may contain brackets or colons (``[/ANS]``, ``a[b]``, ``:key:``), which rich would take for
markup or emoji. Credentials are hidden (``common.secrets``).
"""

from __future__ import annotations

from typing import Any

import rich.console
from rich.text import Text

from megatron_dta.common.secrets import redacted


class Console(rich.console.Console):  # noqa: TID251
    """A console without markup, emoji and highlighting; style a whole line with ``style``."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        """The text of a printed string or of a table's cell; rich calls this for each."""
        return super().render_str(redacted(text), **settings)
