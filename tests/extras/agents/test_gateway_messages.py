"""The gateway's messages as families write them: ids after a known prefix, continued words."""

from pathlib import Path

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from test_gateway_calls import post

from blank_tokenizer import blank_tokenizer
from open_gateway import chat_tokenizer, open_gateway
from scripted_engine import ScriptedEngine


def test_a_branch_has_the_ids_of_its_whole_text(tmp_path: Path) -> None:
    tokenizer = blank_tokenizer(tmp_path / "model")
    engine = ScriptedEngine(lambda prompt, key: [*prompt[-3:-1], tokenizer.eos_id], tokenizer.vocab_size)
    with open_gateway(engine, tokenizer, tmp_path / "model") as gateway:
        session, key = gateway.open()
        for word in ("add two", "see me"):
            talk = [{"role": "system", "content": "be kind"}, {"role": "user", "content": word}]
            reply = post(gateway.url + "/v1/chat/completions", key, {"messages": talk})
            text = f"system: be kind</s>\nuser: {word}</s>\nassistant: "
            call = session.calls[-1]
            assert call.token_ids(call.prompt_length).tolist() == tokenizer.encode(text).tolist()
        # The turn after an answer, too: what follows its end is as in a text that has it.
        talk += [reply["choices"][0]["message"], {"role": "user", "content": "go"}]
        post(gateway.url + "/v1/chat/completions", key, {"messages": talk})
        last = session.calls[-1]
        assert last.parent is session.calls[-2]
        rest = last.token_ids(last.prompt_length)[last.parent.length :]
        assert rest.tolist() == tokenizer.encode("</s>\nuser: go</s>\nassistant: ").tolist()[1:]
        assert session.counts.crossed_borders == 0


def test_words_of_the_assistant_are_continued(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path / "model")
    script = [*tokenizer.encode("four"), tokenizer.eos_id]
    engine = ScriptedEngine(lambda prompt, key: script, tokenizer.vocab_size)
    with open_gateway(engine, tokenizer, tmp_path / "model") as gateway:
        session, key = gateway.open()
        ask = {"role": "user", "content": "two and two?"}
        begun = [ask, {"role": "assistant", "content": "that is "}]
        reply = post(gateway.url + "/v1/chat/completions", key, {"messages": begun})["choices"][0]["message"]
        assert reply["content"] == "four"
        text = tokenizer.encode("<|im_start|>user\ntwo and two?<|im_end|>\n<|im_start|>assistant\nthat is ").tolist()
        assert engine.prompts[0][0] == text
        talk = [ask, {"role": "assistant", "content": "that is four"}, {"role": "user", "content": "sure?"}]
        post(gateway.url + "/v1/chat/completions", key, {"messages": talk})
        assert session.calls[1].parent is session.calls[0]
