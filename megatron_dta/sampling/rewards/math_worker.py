"""Started as a script, by file: compares mathematical answers with the package math-verify, one line of JSON each.

    python math_worker.py CPU_SECONDS MEMORY_BYTES

It says ``{"ready": true}`` (or ``{"error": ...}``), then answers every line ``{"answer": ..., "response": ...}`` with

    {"reward": 0 or 1}               what the package says
    {"reward": 0, "raised": ...}     the package has raised over the response
    {"error": ...}                   the answer holds nothing that the package can compare

A process of its own because nothing else stops the package for sure: its limits are signals, which exist in a main
thread only, and the powers that a model writes are computed in C, where no signal is heard. A line that takes more than
CPU_SECONDS or MEMORY_BYTES ends this process; whoever has asked sees that it ended.

It imports nothing of this project, so that it starts without PyTorch and Megatron.
"""

import json
import logging
import math
import re
import resource
import sys
import time
from decimal import Decimal

# Marks of text that says itself where its answer is.
_MARKS = ("$", "\\boxed", "\\(", "\\[", "####", "\n")


def answer_text(answer):
    """The expected answer as text in which the package finds it; ``ValueError`` where it is neither text nor number.

    Without a mark the package looks for a number first and takes ``2\\sqrt{3}`` for 2 and ``(1, 2)`` for 2, so a bare
    answer is marked as mathematics. Words with a number (``3/4 cups``) are no mathematics: there it is the number.
    """
    if isinstance(answer, float) and math.isfinite(answer):
        # Without an exponent, which would be read as Euler's number.
        answer = format(Decimal(repr(answer)), "f")
    if isinstance(answer, bool) or not isinstance(answer, str | int):
        raise ValueError(f"is {type(answer).__name__}, and must be text or a number")
    text = str(answer).strip()
    is_prose = re.search(r"[A-Za-z]{2,}", text) and re.search(r"\d", text) and not re.search(r"[\\^_{}=()\[\]]", text)
    return text if not text or is_prose or any(mark in text for mark in _MARKS) else f"\\boxed{{{text}}}"


def compare(parse, verify, known, line):
    """The reply to one line; ``known`` keeps answers that were parsed, since a group's responses share one."""
    request = json.loads(line)
    answer = request["answer"]
    key = json.dumps(answer)
    if key not in known:
        try:
            found = parse(answer_text(answer), parsing_timeout=None, raise_on_error=True)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        if not found:
            return {"error": "it holds nothing that math-verify can compare"}
        known.clear()
        known[key] = found
    try:
        found = parse(request["response"], parsing_timeout=None, raise_on_error=True)
        return {"reward": float(verify(known[key], found, timeout_seconds=None, raise_on_error=True))}
    except MemoryError:
        raise
    except Exception as error:
        return {"reward": 0.0, "raised": type(error).__name__}


def main():
    cpu_s, memory = int(sys.argv[1]), int(sys.argv[2])
    # Replies alone go to where they are read; whatever a package prints goes where errors go.
    replies, sys.stdout = sys.stdout, sys.stderr
    try:
        from math_verify import parse, verify
    except ImportError as error:
        print(json.dumps({"error": str(error)}), file=replies, flush=True)
        return
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(json.dumps({"ready": True}), file=replies, flush=True)
    known = {}
    for line in sys.stdin:
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + cpu_s, hard))
        print(json.dumps(compare(parse, verify, known, line)), file=replies, flush=True)


if __name__ == "__main__":
    main()
