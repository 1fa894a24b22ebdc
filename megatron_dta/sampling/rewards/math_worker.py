"""Compares mathematical answers with the package math-verify, one line of JSON each; started as a script.

    python math_worker.py CPU_SECONDS MEMORY_BYTES

It writes ``{"ready": true}`` (or ``{"error": ...}``), then answers every line ``{"answer": ..., "response": ...}`` with

    {"reward": 0 or 1}               the result of the package
    {"reward": 0, "raised": ...}     the package raised on the response
    {"error": ...}                   the answer contains nothing that the package can compare

A separate process is the only reliable way to stop the package: its own limits are signals, which work only in a main
thread, and large powers are computed in C, where signals are not handled. A line that takes more than CPU_SECONDS or
MEMORY_BYTES ends this process, which the caller detects.

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

# Marks in a text that delimit its answer.
_MARKS = ("$", "\\boxed", "\\(", "\\[", "####", "\n")


def answer_text(answer):
    """The expected answer as text that the package can parse; ``ValueError`` if it is neither text nor a number.

    Without a mark the package looks for a number first and takes ``2\\sqrt{3}`` for 2 and ``(1, 2)`` for 2, so a bare
    answer is marked as mathematics. Words with a number (``3/4 cups``) stand for the number.
    """
    if isinstance(answer, float) and math.isfinite(answer):
        # Without an exponent, whose e would be parsed as Euler's number.
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
            parsed = parse(answer_text(answer), parsing_timeout=None, raise_on_error=True)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        if not parsed:
            return {"error": "it holds nothing that math-verify can compare"}
        known.clear()
        known[key] = parsed
    try:
        parsed = parse(request["response"], parsing_timeout=None, raise_on_error=True)
        return {"reward": float(verify(known[key], parsed, timeout_seconds=None, raise_on_error=True))}
    except MemoryError:
        raise
    except Exception as error:
        return {"reward": 0.0, "raised": type(error).__name__}


def main():
    cpu_s, memory = int(sys.argv[1]), int(sys.argv[2])
    # Standard output is for replies only; anything that a package prints goes to standard error.
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
