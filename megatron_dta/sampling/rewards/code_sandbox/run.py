"""The runner, a script that starts programs for the judge and ends all processes that they leave.

    python -I run.py SETTINGS < JOB > VERDICT

SETTINGS is JSON: the limits (``cpu_s``, ``wall_s``, ``memory``, ``file_bytes``, ``processes``), the way of
``isolation``, a ``folder`` if it needs one, and the ``parent``'s process id. Only the judge reads JOB and writes
VERDICT. The runner must not have them, because programs start as copies of it.
"""

import fcntl
import json
import os
import select
import signal
import socket
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import bridge
import isolation
import judge
import kernel

del sys.path[0]

START_SECONDS = 60.0
# Time for the exit status of a program whose connection to the judge is lost.
LOST_SECONDS = 1.0


class Runner:
    """Serves one judge.

    Args:
        way: the way of isolation.
        folder: the folder in which programs work.
        control: the socket to the judge.
        judge: the judge's process id, and the descriptor of its verdict, to which ``started`` is also written.
    """

    def __init__(self, way, folder, control, judge, limits):
        self._way, self._folder, self._control, self._limits = way, folder, control, limits
        self._judge, self._verdict = judge
        self._runs = 0
        self._woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def serve(self):
        """Start the programs that the judge requests, until it ends or takes too long between two runs."""
        control = self._control.fileno()
        end = time.monotonic() + self._limits["wall_s"] + START_SECONDS
        while self._wait([control], end):
            request, descriptors, _, _ = socket.recv_fds(self._control, 100, 4)
            if not request:
                break
            if request == b"start":
                try:
                    self._control.send(json.dumps(self._run(descriptors)).encode())
                except OSError:
                    break
            end = time.monotonic() + self._limits["wall_s"]

    def _run(self, descriptors):
        """Run a program once: its exit status and whether it was stopped, or the error that prevented the start."""
        self._runs += 1
        folder = os.path.join(self._folder, f"program{self._runs}")
        os.mkdir(folder)
        ready, report = os.pipe()
        began = time.monotonic()
        launched = os.fork()
        if launched == 0:
            self._launch(folder, descriptors, report)
        for descriptor in (*descriptors, report):
            os.close(descriptor)
        found = b""
        while self._wait([ready], began + START_SECONDS) and (part := os.read(ready, 1000)):
            found += part
        os.close(ready)
        if found != b"ready":
            os.kill(launched, signal.SIGKILL)
            isolation.end_descendants(spared={self._judge})
            return {"error": found.decode(errors="replace") or "it ended before its limits were set"}
        if self._runs == 1:
            os.write(self._verdict, b"started\n")
        self._control.send(b'"ready"')
        end = time.monotonic() + self._limits["wall_s"]
        code = self._exit_code(launched, end, [self._control.fileno()])
        stopped = code is None and time.monotonic() >= end
        if code is None and not stopped and self._control.recv(100, socket.MSG_PEEK) == b"lost":
            code = self._exit_code(launched, time.monotonic() + LOST_SECONDS, [])
        if code is None:
            os.kill(launched, signal.SIGKILL)
        isolation.end_descendants(spared={self._judge})
        return {"code": code, "stopped": stopped}

    def _exit_code(self, launched, end, interrupting):
        """Exit status of ``launched``; None after ``end`` or where a descriptor in ``interrupting`` is readable."""
        while True:
            pid, status = os.waitpid(launched, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            readable = self._wait([*interrupting, self._woken], end)
            if not readable or set(readable) & set(interrupting):
                return None  # too long, or the judge is done or has ended
            os.read(self._woken, 1000)

    def _launch(self, folder, descriptors, report):
        """In the process that becomes the supervisor: only the numbered descriptors stay open."""
        try:
            kernel.die_with_parent(signal.SIGKILL)
            wanted = [*descriptors[:2], os.open(os.devnull, os.O_WRONLY), descriptors[2], report, *descriptors[3:]]
            copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 32) for descriptor in wanted]
            for number, copy in enumerate(copies):
                os.dup2(copy, number)
            isolation.close_from(len(copies))
            self._way.launch(self._limits, folder)
        except isolation.StartProgram:
            raise
        except BaseException as error:
            os.write(isolation.READY, f"{type(error).__name__}: {error}".encode()[:1000])
        os._exit(1)

    def _wait(self, descriptors, end):
        return select.select(descriptors, [], [], max(0.0, end - time.monotonic()))[0]


def main():
    limits = json.loads(sys.argv[1])
    if limits.pop("inside", False):
        isolation.Bubblewrap().launch_inside(limits, limits["folder"])
    kernel.adopt_descendants()
    way = isolation.WAYS[limits["isolation"]]()
    folder = way.enter(limits.get("folder"))
    limits["user_processes"] = limits["processes"] + isolation.counted_processes(way)
    kernel.set_dumpable(False)
    kernel.die_with_parent(signal.SIGTERM, limits["parent"])
    control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own = os.getpid()
    judge_pid = os.fork()
    if judge_pid == 0:
        control.close()
        kernel.die_with_parent(signal.SIGKILL, own)
        judge.main(other, limits, way.name, folder)
    other.close()
    devnull = os.open(os.devnull, os.O_RDWR)
    verdict = os.dup(1)
    for descriptor in (0, 1):
        os.dup2(devnull, descriptor)
    os.close(devnull)

    def end(*_):
        isolation.end_descendants()
        os._exit(1)

    signal.signal(signal.SIGTERM, end)
    Runner(way, folder, control, (judge_pid, verdict), limits).serve()
    end()


if __name__ == "__main__":
    try:
        main()
    except isolation.StartProgram:
        serve = bridge.start_program(isolation.SOURCE, isolation.BRIDGE)
    serve()
