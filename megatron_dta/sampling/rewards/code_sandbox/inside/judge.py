"""Compares a program's outputs with the expected ones and prints the verdict; it handles bytes, text and JSON only.

Standard input is what ``run_program.py`` writes. The arguments are the limits as JSON and the descriptor of a file with
JSON: the CPU limit of a test, whether outputs are JSON, and for each test a list of the outputs that are accepted.
"""

import json
import math
import os
import resource
import signal
import sys
from decimal import Decimal, InvalidOperation

from limits import prepare

CLOSE = 1e-6
LONGEST_NUMBER = 100
MOST_SECONDS = 60
SHOWN_BYTES = 200
STOPPED = (-signal.SIGXCPU, -signal.SIGKILL)


def main():
    """Print ``started``, and the verdict as JSON as soon as it is known."""
    with os.fdopen(int(sys.argv[2]), "rb") as file:
        job = json.loads(file.read())
    prepare(json.loads(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))
    stream = os.fdopen(0, "rb")
    if stream.readline(100) != b"started\n":
        print(json.dumps({"error": "it ended before its limits were set"}))
        return
    print("started", flush=True)
    verdict = {"passed": False, "stopped": False}
    for index, accepted in enumerate(job["accepted"]):
        head = json.loads(stream.readline(1000) or b'{"code": 1, "cpu": 0, "bytes": 0}')
        verdict["stopped"] = head["code"] in STOPPED or head["cpu"] > job["cpu_s"]
        output = stream.read(head["bytes"])
        has_failed = verdict["stopped"] or head["code"] != 0 or len(output) != head["bytes"]
        if has_failed or not is_accepted(output, accepted, job["is_json"]):
            verdict |= {"failed": index, "output": output[:SHOWN_BYTES].decode(errors="replace")}
            break
    else:
        verdict["passed"] = True
    print(json.dumps(verdict), flush=True)


def is_accepted(output, accepted, is_json):
    """Whether the bytes are one of the accepted outputs."""
    if not is_json:
        text = output.decode(errors="replace")
        return any(same_text(text, expected) for expected in accepted)
    try:
        value = json.loads(output)
    except (ValueError, RecursionError):
        return False
    return any(same_value(value, expected) for expected in accepted)


def same_text(text, expected):
    """Line by line, without blanks at the ends of lines and of the text; numbers may be written in other ways."""
    lines, wanted = ([line.strip() for line in lines_of.strip().splitlines()] for lines_of in (text, expected))
    return len(lines) == len(wanted) and all(
        a == b or same_tokens(a.split(), b.split()) for a, b in zip(lines, wanted, strict=True)
    )


def same_tokens(tokens, wanted):
    return len(tokens) == len(wanted) and all(a == b or same_number(a, b) for a, b in zip(tokens, wanted, strict=True))


def same_number(text, wanted):
    """Equal decimals; close ones if a fraction or an exponent is expected."""
    if max(len(text), len(wanted)) > LONGEST_NUMBER:
        return False
    try:
        a, b = Decimal(text), Decimal(wanted)
    except InvalidOperation:
        return False
    if not (a.is_finite() and b.is_finite()):
        return False
    is_fraction = any(sign in wanted for sign in ".eE")
    return a == b or (is_fraction and math.isclose(float(a), float(b), rel_tol=CLOSE, abs_tol=CLOSE))


def same_value(value, expected):
    """Equal as data of JSON; close if a float is expected."""
    if isinstance(expected, list):
        return (
            isinstance(value, list)
            and len(value) == len(expected)
            and all(same_value(a, b) for a, b in zip(value, expected, strict=True))
        )
    if isinstance(expected, dict):
        return (
            isinstance(value, dict)
            and value.keys() == expected.keys()
            and all(same_value(value[key], expected[key]) for key in expected)
        )
    if not isinstance(expected, int | float) or not isinstance(value, int | float):
        return type(value) is type(expected) and value == expected
    if isinstance(expected, int) or max(abs(value), abs(expected)) > sys.float_info.max:  # also for infinities
        return value == expected
    is_nan = math.isnan(value) and math.isnan(expected)
    return is_nan or math.isclose(value, expected, rel_tol=CLOSE, abs_tol=CLOSE)


if __name__ == "__main__":
    main()
