"""Renders messages with the chat template of their tokenizer (``--apply-chat-template``).

The template is in tokenizer_config.json or chat_template.jinja next to ``tokenizer.json``, and the package transformers
renders it. The text ends where the model's turn begins and is encoded like any other text: special tokens are
recognised, and no token is added in front.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_dta.common.errors import InputError, one_line


class ChatTemplate:
    """The template of the tokenizer in ``folder``, or in the folder of a ``tokenizer.json``.

    Args:
        settings: additional variables of the template, such as enable_thinking.
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, Any] | None = None) -> None:
        if importlib.util.find_spec("transformers") is None:
            raise InputError("--apply-chat-template needs the package transformers: pip install transformers")
        from transformers import PreTrainedTokenizerFast

        path = Path(folder)
        path = path if path.is_dir() else path.parent
        try:
            self._tokenizer = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
        except Exception as error:  # the library raises many kinds
            raise InputError(
                f"--apply-chat-template: the tokenizer in {path} cannot be read: {_reason(error)}"
            ) from error
        if not self._tokenizer.chat_template:
            raise InputError(
                f"--apply-chat-template: there is no chat template in {path} (tokenizer_config.json or "
                "chat_template.jinja); leave the flag out and write the markers into the prompts"
            )
        self._settings = dict(settings or {})

    def text(self, prompt: Any, tools: Any = None, generation_prompt: bool = True) -> str:
        """The text of a prompt: a list of messages with ``role`` and ``content``, or text, which is the user's message.

        Args:
            tools: a list, or the JSON text of one.
            generation_prompt: end where the model's turn begins instead of after the last message.

        Raises:
            InputError: the prompt is neither, or the template refuses it.
        """
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if not isinstance(messages, list) or not messages:
            raise InputError(f"must be text or a list of messages, got {type(prompt).__name__}")
        for number, message in enumerate(messages, start=1):
            # A turn that only calls tools may have no content.
            said = isinstance(message, dict) and ("content" in message or "tool_calls" in message)
            if not said or not isinstance(message.get("role"), str):
                raise InputError(f"message {number}: must be an object with 'role' and 'content'")
        tools = _checked_tools(tools)
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=generation_prompt, **self._settings
            )
        except Exception as error:  # templates may raise anything
            raise InputError(f"the chat template refuses it: {_reason(error)}") from error


def chat_template_settings(text: str | None) -> dict[str, Any]:
    """The variables of ``--apply-chat-template-kwargs``, a JSON object."""
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise InputError(f"--apply-chat-template-kwargs {text}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"--apply-chat-template-kwargs {text}: must be a JSON object")
    reserved = sorted({"messages", "conversation", "tools", "tokenize", "add_generation_prompt"} & set(found))
    if reserved:
        raise InputError(f"--apply-chat-template-kwargs: {reserved[0]} is not a setting of the template")
    return found


def _checked_tools(tools: Any) -> list[Any] | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise InputError("tools: is text that is not JSON") from None
    if tools is not None and not isinstance(tools, list):
        raise InputError(f"tools: must be a list, got {type(tools).__name__}")
    # Files store an empty list for rows without tools.
    return tools or None


def _reason(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {error}")[:200]
