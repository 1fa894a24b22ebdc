"""Servers that draft: their command, checks of their settings, acceptance counts, SGLang's corpora."""

from __future__ import annotations

import json
import os
import shlex
import stat
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from conftest import seed_all
from forked import run_python
from http_engine_cases import KINDS, PARAMS, Setup
from megatron_dta.commands.rollout_server_command import main
from megatron_dta.common.keyed_random import Domain
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.extras.servers.http_client import ServerError
from megatron_dta.extras.servers.server_corpus import RolloutCorpus
from megatron_dta.extras.servers.speculation import DraftCounts, ServerSpeculation
from megatron_dta.sampling.interface import generate, phase
from megatron_dta.sampling.prompts.tokenizer import CharacterTokenizer
from megatron_dta.training.arguments import parse_arguments
from rollout_runs import Runs, metrics_of, weights_of
from rollout_runs import assert_same as assert_same_weights

SPECULATION = ServerSpeculation(draft_tokens=8, depth=16, max_tokens=1000, cached_requests=40)


def settings_of(speculation: ServerSpeculation, kind: str) -> dict:
    return speculation.vllm() if kind == "vllm" else speculation.sglang()


def test_the_tool_prints_commands_that_a_shell_takes(capsys: pytest.CaptureFixture) -> None:
    flags = "--rollout-speculation das --das-draft-tokens 12 --das-depth 20 --das-window 3 --das-max-tokens 100000"
    flags += " --rollout-batch-size 5 --n-samples-per-prompt 4 --rollout-max-response-len 2000"
    given = [*flags.split(), "--rollout-temperature", "0.7", "--model", "/my models/m"]

    def printed(*arguments: str) -> str:
        main(list(arguments))
        return capsys.readouterr().out

    transfer = printed("--rollout-engine", "vllm", "--rollout-weight-transfer", "ipc", *given)
    assert shlex.split(transfer)[:2] == ["VLLM_SERVER_DEV_MODE=1", "VLLM_ALLOW_INSECURE_SERIALIZATION=1"]
    assert shlex.split(transfer)[-2:] == ["--weight-transfer-config", '{"backend": "ipc"}']
    for kind in ("vllm", "sglang"):
        experts = printed("--rollout-engine", kind, "--num-experts", "8", "--moe-routing-replay", "--model", "m")
        assert shlex.split(experts)[-1] == "--enable-return-routed-experts"
    words = shlex.split(printed("--rollout-engine", "vllm", *given, "--", "--tensor-parallel-size", "2"))
    assert words[:6] == ["VLLM_SERVER_DEV_MODE=1", "vllm", "serve", "/my models/m", "--port", "8000"]
    assert words[6:8] == ["--logprobs-mode", "processed_logprobs"]
    assert words[-2:] == ["--tensor-parallel-size", "2"]
    assert json.loads(words[words.index("--speculative-config") + 1]) == {
        "method": "suffix",
        "num_speculative_tokens": 12,
        "suffix_decoding_max_tree_depth": 20,
        # 3 x 5 x 4 responses in the window, but only 50 of 2,000 tokens fit.
        "suffix_decoding_max_cached_requests": 50,
        "suffix_decoding_max_spec_factor": 2.0,
        "suffix_decoding_min_token_prob": 0.1,
    }
    # A collection may take two rounds.
    rounds = "--das-max-tokens 1000000 --dynamic-sampling --dynamic-sampling-max-rounds 2"
    words = shlex.split(printed("--rollout-engine", "vllm", *given, *rounds.split()))
    cache = json.loads(words[words.index("--speculative-config") + 1])["suffix_decoding_max_cached_requests"]
    assert cache == 2 * 3 * 5 * 4
    words = shlex.split(printed("--rollout-engine", "sglang", *given, "--port", "30000", "--host", "10.0.0.1"))
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    assert words[3:9] == ["--model-path", "/my models/m", "--port", "30000", "--host", "10.0.0.1"]
    options = dict(zip(words[9::2], words[10::2], strict=True))
    assert options == {
        "--speculative-algorithm": "NGRAM",
        "--speculative-num-draft-tokens": "13",
        "--speculative-ngram-max-trie-depth": "20",
        "--speculative-ngram-match-type": "PROB",
        "--speculative-ngram-external-sam-budget": "6",
        "--speculative-ngram-external-corpus-max-tokens": "125000",
    }
    # Without speculation nothing of it is said.
    plain = printed("--rollout-engine", "sglang", "--model", "m")
    assert plain == "python -m sglang.launch_server --model-path m --port 8000\n"


def test_the_tool_becomes_the_server(tmp_path: Path) -> None:
    fake = tmp_path / "vllm"
    fake.write_text('#!/bin/sh\necho "$VLLM_SERVER_DEV_MODE" "$@"\n')
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "run.args").write_text("--rollout-engine vllm  # shared with training\n--task arithmetic\n")
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    flags = f"--exec @{tmp_path}/run.args --model m -- --seed 4".split()
    done = run_python(["tools/rollout_server_command.py", *flags], env=environment)
    assert (done.returncode, done.stdout) == (0, "1 serve m --port 8000 --seed 4\n"), done.stderr


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        ("--rollout-engine replay --model m", "--rollout-engine replay has no servers"),
        ("--rollout-engine vllm", "which model the server is to load is not known"),
        ("--rollout-engine vllm --model m --port 0", "--port 0: must be a port"),
        ("--rollout-engine vllm --model", "expected one argument"),
        ("--exec --rollout-engine vllm --model m", "vllm: cannot be run"),
    ],
)
def test_the_tool_refuses(flags: str, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "")  # put back afterwards
    with pytest.raises(InputError, match=match):
        main(flags.split())


@KINDS
def test_what_servers_accept_is_counted_for_training_only(setup: Setup) -> None:
    setup.add_servers(2)
    for server in setup.servers:
        server.speculation = settings_of(SPECULATION, setup.kind)
        server.drafted, server.accepted = 30, 20  # of others, before
    engine = setup.engine(speculation=SPECULATION)
    requests, given, before = setup.requests(30), 0, [(s.drafted, s.accepted) for s in setup.servers]
    for iteration in range(2):
        with phase(engine, PARAMS, iteration):
            results = generate(engine, requests)
        given += sum(len(result.token_ids) for result in results)
        setup.check(requests, results)
    drafted = sum(s.drafted - b[0] for s, b in zip(setup.servers, before, strict=True))
    accepted = sum(s.accepted - b[1] for s, b in zip(setup.servers, before, strict=True))
    assert engine.drafts.counts == DraftCounts(given, drafted, accepted)
    assert accepted > 0
    with phase(engine, replace(PARAMS, domain=Domain.EVALUATION), 0):
        generate(engine, requests)
    assert engine.drafts.counts == DraftCounts(given, drafted, accepted)
    metrics = engine.drafts.counts.metrics()
    assert metrics["speculation_tokens_per_forward"] == given / (given - accepted)
    assert metrics["speculation_wasted_tokens"] == drafted - accepted
    assert metrics["speculation_acceptance"] == accepted / drafted
    # The settings were asked for once.
    assert all(server.calls.count("/server_info") == 1 for server in setup.servers)


@pytest.mark.parametrize("kind", ["sglang"])
def test_counts_of_older_servers(setup: Setup) -> None:
    setup.add_servers(1)
    (server,) = setup.servers
    server.speculation = settings_of(SPECULATION, "sglang")
    server.draft_names = ("spec_draft_token_num", "spec_accept_token_num")
    engine = setup.engine(speculation=SPECULATION)
    with phase(engine, PARAMS, 0):
        generate(engine, setup.requests(5))
    assert (engine.drafts.counts.drafted, engine.drafts.counts.accepted) == (server.drafted, server.accepted)


@KINDS
def test_a_server_without_counters_samples_all_the_same(setup: Setup) -> None:
    setup.add_servers(1)
    (server,) = setup.servers
    server.speculation = settings_of(SPECULATION, setup.kind)
    setup.fault(0, 500, 500, path="/metrics")
    engine = setup.engine(speculation=SPECULATION)
    with phase(engine, PARAMS, 0):
        results = generate(engine, setup.requests(5))
    assert engine.drafts.counts.given == sum(len(result.token_ids) for result in results)
    assert not setup.lines


@pytest.mark.parametrize(
    ("kind", "change", "match"),
    [
        ("vllm", None, "method is None and not suffix"),
        ("vllm", {"num_speculative_tokens": 9}, "num_speculative_tokens is 9 and not 8"),
        ("sglang", None, "speculative_algorithm is None and not NGRAM"),
        ("sglang", {"speculative_ngram_max_trie_depth": 18}, "speculative_ngram_max_trie_depth is 18 and not 16"),
        ("sglang", {"speculative_ngram_external_sam_budget": 0}, "external_sam_budget is 0"),
        ("sglang", {"speculative_ngram_external_corpus_max_tokens": 999}, "999, below --das-max-tokens 1000"),
    ],
)
def test_servers_that_draft_otherwise_are_refused(setup: Setup, change: dict | None, match: str) -> None:
    setup.add_servers(2)
    setup.servers[0].speculation = settings_of(SPECULATION, setup.kind)
    if change is not None:
        setup.servers[1].speculation = settings_of(SPECULATION, setup.kind) | change
    engine = setup.engine(speculation=SPECULATION)
    with pytest.raises(ServerError, match=match) as raised:
        engine.start(PARAMS, 0)
    assert setup.servers[1].url in str(raised.value)
    assert "megatron-dta rollout-server-command" in str(raised.value)
    # Who does not ask for drafts does not ask how they are made.
    setup.engine().start(PARAMS, 0)


def rollouts_of(texts: list[str], rng: np.random.Generator) -> list[Rollout]:
    """Rollouts whose responses are the texts, after prompts that must not be among them."""
    made = []
    for text in texts:
        response = CharacterTokenizer().encode(text)
        prompt = rng.integers(0, 10, int(rng.integers(1, 5)))
        token_ids = np.concatenate([prompt, response]).astype(np.int32)
        made.append(Rollout(token_ids=token_ids, loss_mask=np.arange(len(token_ids)) >= len(prompt), reward=0.0))
    return made


def read(path: Path) -> list[str]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_corpus_is_the_window_and_no_more_than_fits(tmp_path: Path) -> None:
    rng = seed_all(3)
    corpus = RolloutCorpus(tmp_path / "new", CharacterTokenizer(), window=2, max_tokens=14)
    assert corpus.write(0) is None
    corpus.add(rollouts_of(["1+1=2"], rng))
    assert read(corpus.write(1)) == ["1+1=2"]
    corpus.add(rollouts_of(["33", "4-4"], rng))
    assert read(corpus.write(2)) == ["1+1=2", "33", "4-4"]  # 6 + 3 + 4 tokens with separators
    state = corpus.state_dict()
    corpus.add(rollouts_of(["5"], rng))
    last = corpus.write(3)
    assert read(last) == ["33", "4-4", "5"]
    corpus.add(rollouts_of(["1234567"], rng))
    assert read(corpus.write(4)) == ["5", "1234567"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["corpus-4.jsonl"]
    corpus.delete()
    assert not list((tmp_path / "new").iterdir())
    again = RolloutCorpus(tmp_path, CharacterTokenizer(), window=2, max_tokens=14)
    again.load_state_dict(state)
    again.add(rollouts_of(["5"], rng))
    assert read(again.write(3)) == ["33", "4-4", "5"]
    tight = RolloutCorpus(tmp_path / "tight", CharacterTokenizer(), window=2, max_tokens=5)
    tight.add(rollouts_of(["12", "123"], rng))
    assert read(tight.write(0)) == ["123"]
    (tmp_path / "file").touch()
    nowhere = RolloutCorpus(tmp_path / "file" / "x", CharacterTokenizer(), window=2, max_tokens=14)
    nowhere.load_state_dict(state)
    with pytest.raises(InputError, match=r"corpus-7\.jsonl: cannot be written"):
        nowhere.write(7)


@pytest.mark.parametrize("kind", ["sglang"])
def test_each_server_has_the_newest_corpus_alone(setup: Setup, tmp_path: Path) -> None:
    setup.add_servers(2)
    for server in setup.servers:
        server.speculation = settings_of(SPECULATION, "sglang")
    engine = setup.engine(speculation=SPECULATION)
    for number, texts in enumerate((["1+1"], ["1+1", "2+2"], ["3"])):
        path = tmp_path / f"corpus-{number}.jsonl"
        path.write_text("".join(json.dumps(text) + "\n" for text in texts))
        if number == 1:
            setup.servers[1].corpora.clear()  # was started anew
        if number == 2:
            setup.servers[0].corpus_faults.append("out of memory")
        engine.load_corpus(path)
        expected = [[texts], [texts]] if number < 2 else [[], [texts]]
        assert [list(server.corpora.values()) for server in setup.servers] == expected
    assert len(setup.lines) == 1
    assert "continues without the corpus" in setup.lines[0]
    assert "out of memory" in setup.lines[0]
    assert not any(server.violations for server in setup.servers)
    with pytest.raises(ValueError, match="takes no corpora"):
        setup.engine().load_corpus(tmp_path / "corpus-0.jsonl")


@KINDS
def test_a_run_on_drafting_servers(kind: str, tmp_path: Path) -> None:
    """The same rollouts and weights as without drafts; metrics; corpora in step with the collections, also resumed."""
    with ExitStack() as stack:
        runs = Runs(stack, tmp_path, seed_all(6))
        servers = runs.add_servers(kind, 2)
        flags = "--rollout-speculation das --das-window 2 --das-draft-tokens 8 --das-depth 16 --das-max-tokens 1000"
        for server in servers:
            server.speculation = settings_of(SPECULATION, kind)
        tokenizer = "" if kind == "vllm" else "--tokenizer-type CharacterTokenizer"
        runs.command = replaced(runs.command, tokenizer)
        if tokenizer:
            (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "{i}+{i}="}}\n' for i in range(7)))
        plain, _ = runs.run(f"--train-iters 4 --save {tmp_path / 'plain'}")
        corpora: list[list[str]] = []
        if kind == "sglang":
            _record_corpora(servers[0], corpora)
        runs.run(f"{flags} --train-iters 2 --save-interval 1 --save {tmp_path / 'das'}")
        das, _ = runs.run(f"{flags} --train-iters 4 --save {tmp_path / 'das'}")
        assert_same_weights(weights_of(plain), weights_of(das))
        rows = metrics_of(tmp_path / "das")
        assert len(rows) == 4
        for row in rows:
            timing = row["timing"]
            assert timing["speculation_accepted_tokens"] > 0
            assert timing["speculation_drafted_tokens"] == 2 * timing["speculation_accepted_tokens"]
            assert 1 < timing["speculation_tokens_per_forward"] < 2
        assert not any(server.violations for server in servers)
        assert list((tmp_path / "das" / "rollout-weights").iterdir()) == []
        if kind == "sglang":
            # Before the 2nd, the 3rd (in the continued run) and the 4th collection; two collections at most.
            assert len(corpora) == 3
            assert corpora[1][: len(corpora[0])] == corpora[0]
            assert corpora[2][: len(corpora[1]) - len(corpora[0])] == corpora[1][len(corpora[0]) :]


def replaced(command, tokenizer: str):
    def build(more: str, engine: str | None = None) -> str:
        words = command(more, engine)
        return words.replace("--tokenizer-type NullTokenizer --eos-id 3", tokenizer) if tokenizer else words

    return build


def _record_corpora(server, corpora: list[list[str]]) -> None:
    change = server._change_corpora

    def record(path, body):
        answer = change(path, body)
        if path == "/add_external_corpus" and answer[0]:
            corpora.append(server.corpora[body["corpus_id"]])
        return answer

    server._change_corpora = record


def test_flags_without_effect_on_servers_are_refused(tmp_path: Path) -> None:
    with ExitStack() as stack:
        runs = Runs(stack, tmp_path, seed_all(6))
        runs.add_servers("sglang", 1)
        for flags, match in [
            ("--rollout-speculation das", "NullTokenizer cannot produce"),
        ]:
            with pytest.raises(InputError, match=match):
                parse_arguments(runs.command(f"--train-iters 1 --save {tmp_path} {flags}").split())
        command = replaced(runs.command, "--tokenizer-type CharacterTokenizer")
        for flags, match in [
            ("--das-budget gate", "--das-budget"),
            ("--das-draft-tokens 1", "--das-draft-tokens 1"),
            ("--rollout-stop-degenerate", "--rollout-stop-degenerate"),
        ]:
            words = command(f"--train-iters 1 --save {tmp_path} --rollout-speculation das {flags}").split()
            with pytest.raises(InputError, match=match):
                parse_arguments(words)
