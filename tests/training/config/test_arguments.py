"""The command line: every flag sets its field and is used; what contradicts, and what nothing reads, is refused."""

import ast
import random
from dataclasses import MISSING
from pathlib import Path

import pytest
import torch

import megatron_dta
from arguments_cases import MODEL, SAMPLED, STORED, parse
from megatron_dta.core.common.errors import InputError, InputErrors
from megatron_dta.core.config import ModelConfig
from megatron_dta.core.config.options import flag_of
from megatron_dta.core.shapes.moe_layers import parse_moe_layer_freq
from megatron_dta.training.arguments import build_parser
from megatron_dta.training.config.checks.needs import parse_condition
from megatron_dta.training.config.train import settings_of

PACKAGE = Path(megatron_dta.__file__).parent
# What the command line itself is made from.
PARSED = {"hf_checkpoint"}


def test_flags_reach_their_fields() -> None:
    config = parse(
        f"{SAMPLED} --bf16 --swiglu --lr 0.25 --rollout-temperature 0.5 --eps-clip 0.1 --tree-activation-tokens 0 "
        "--num-query-groups 2 --disable-grpo-std-normalization"
    )
    assert config.model.params_dtype is torch.bfloat16
    assert config.model.swiglu
    assert not config.model.add_qkv_bias
    assert config.optimization.lr == 0.25
    assert config.sampling.temperature == 0.5
    assert config.objective.eps_clip == 0.1
    assert config.tree.tree_activation_tokens == 0
    assert config.tree.tree_memory_tokens is None
    assert config.model.num_query_groups == 2
    assert config.objective.disable_grpo_std_normalization
    assert parse(f"{STORED} --eval-rollouts b.jsonl c.npz --eval-interval 1").data.eval_rollouts == ["b.jsonl", "c.npz"]


def test_defaults_are_those_of_the_dataclasses() -> None:
    for _, setting, value in settings_of(parse(SAMPLED)):
        if setting.default is not MISSING and setting.default is not None and setting.name != "task":
            assert value == setting.default, setting.name


def test_derived_model_settings() -> None:
    model = ModelConfig(num_layers=1, hidden_size=96, num_attention_heads=3, vocab_size=51, swiglu=True)
    assert (model.ffn_hidden_size, model.kv_channels, model.num_query_groups) == (256, 32, 3)
    assert model.padded_vocab_size() == 51
    padded = ModelConfig(
        num_layers=1, hidden_size=96, num_attention_heads=3, vocab_size=51, make_vocab_size_divisible_by=8
    )
    assert (padded.ffn_hidden_size, padded.padded_vocab_size()) == (384, 56)
    assert ModelConfig(1, 8, 2, params_dtype=torch.float64).params_dtype is torch.float64


def test_settings_of_experts_are_derived() -> None:
    model = parse(f"{MOE} --moe-layer-freq [0]*1+[1]*1 --ffn-hidden-size 96").model
    assert model.moe_ffn_hidden_size == 96
    assert model.moe_layers == [False, True]
    assert parse(SAMPLED).model.moe_layers == [False, False]


@pytest.mark.parametrize(
    ("text", "layers"),
    [("1", "1111"), ("2", "1010"), ("3", "1001"), ("[0,1]*2", "0101"), ("([0]*3+[1]*1)", "0001"), ("2*[1,0]", "1010")],
)
def test_layer_patterns(text: str, layers: str) -> None:
    assert parse_moe_layer_freq(text, 4) == [entry == "1" for entry in layers]


def test_flags_are_unique_and_documented() -> None:
    settings = list(settings_of(parse(SAMPLED)))
    flags = [flag_of(setting) for _, setting, _ in settings]
    assert len(set(flags)) == len(flags)
    assert len({setting.name for _, setting, _ in settings}) == len(flags)
    help_text = " ".join(build_parser().format_help().split())
    for _, setting, _ in settings:
        assert setting.metadata["help"].endswith("."), setting.name
        if setting.metadata["command_line"]:
            assert flag_of(setting) in help_text


def test_every_setting_is_used() -> None:
    """Each field is read as an attribute: outside of the modules that parse and check, or to derive another field."""
    read: set[str] = set()
    for file in PACKAGE.rglob("*.py"):
        if file.name in ("arguments.py", "all.py"):
            continue
        derives = file.parent.name in ("config", "checks")
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
                continue
            if not derives or (isinstance(node.value, ast.Name) and node.value.id == "self"):
                read.add(node.attr)
    settings = {setting.name for _, setting, _ in settings_of(parse(SAMPLED))}
    assert settings - read - PARSED == set()


SERVER = f"{SAMPLED} --rollout-server-url http://a:1 --rollout-engine"
TREE = f"{SAMPLED} --rollout-method treepo --treepo-segment-length 2"
AWARE = f"{STORED} --bf16 --use-distributed-optimizer --use-precision-aware-optimizer"
MOE = f"{SAMPLED} --swiglu --disable-bias-linear --num-experts 8"
SEGMENT_TOO_LONG = "--treepo-segment-length 512 is not below --rollout-max-response-len 64"
BAD = [
    ("--hidden-size 64", "--num-layers"),
    (f"{SAMPLED} --lr fast", "--lr"),
    (f"{SAMPLED} --lr nan", "--lr nan: must be a finite number"),
    (f"{SAMPLED} --lr -1", "--lr -1.0: must be at least 0"),
    (f"{SAMPLED} --adam-beta2 1", "--adam-beta2 1.0: must be below 1"),
    (f"{SAMPLED} --rollout-temperature 0", "--rollout-temperature 0.0: must be above 0"),
    (f"{SAMPLED} --rollout-top-p 1.5", "--rollout-top-p 1.5: must be at most 1"),
    (f"{SAMPLED} --tree-mode forest", "--tree-mode"),
    (f"{SAMPLED} --hidden-size 66", "--hidden-size 66 is not divisible by --num-attention-heads 4"),
    (f"{SAMPLED} --num-query-groups 3", "--num-query-groups 3"),
    (f"{SAMPLED} --tensor-model-parallel-size 2", "--tensor-model-parallel-size 2 does not divide the 1 processes"),
    (f"{SAMPLED} --pipeline-model-parallel-size 3", "--num-layers 2 is not divisible by the 3 pipeline stages"),
    (MODEL, "no rollouts to train on"),
    (f"{STORED} --task arithmetic", "--rollouts conflicts with sampling"),
    (f"{MODEL} --vocab-size 9 --rollouts a.jsonl", "--rollouts needs --global-batch-size"),
    (f"{MODEL} --rollouts a.jsonl --global-batch-size 8", "--rollouts needs --vocab-size"),
    (f"{SAMPLED} --prompt-data p.jsonl", "--task brings its own prompts"),
    (f"{MODEL} --prompt-data p.jsonl", "--prompt-data needs --reward-function"),
    (f"{MODEL} --prompt-data p.jsonl --reward-function exact_match", "--prompt-data needs --tokenizer-type"),
    (f"{SAMPLED} --objective sft", "--objective sft trains on stored rollouts and conflicts with --task"),
    (f"{STORED} --eval-interval 2", "--eval-interval needs held-out data"),
    (f"{STORED} --seq-length 8192", "--seq-length 8192 is more than --max-position-embeddings 4096"),
    (f"{SAMPLED} --eps-clip 0.3 --eps-clip-high 0.2", "--eps-clip-high 0.2 is below --eps-clip 0.3"),
    (f"{SAMPLED} --rollout-batch-size 6 --num-steps-per-rollout 4", "--num-steps-per-rollout 4"),
    (f"{SAMPLED} --global-batch-size 7", "--global-batch-size 7"),
    (f"{SAMPLED} --min-lr 1", "--min-lr 1.0 is above --lr"),
    (f"{SAMPLED} --lr-warmup-iters 100", "--lr-warmup-iters 100 must be below"),
    (f"{STORED} --use-tis", "--old-logprobs recompute"),
    (f"{STORED} --old-logprobs recompute --use-tis --tis-clip 1 --tis-clip-low 1", "--tis-clip-low 1 is not below"),
    (f"{STORED} --objective ppo --advantage-estimator rloo", "--advantage-estimator has no effect"),
    (f"{STORED} --objective ppo --num-critic-only-steps 9 --train-iters 9", "the policy would never train"),
    (f"{STORED} --objective cispo --dual-clip 3", "--dual-clip has no effect with --objective cispo"),
    (f"{STORED} --objective sft --rejection-sampling threshold", "needs --rejection-reward-threshold"),
    (f"{STORED} --tree-memory-gib 8 --tree-memory-tokens 9", "--tree-memory-gib conflicts with --tree-memory-tokens"),
    (f"{STORED} --tree-memory-gib 8 --recompute-granularity selective", "conflicts with --recompute-granularity"),
    (f"{STORED} --optimizer-cpu-offload", "--optimizer-cpu-offload needs --use-precision-aware-optimizer"),
    (f"{STORED} --use-precision-aware-optimizer --use-distributed-optimizer", "needs --bf16"),
    (f"{AWARE} --optimizer-cpu-offload --exp-avg-dtype bf16", "with --optimizer-cpu-offload the states"),
    (f"{STORED} --fp8-format hybrid --bf16", "--fp8-format needs --transformer-impl transformer_engine"),
    (f"{SAMPLED} --lora-rank 4 --lora-target-modules q_proj", "--lora-target-modules q_proj: choose from linear_qkv"),
    (f"{STORED} --kl-loss-coef 0.1 --lora-rank 2 --offload-reference", "--offload-reference has no effect if the"),
    (f"{MOE} --moe-router-topk 1", "--moe-router-topk 1 needs --moe-router-score-function sigmoid"),
    (f"{MOE} --moe-router-enable-expert-bias", "--moe-router-enable-expert-bias needs --moe-router-score-function"),
    (f"{MOE} --moe-layer-freq [0]*2", "no layer has experts"),
    (f"{MOE} --moe-layer-freq __import__('os')", "--moe-layer-freq __import__"),
    (f"{MOE} --moe-layer-freq [1]*999999999999", "--moe-layer-freq [1]*999999999999: give a number"),
    (f"{MOE} --num-query-groups 4 --tensor-model-parallel-size 2", "needs --sequence-parallel"),
    (f"{MOE} --transformer-impl transformer_engine", "transformer_engine does not support experts"),
    (f"{SAMPLED} --rollout-method treepo", SEGMENT_TOO_LONG),
    (f"{TREE} --treepo-initial-branches 9", "--treepo-initial-branches 9 is above the width"),
    (f"{TREE} --treepo-initial-branches-max 1", "--treepo-initial-branches-max 1 is below"),
    (f"{SAMPLED} --seed 99999999999999999999", "--seed 99999999999999999999: must be at most"),
    (f"{TREE} --treepo-answer-pattern x*", "--treepo-answer-pattern 'x*': matches text without an answer"),
    (f"{TREE} --treepo-answer-pattern ((", "--treepo-answer-pattern ((: not boxed and not a regular expression"),
    (f"{TREE} --environment a.B --treepo-answer-pattern boxed", "leave out --treepo-answer-pattern"),
    (f"{TREE} --rollout-stop-degenerate", "--rollout-stop-degenerate ends whole responses"),
    (f"{TREE} --over-sampling-batch-size 4", "--over-sampling-batch-size 4 is below --rollout-batch-size 16"),
    (f"{SERVER} vllm", "needs --rollout-weights-dir"),
    (f"{SAMPLED} --rollout-max-staleness 1", "needs --rollout-engine vllm or sglang"),
    (f"{SERVER} vllm --save s --rollout-temperature 0.5 --rollout-top-p 0.5", "add --old-logprobs recompute"),
    (f"{SERVER} sglang --rollout-weight-transfer ipc", "SGLang does not say when it has copied"),
    (f"{SERVER} vllm --save s --rollout-max-staleness 1 --num-steps-per-rollout 3", "raise it to 3"),
    (f"{SERVER} vllm --save s --rollout-max-staleness 1 --dynamic-sampling", "conflicts with --dynamic-sampling"),
    (f"{SERVER} vllm --save s --rollout-speculation das", "give it to rollout-server-command"),
]


@pytest.mark.parametrize(("line", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_flags_are_refused_in_one_line(line: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(line)
    lines = str(caught.value).splitlines()
    assert any(message in text for text in lines)
    if isinstance(caught.value, InputErrors):
        assert list(caught.value.messages) == lines
    else:
        assert len(lines) == 1


def test_all_contradictions_are_told_at_once() -> None:
    line = "--lr 1e-3 --min-lr 1 --adam-beta1 1 --eps-clip 0.3 --eps-clip-high 0.2 --tree-memory-gib 1 --finetune"
    line += " --tree-memory-tokens 5 --num-query-groups 3 --rollout-engine vllm"
    with pytest.raises(InputErrors) as caught:
        parse(f"{SAMPLED} {line}")
    told = [message.split()[0] for message in caught.value.messages]
    # --min-lr twice: of a constant learning rate, too. --rollout-engine: a server, a folder and a form for its weights.
    expected = "--num-attention-heads --eps-clip-high --tree-memory-gib --min-lr --min-lr --finetune --adam-beta1"
    assert sorted(told) == sorted([*expected.split(), *["--rollout-engine"] * 3])
    with pytest.raises(InputErrors) as caught:
        parse(f"{SAMPLED} --lr -1 --rollout-temperature 0 --min-lr 3")
    assert len(caught.value.messages) == 2  # what is out of its bounds means nothing to the other checks


def test_what_the_source_decides_is_not_told_while_there_are_two() -> None:
    with pytest.raises(InputErrors) as caught:
        parse(f"{STORED} --task arithmetic --rollout-top-p 0.5 --min-lr 1")
    told = [message.split()[0] for message in caught.value.messages]
    assert told == ["--rollouts", "--global-batch-size", "--min-lr"]


def test_any_two_bad_flags_are_refused_by_lines() -> None:
    """No check stumbles over a value that another one refuses."""
    flags = [line.removeprefix(SAMPLED) for line, _ in BAD if line.startswith(SAMPLED)]
    draw = random.Random(1)
    for _ in range(300):
        with pytest.raises(InputError):
            parse(SAMPLED + "".join(draw.sample(flags, 2)))


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        ("--learning-rate 1", ["--learning-rate: unknown flag; did you mean --lr or "]),
        ("--train_iters 2", ["--train_iters: unknown flag; did you mean --train-iters?"]),
        ("--epsclip=2", ["--epsclip: unknown flag; did you mean --eps-clip or --eps-clip-high?"]),
        ("--zzz", ["--zzz: unknown flag (--help"]),
        ("stray", ["stray: belongs to no flag"]),
        ("--eps-clip-c 3", ["--eps-clip-c is a name from slime; here: --dual-clip"]),
        ("--fp16", ["--fp16 is refused: float16 needs loss scaling; use --bf16"]),
        ("--mscale 1", ["--mscale is read from the config.json of --load-hf or --hf-checkpoint; leave it out"]),
        ("--yaml-cfg run.yaml", ["--yaml-cfg is a name from slime; here: @FILE"]),
        (
            "--num-rollout 3 actor_rollout_ref.rollout.n=4 +actor.megatron.tensor_model_parallel_size=2",
            [
                "--num-rollout is a name from slime; here: --train-iters",
                "actor_rollout_ref.rollout.n is a name from verl; here: --n-samples-per-prompt",
                "actor.megatron.tensor_model_parallel_size is a name from verl; here: Megatron's flags",
            ],
        ),
    ],
)
def test_unknown_flags_name_what_was_perhaps_meant(words: str, messages: list[str]) -> None:
    with pytest.raises(InputErrors) as caught:
        parse(f"{SAMPLED} {words}")
    for told, message in zip(caught.value.messages, messages, strict=True):
        assert told.startswith(message)
    assert caught.value.messages[-1].endswith("(--help lists the flags)")


def test_argument_files_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(bytes(range(128, 256)))
    (tmp_path / "itself").write_text(f"@{tmp_path}/itself\n")
    (tmp_path / "outer").write_text(f"--lr 1 @{tmp_path}/missing\n")
    for name, message in (
        ("missing", f"argument file @{tmp_path}/missing: cannot be read (No such file or directory)"),
        ("outer", f"argument file @{tmp_path}/missing: cannot be read (No such file or directory)"),
        ("", f"argument file @{tmp_path}/: cannot be read (Is a directory)"),
        ("binary", "an argument file (@FILE) is not text (invalid start byte)"),
        ("itself", "an argument file (@FILE) names itself, or one that names it"),
    ):
        with pytest.raises(InputError) as caught:
            parse(f"{SAMPLED} @{tmp_path}/{name}")
        assert str(caught.value) == message


def test_processes_must_make_whole_tensor_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert parse(f"{SAMPLED} --tensor-model-parallel-size 2 --sequence-parallel").parallel.sequence_parallel
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(InputError, match="--tensor-model-parallel-size 2 does not divide the 3 processes"):
        parse(f"{SAMPLED} --tensor-model-parallel-size 2")


def test_conditions_name_settings_and_their_choices() -> None:
    settings = {setting.name: setting for _, setting, _ in settings_of(parse(SAMPLED))}
    for setting in settings.values():
        for condition in " or ".join(setting.metadata["needs"]).split(" or ") if setting.metadata["needs"] else ():
            name, relation, operand = parse_condition(condition)
            choices = settings[name].metadata["choices"]
            if choices and relation:
                assert set(operand.split(",")) <= set(choices), (setting.name, condition)


@pytest.mark.parametrize(
    ("line", "needed"),
    [
        (f"{SAMPLED} --finetune", "--load"),
        (f"{STORED} --rollout-top-p 0.9", "--prompt-data or --task"),
        (f"{SAMPLED} --dpo-beta 1", "--objective dpo"),
        (f"{STORED} --objective sft --entropy-coef 1", "another --objective than dpo or sft"),
        (f"{SAMPLED} --sequence-parallel", "--tensor-model-parallel-size above 1"),
    ],
)
def test_what_nothing_reads_is_refused(line: str, needed: str) -> None:
    with pytest.raises(InputErrors) as caught:
        parse(line)
    flag = [word for word in line.split() if word.startswith("--")][-1]
    assert list(caught.value.messages) == [f"{flag} has no effect without {needed}; leave it out or add that"]
