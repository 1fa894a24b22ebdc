"""Programs that try to get a reward, to hang, to end the run or to leave something behind; none solves anything."""

import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from megatron_dta.sampling.rewards.code_reward import CodeTests

MARK = "97531"
# fmt: off
RECORDS: list[dict[str, Any]] = [
    {"tests": {"fn_name": "add", "inputs": [[2, 3], [-1, 1]], "outputs": [5, 0]}},
    {"tests": [{"fn_name": "add", "input": [20, 22], "output": [42]}]},
    {"tests": {"inputs": ["2 3\n", "20 22\n"], "outputs": ["5\n", "42\n"]}},
    {"tests": [{"input": "add 7 8", "output": "15.5"}]},
]
# fmt: on


def read_programs(name: str) -> dict[str, str]:
    """The programs of a file beside this one, by the titles in front of them."""
    parts = Path(__file__).with_name(name).read_text().split("### ")[1:]
    return {title: code.strip("\n") + "\n" for title, _, code in (part.partition("\n") for part in parts)}


# Each is Python that a program runs; @OUT@ is a file outside its folder, @MARK@ a number that shows a survivor.
ATTACKS = read_programs("hostile_programs.txt")


class Hostile(NamedTuple):
    """A program, and the record that it is judged by."""

    name: str
    code: str
    record: dict[str, Any]


def programs(count: int, seed: int, outside: str) -> Iterator[Hostile]:
    """``count`` programs: every attack in turn, dressed and judged in ways that ``seed`` draws."""
    draws, names = random.Random(seed), list(ATTACKS)
    draws.shuffle(names)
    for index in range(count):
        name = names[index % len(names)]
        attack = ATTACKS[name].replace("@OUT@", outside).replace("@MARK@", MARK)
        yield Hostile(name, _dressed(attack, draws), draws.choice(RECORDS))


def _dressed(attack: str, draws: random.Random) -> str:
    """The attack as it is, or hidden: as text, in a thread, in a child, in a function, after a wrong answer."""
    dress = draws.randrange(6)
    wrong = "def add(*a):\n    return None\n"
    if dress == 1:
        return f"exec({attack!r}, globals())\n"
    if dress == 2:
        return f"{wrong}import threading\nthreading.Thread(target=exec, args=({attack!r}, globals())).start()\n"
    if dress == 3:
        return f"{wrong}import os\nif os.fork() == 0:\n    exec({attack!r}, globals())\n"
    if dress == 4:
        return f"def add(*a):\n    exec({attack!r}, globals())\n"
    if dress == 5:
        return f"try:\n    exec({attack!r}, globals())\nexcept BaseException:\n    pass\nprint(0)\n"
    return attack


def survivors() -> list[str]:
    """Command lines of processes that programs have left."""
    lines = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            line = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if "sleep" in line and line.split()[-1:] == [MARK]:
            lines.append(line)
    return lines


def judge(function: CodeTests, hostile: Hostile) -> list[str]:
    """What went wrong."""
    began = time.monotonic()
    try:
        reward = function(hostile.record, f"```python\n{hostile.code}\n```", [])
    except BaseException as error:
        return [f"{hostile.name}: raised {error!r}\n{hostile.code}"]
    wrong = [f"{hostile.name}: reward {reward}\n{hostile.code}\n{hostile.record}"] if reward != 0 else []
    seconds = time.monotonic() - began
    return wrong + ([f"{hostile.name}: took {seconds:.0f} s\n{hostile.code}"] if seconds > 90 else [])


def attack(function: CodeTests, count: int, seed: int, folder: Path, workers: int) -> list[str]:
    """Run ``count`` programs while a checkpoint lies in ``folder``; what went wrong."""
    (folder / "run").mkdir()
    checkpoint = folder / "run" / "checkpoint"
    checkpoint.write_text("weights")
    before = _listing(folder)
    with ThreadPoolExecutor(workers) as pool:
        verdicts = pool.map(lambda program: judge(function, program), programs(count, seed, str(checkpoint)))
        wrong = [line for lines in verdicts for line in lines]
    wrong += [f"a process survived: {line}" for line in survivors()]
    if _listing(folder) != before or checkpoint.read_text() != "weights":
        wrong.append(f"files outside: {_listing(folder)}")
    wrong += [f"a file outside: {path}" for path in (f"/dev/shm/{MARK}", f"/var/tmp/{MARK}") if os.path.lexists(path)]
    return wrong


def _listing(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))
