"""Site files as a Slurm job reads them: what they may do, and how a failure in one ends the job. Needs no Slurm."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import REPOSITORY

ROOT = REPOSITORY
SLURM = ROOT / "slurm"
JOB = """set -uo pipefail
source "$DTA_SLURM_DIR/common.sh"
read_settings
[ $- = "${-/e}" ] && [[ $- = *u* ]] && [[ $SHELLOPTS = *pipefail* ]] || echo "other options: $- $SHELLOPTS"
false
echo "python=$DTA_PYTHON value=${VALUE:-}"
"""
# Defines "module" as environment modules do: with variables that nobody has set, and commands that fail inside.
MODULES = """
module() {
    false
    [ "$1" = purge ] || export LOADED="${LOADED:+$LOADED:}$LD_LIBRARY_PATH_OF_THE_SITE$2"
    shift
    case " $* " in *" missing "*) echo "module missing is not known" >&2; return 1 ;; esac
}
false
true
"""


def read_site(folder: Path, text: str) -> subprocess.CompletedProcess:
    """Run what a job does with a site file of these lines."""
    file = folder / "site.sh"
    file.write_text(text)
    variables = {
        "PATH": os.environ["PATH"],
        "DTA_SLURM_DIR": str(SLURM),
        "DTA_ENVIRONMENT": str(file),
        "DTA_LOG_DIR": str(folder / "logs"),
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_ID": "7",
    }
    return subprocess.run(["bash", "-c", JOB], env=variables, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "text",
    [
        "export LIBRARIES=/opt/lib:$NOT_SET_BY_ANYBODY\n",
        '[ -n "$NOT_SET_BY_ANYBODY" ] && export OTHER=1\n',
        "grep -q nothing /dev/null | cat\n",
        "set -euo pipefail\n",
        "inside() { false; true; }\ninside\n",
    ],
)
def test_a_site_file_may_do_what_files_of_sites_do(tmp_path, text):
    done = read_site(tmp_path, text + f"DTA_PYTHON={sys.executable}\nVALUE=read\n")
    assert (done.returncode, done.stdout) == (0, f"python={sys.executable} value=read\n"), done.stderr


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("\nmodule load cuda\n", 2, "'module load cuda' failed with status 127; there is no command 'module'"),
        ("conda activate rl\n", 1, "there is no command 'conda' in the shell of a job, source etc/profile.d/conda.sh"),
        ("return 3\n", None, "ended with status 3"),
        ("exit 0\n", None, "ended the shell of the job (exit, or a failure after set -e)"),
        ("if ; then\n", None, "ended with status"),
        ("DTA_PYTHON=/nowhere/python\n", None, "DTA_PYTHON is '/nowhere/python', which is not a program here"),
    ],
)
def test_a_failure_in_a_site_file_ends_the_job(tmp_path, text, line, message):
    done = read_site(tmp_path, text + "true\n" if line else text)
    assert done.returncode == 2
    assert done.stdout == ""
    told = [message_line for message_line in done.stderr.splitlines() if "job 7, start 1: " in message_line]
    assert len(told) == 1, done.stderr
    assert message in told[0]
    if line:
        assert f"site.sh, line {line}: " in told[0]


def test_the_example_for_modules(tmp_path):
    (tmp_path / "modules.sh").write_text(MODULES)
    text = (SLURM / "environment.modules.sh").read_text()
    text = text.replace("/etc/profile.d/modules.sh\nmodule purge", f"{tmp_path}/modules.sh\nmodule purge")
    text = text.replace("/shared/environments/megatron_dta/bin/python", sys.executable) + "VALUE=$LOADED\n"
    done = read_site(tmp_path, text)
    assert done.stdout == f"python={sys.executable} value=python/3.11\n", done.stderr
    done = read_site(tmp_path, text.replace("module load python/3.11", "module load missing"))
    assert done.returncode == 2
    assert "'module load missing cuda/12.8' failed with status 1" in done.stderr


def test_every_setting_of_the_scripts_is_in_the_example():
    example = (SLURM / "environment.example.sh").read_text()
    scripts = "".join(path.read_text() for path in sorted(SLURM.glob("*.sbatch"))) + (SLURM / "common.sh").read_text()
    used = {
        word for word in scripts.replace("}", " ").replace("{", " ").replace(":", " ").split() if word[:4] == "DTA_"
    }
    names = {name.split("=")[0].strip('"$') for name in used if name.split("=")[0].strip('"$').isidentifier()}
    of_submit = {"DTA_SLURM_DIR", "DTA_ENVIRONMENT", "DTA_LOG_DIR"}
    assert {name for name in names - of_submit if f"{name}=" not in example} == set()
