"""SIGTERM and similar signals: the run ends after its step, saves its state, and resumes exactly."""

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from conftest import REPOSITORY
from forked import Program
from megatron_dta.core.model.parallel.mesh import alone
from megatron_dta.extras.agents.gateway.engine_loop import _IDLE_S, EngineLoop
from megatron_dta.training.monitor.stop_signals import STOP_SIGNALS, StopSignals, kept_signals
from resume_cases import rows_without_timing
from trainer_cases import MODEL, make_trainer, run

FLAGS = "--task arithmetic --arithmetic-max-operand 9 --rollout-batch-size 2 --n-samples-per-prompt 2 --lr 1e-3 "
FLAGS += "--rollout-max-response-len 6 --train-iters 4"


def test_a_signal_in_a_step_ends_the_run_after_it(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    run(f"{FLAGS} --save {tmp_path}/straight")
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    # One signal in the second step, the other one in the third, after a restart.
    for step, name in enumerate(("SIGTERM", "SIGINT"), start=2):
        trainer, output = make_trainer(f"{FLAGS} --save {tmp_path}/stopped")
        train = trainer.engine.forward_backward

        def interrupted(*arguments, trainer=trainer, train=train, step=step, name=name, **settings):
            if trainer.progress.iteration == step - 1:
                os.kill(os.getpid(), signal.Signals[name])
            return train(*arguments, **settings)

        trainer.engine.forward_backward = interrupted
        trainer.run()
        trainer.metrics.close()
        assert trainer.progress.iteration == step
        assert f"stopped by {name} after step {step}" in output.getvalue()
        assert ("Ctrl-C" in capfd.readouterr().err) == (name == "SIGINT")
        assert (tmp_path / "stopped" / f"iter_{step:07d}").is_dir()
        assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
    run(f"{FLAGS} --save {tmp_path}/stopped")
    assert rows_without_timing(tmp_path / "stopped") == rows_without_timing(tmp_path / "straight")


def test_a_second_ctrl_c_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("megatron_dta.training.monitor.stop_signals.time.monotonic", lambda: now[0])
    signals = StopSignals()
    with signals.watching():
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGINT)
        now[0] += 0.5  # what torchrun passes on beside the terminal
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.name == "SIGUSR1"
        now[0] += 1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_scripts_learn_of_ctrl_c(tmp_path: Path) -> None:
    """Status 130, no traceback, and a checkpoint."""
    flags = f"{FLAGS} --train-iters 100000 --save {tmp_path}"
    program = Program(["-m", "megatron_dta.train", *MODEL.split(), *flags.split()])
    metrics = tmp_path / "metrics.jsonl"
    program.wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0)
    os.kill(program.pid, signal.SIGINT)
    done = program.wait()
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.glob("iter_*"))


def test_a_server_ends_although_its_handler_outlasts_its_wait() -> None:
    loop = EngineLoop(None)
    signal.signal(signal.SIGALRM, lambda *_: (time.sleep(_IDLE_S), os.kill(os.getpid(), signal.SIGTERM)))
    signal.setitimer(signal.ITIMER_REAL, 0.7 * _IDLE_S)
    rescue = threading.Timer(20, loop.release, [0])
    rescue.start()
    with alone(), StopSignals().watching():
        signals = kept_signals()
        loop.run(lambda: bool(signals))
    assert rescue.is_alive()
    rescue.cancel()


def test_a_second_signal_ends_a_run_that_waits_for_a_reward(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(
        "import pathlib, time\n"
        "def judge(prompt, response, response_token_ids):\n"
        f"    pathlib.Path({str(tmp_path)!r}, 'called').touch()\n"
        "    time.sleep(600)\n"
    )
    (tmp_path / "prompts.jsonl").write_text('{"prompt_token_ids": [1, 2], "answer": "3"}\n')
    flags = (
        f"--prompt-data {tmp_path}/prompts.jsonl --tokenizer-type NullTokenizer --vocab-size 9 --eos-id 8 --lr 1e-3 "
        f"--rollout-batch-size 1 --n-samples-per-prompt 2 --rollout-max-response-len 4 --train-iters 2 "
        f"--reward-function {tmp_path}/rewards.py:judge"
    )
    program = Program(["-m", "megatron_dta.train", *MODEL.split(), *flags.split()])
    program.wait_until((tmp_path / "called").exists)
    time.sleep(1.2)  # a call counts as waiting after a second
    os.kill(program.pid, signal.SIGTERM)
    program.wait_until(lambda: "at once" in program.stderr())
    first = program.stderr()
    time.sleep(1.2)
    os.kill(program.pid, signal.SIGTERM)
    done = program.wait()
    assert (done.returncode, done.stderr.removeprefix(first)) == (130, "interrupted\n"), done.stderr


def test_job_scripts_pass_slurms_warning_on(tmp_path: Path) -> None:
    """A signal of ``--signal B:...`` reaches the step as a SIGTERM, and the script waits until it has ended."""
    script = tmp_path / "job.sh"
    script.write_text(
        f"""source {REPOSITORY}/slurm/common.sh
say() {{ echo "$*"; }}
scancel() {{ kill -TERM "$step_process"; }}
SLURM_JOB_ID=1
wait() {{ touch {tmp_path}/waits; builtin wait "$@"; }}
( trap 'sleep 0.5; echo saved; exit 0' TERM; echo ready; touch {tmp_path}/ready; while :; do sleep 0.1; done ) &
step_process=$!
( until [ -e {tmp_path}/ready ] && [ -e {tmp_path}/waits ]; do sleep 0.05; done; kill -USR1 $$ ) &
wait_for_step
echo "status $step_status warned $warned"
"""
    )
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, timeout=300)
    expected = ["ready", "got SIGUSR1: the processes save and end", "saved", "status 0 warned 1"]
    assert done.stdout.splitlines() == expected, done.stderr


@pytest.mark.parametrize(("files", "early"), [({}, 3), ({"began": "1"}, 1), ({"began": "1", "early": "1"}, 2)])
def test_a_start_that_ended_with_its_node_was_no_early_failure(tmp_path: Path, files: dict, early: int) -> None:
    """Slurm ends the script of such a start before it can note anything; the next one fails at once."""
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\nexit 137\n")
    srun.chmod(0o755)
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    script = f"""source {REPOSITORY}/slurm/common.sh
PATH={tmp_path}:$PATH logs={tmp_path} repository={REPOSITORY} container=() DTA_EARLY_FAILURE_SECONDS=60
launch --ntasks=1 -- 'exec "$@"' true
wait_for_step
echo "status $step_status early $early"
"""
    done = subprocess.run(["bash", "-uc", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"status 137 early {early}\n", done.stderr
