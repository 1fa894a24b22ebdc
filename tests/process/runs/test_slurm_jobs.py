"""The other job scripts on a real Slurm of two nodes: what they start, with which arguments, and how they end."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurm_cases import ROOT, needs_slurm, submit
from slurm_cluster import SlurmCluster, missing_programs

# Takes the place of the Python that runs the project's programs: records its arguments and exits with the given status.
PYTHON = """#!{python}
import json, os, signal, sys, time
from pathlib import Path
arguments = sys.argv[1:]
note = {{"arguments": arguments, "folder": os.getcwd(), "path": os.environ.get("PYTHONPATH", ""),
        "rank": os.environ.get("RANK"), "size": os.environ.get("WORLD_SIZE"),
        "meet": os.environ.get("MASTER_ADDR"), "job": os.environ["SLURM_JOB_NAME"]}}
folder = Path({folder!r}) / os.environ["SLURM_JOB_NAME"]
folder.mkdir(exist_ok=True)
path = folder / f"{{os.getpid()}}-{{os.environ.get('RANK', 0)}}-{{os.environ.get('SLURM_ARRAY_TASK_ID', 0)}}.json"
path.write_text(json.dumps(note))
restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
if "--until-term" in arguments and not restarts:
    def save(*_):
        time.sleep(1)
        print("saved and ended", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    (folder / f"waits-{{os.getpid()}}").touch()
    time.sleep(120)
if "--no-package" in arguments:
    import package_that_is_not_there
sys.exit(3 if "--fail-once" in arguments and not restarts or "--fail-always" in arguments else 0)
"""
SERVER = """import http.server
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *arguments): ...
http.server.ThreadingHTTPServer(("127.0.0.1", {port}), Healthy).serve_forever()
"""
PORT = 18734
# Takes the place of srun where a container is asked for, which needs the plugin pyxis: notes the options and runs the
# rest as srun would.
SRUN = """#!{python}
import json, os, sys
from pathlib import Path
arguments = sys.argv[1:]
container = [part for part in arguments if part.startswith("--container-")]
Path({folder!r}, "container.json").write_text(json.dumps(container))
(workdir,) = [part.split("=", 1)[1] for part in container if part.startswith("--container-workdir=")]
os.execv({srun!r}, ["srun", "--chdir", workdir, *(part for part in arguments if part not in container)])
"""


class Site:
    """A cluster and an environment file for it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cluster = folder, SlurmCluster(folder / "cluster")
        python = folder / "python"
        python.write_text(PYTHON.format(python=sys.executable, folder=str(folder)))
        python.chmod(0o755)
        (folder / "server.py").write_text(SERVER.format(port=PORT))
        (folder / "site.sh").write_text(
            f"DTA_PYTHON={python}\nDTA_PROCESSES_PER_NODE=2\nDTA_MAX_RESTARTS=1\nDTA_SERVER_PORT={PORT}\n"
            f"DTA_SERVER_COMMAND='{sys.executable} {folder}/server.py'\n"
        )

    def submit(self, *arguments: str, more: str = "") -> str:
        """Submit a job; the site file has the lines ``more``, too."""
        environment = {**self.cluster.environment, "DTA_LOG_DIR": str(self.folder / "logs")}
        file = self.folder / "site.sh"
        if more:
            base, file = file.read_text(), self.folder / f"site-{len(list(self.folder.iterdir()))}.sh"
            file.write_text(base + more)
        done = submit("--env", str(file), *arguments, environment=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[-1]

    def log(self, name: str, job: str) -> str:
        return (self.folder / "logs" / f"{name}-{job}.log").read_text()

    def notes(self, name: str) -> list[dict]:
        return [json.loads(path.read_text()) for path in sorted((self.folder / name).glob("*.json"))]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Site:
    if missing_programs():
        pytest.skip("Slurm is not installed")
    jobs = Site(tmp_path_factory.mktemp("jobs"))
    try:
        jobs.cluster.start()
        yield jobs
    finally:
        jobs.cluster.stop()


@needs_slurm
def test_servers_are_ready_before_the_trainer_and_end_with_it(site):
    job = site.submit("train_with_servers", "--nodes=1", "--exclusive", ":", "--nodes=1", "--", "--lr", "1e-6")
    assert site.cluster.wait_for_job(job, 60) == "COMPLETED"
    notes = site.notes("train_with_servers")
    flags = ["--rollout-weight-transfer", "nccl", "--lr", "1e-6", "--rollout-server-url", f"http://127.0.0.1:{PORT}"]
    expected = ["-m", "megatron_dta.train", *flags]
    assert [note["arguments"] for note in notes] == [expected] * 2
    assert sorted((note["rank"], note["size"]) for note in notes) == [("0", "2"), ("1", "2")]
    log = site.log("train_with_servers", job)
    assert "all servers answer" in log
    assert "finished" in log


def test_a_server_is_started_again_while_the_run_trains(tmp_path: Path) -> None:
    script = (ROOT / "slurm" / "train_with_servers.sbatch").read_text().split("server_script='")[1].split("'\n")[0]
    starts, answers = tmp_path / "starts", tmp_path / "answers"
    # It fails three times; the third time the run has ended.
    command = f"echo $PYTHONPATH >> {starts}; [ $(wc -l < {starts}) -lt 3 ] || rm -f {answers}; exit 7"
    for before, count in ((False, 1), (True, 3)):
        starts.unlink(missing_ok=True)
        if before:
            answers.touch()
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": "own"}
        done = subprocess.run(
            ["bash", "-c", script.replace("sleep 5", "sleep 0"), "server", "/there", command, str(answers)],
            env=environment, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 7
        assert starts.read_text() == "/there:/there/kernels:own\n" * count
        assert done.stderr.count("ended with status 7 and is started again") == count - 1


@needs_slurm
def test_a_sweep_trains_once_a_line(site):
    (site.folder / "sweep.txt").write_text("--lr 1e-5 --save 'runs/a b'\n--lr 1e-6 --save $(touch runs)\n")
    job = site.submit(
        "sweep",
        "--array=1-2",
        "--nodes=1",
        "--cpus-per-task=2",
        "--",
        str(site.folder / "sweep.txt"),
        "--num-layers",
        "2",
    )
    assert site.cluster.wait_for_job(f"{job}_1", 60) == "COMPLETED"
    assert site.cluster.wait_for_job(f"{job}_2", 60) == "COMPLETED"
    arguments = sorted({tuple(note["arguments"][4:]) for note in site.notes("sweep")})
    assert arguments == [("--lr", "1e-5", "--save", "runs/a b"), ("--lr", "1e-6", "--save", "$(touch", "runs)")]
    missing = site.submit(
        "sweep", "--array=3-3", "--job-name=missing", "--nodes=1", "--", str(site.folder / "sweep.txt")
    )
    assert site.cluster.wait_for_job(f"{missing}_3", 60) == "FAILED"


@needs_slurm
def test_a_failed_job_is_started_again_so_often_and_no_more(site):
    more = "DTA_EARLY_FAILURE_SECONDS=0"
    once = site.submit("train", "--nodes=2", "--ntasks-per-node=2", "--job-name=once", "--", "--fail-once", more=more)
    always = site.submit(
        "train", "--nodes=1", "--ntasks-per-node=2", "--job-name=always", "--", "--fail-always", more=more
    )
    assert site.cluster.wait_for_job(once, 120) == "COMPLETED"
    assert site.cluster.state_of(once) == ("COMPLETED", 1)
    assert "failed with status 3 (a process died or hung" in site.log("once", once)
    assert {note["size"] for note in site.notes("once")} == {"4"}
    assert site.cluster.wait_for_job(always, 120) == "FAILED"
    assert site.cluster.state_of(always) == ("FAILED", 1)
    assert "failed with status 3 after 1 restarts (DTA_MAX_RESTARTS)" in site.log("always", always)


@needs_slurm
def test_an_early_failure_is_not_started_again(site):
    """What fails within a minute of the start, or before it, would fail again; the log says why."""
    two = ("--nodes=1", "--ntasks-per-node=2")
    package = site.submit("train", *two, "--job-name=package", "--", "--no-package")
    # Without pyxis, srun refuses its options.
    image = site.submit("train", *two, "--job-name=image", "--", more="DTA_CONTAINER_IMAGE=/nowhere.sqsh\n")
    tool = site.submit("evaluate", "--job-name=tool", "--", "--fail-always")
    for job in (package, image, tool):
        assert site.cluster.wait_for_job(job, 60) == "FAILED"
        assert site.cluster.state_of(job) == ("FAILED", 0)
    assert "failed with status 3 within 60 seconds" in site.log("tool", tool)
    text = site.log("package", package)
    assert "failed with status 1 within 60 seconds" in text
    assert "rank 0: ModuleNotFoundError: No module named 'package_that_is_not_there'" in text
    text = site.log("image", image)
    assert "before any process began, which another start would not mend: srun: unrecognized option" in text
    assert site.notes("image") == []


@needs_slurm
def test_early_failures_of_a_job_that_ran_before_are_counted(site):
    """A start that lasted long enough shows that the job can run: it may fail early twice, not three times."""
    more = '[ "${SLURM_RESTART_COUNT:-0}" != 0 ] || DTA_EARLY_FAILURE_SECONDS=0\nDTA_MAX_RESTARTS=9\n'
    job = site.submit("train", "--nodes=1", "--ntasks-per-node=2", "--job-name=later", "--", "--fail-always", more=more)
    assert site.cluster.wait_for_job(job, 120) == "FAILED"
    assert site.cluster.state_of(job) == ("FAILED", 3)
    assert "failed with status 3 within 60 seconds" in site.log("later", job)


@needs_slurm
def test_a_container_sees_what_the_job_uses(site):
    """Repository, logs and the job's folder are mounted, it starts in the last, and finds the project first."""
    programs = site.folder / "programs"
    programs.mkdir()
    real = shutil.which("srun", path=site.cluster.environment["PATH"])
    (programs / "srun").write_text(SRUN.format(python=sys.executable, folder=str(site.folder), srun=real))
    (programs / "srun").chmod(0o755)
    more = f"PATH={programs}:$PATH\nDTA_CONTAINER_IMAGE=image.sqsh\nDTA_CONTAINER_MOUNTS=/data:/data:ro\n"
    name, copy = "--job-name=container", f"DTA_CONTAINER_REPOSITORY=/opt/dta\nDTA_CONTAINER_WORKDIR={site.folder}\n"
    job = site.submit("train", "--nodes=1", "--ntasks-per-node=2", name, "--", "--lr", "1", more=more)
    assert site.cluster.wait_for_job(job, 60) == "COMPLETED", site.log("container", job)
    here, logs = Path.cwd(), site.folder / "logs"
    assert json.loads((site.folder / "container.json").read_text()) == [
        "--container-image=image.sqsh",
        f"--container-mounts=/data:/data:ro,{ROOT}:{ROOT},{logs}:{logs},{here}:{here}",
        f"--container-workdir={here}",
    ]
    for note in site.notes("container"):
        assert note["folder"] == str(here)
        assert note["path"].startswith(f"{ROOT}:{ROOT}/kernels")
    assert (logs / f"container-{job}" / "rank-1.log").exists()

    job = site.submit("evaluate", "--job-name=inside", "--", "--lr", "1", more=more + copy)
    assert site.cluster.wait_for_job(job, 60) == "COMPLETED", site.log("inside", job)
    mounts, workdir = json.loads((site.folder / "container.json").read_text())[1:]
    assert mounts == f"--container-mounts=/data:/data:ro,{logs}:{logs},{here}:{here}"
    assert workdir == f"--container-workdir={site.folder}"
    (note,) = site.notes("inside")
    assert note["arguments"][0] == "/opt/dta/tools/evaluate_sampling.py"
    assert note["path"].startswith("/opt/dta:/opt/dta/kernels")


@needs_slurm
@pytest.mark.parametrize("launcher", ["task", "tool"])
def test_a_warned_process_ends_by_itself(site, launcher):
    """SIGTERM reaches every process of the step; what stands around Python waits until it has saved."""
    job_type = ("train", "--nodes=1", "--ntasks-per-node=2") if launcher == "task" else ("evaluate",)
    name = f"warned-{launcher}"
    job = site.submit(*job_type, f"--job-name={name}", "--", "--until-term")
    count, deadline = 2 if launcher == "task" else 1, time.monotonic() + 60
    while len(list((site.folder / name).glob("waits-*"))) < count:
        assert time.monotonic() < deadline, site.log(name, job)
        time.sleep(0.2)
    site.cluster.run("scancel", "--batch", "--signal=TERM", job)
    assert site.cluster.wait_for_job(job, 120) == "COMPLETED"
    text = site.log(name, job)
    assert site.cluster.state_of(job) == ("COMPLETED", 1), text
    assert text.count("saved and ended") == count, text
    assert "was warned before its time limit or preemption; put into the queue again" in text
