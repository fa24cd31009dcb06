"""A worker of the sandbox: a warm Python that forks one child for each program and kills what is left of it.

    python -P -s -S worker.py DESCRIPTOR namespaces|fallback JSON

Over the socket DESCRIPTOR come messages with the descriptors of one program (request, stdin, stdout, stderr); only
the child reads them, so that a worker never holds a program, an input or an output. It answers with how the child
ended, once nothing of it is left. The message `kill` ends the child early, the end of the socket ends the worker.
This file and its neighbours import nothing of verl.
"""

import gc
import json
import os
import select
import signal
import socket
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import isolation
import program

del sys.path[0]
EMPTY = {"memory_bytes": 1 << 28, "cpu_s": 1, "scratch_bytes": 1 << 20}  # request of the first program


def main() -> None:
    mode, view, number = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    control = socket.socket(fileno=number)
    sys.argv = ["main.py"]
    program.preload(view["packages"])
    os.environ.clear()  # libraries have read how many threads they may start: none, or user namespaces are refused
    try:
        worker = Worker(control, mode, view["paths"])
        reply = worker.run_and_wait(None)  # an empty program: it shows that the kernel allows everything
    except Exception as error:
        reply = {"error": f"{type(error).__name__}: {error}"}
    control.send(json.dumps({"mode": mode, **reply}).encode())
    if "error" not in reply:
        gc.collect()
        gc.freeze()
        worker.serve()


class Worker:
    """Serves one socket until it ends."""

    def __init__(self, control: socket.socket, mode: str, visible: list[str]):
        self._control, self._has_namespaces = control, mode == "namespaces"
        self._size_bytes = program.address_space_bytes()
        self._proc = -1
        if self._has_namespaces:
            self._proc = isolation.enter_worker(visible)
        elif os.geteuid() == 0:
            isolation.become_nobody()

    def serve(self) -> None:
        while True:
            message, descriptors, _, _ = socket.recv_fds(self._control, 64, 4)
            if not message:
                return
            if message == b"run":
                reply = self.run_and_wait(descriptors)
                self._control.send(json.dumps(reply).encode())

    def run_and_wait(self, descriptors: list[int] | None) -> dict[str, object]:
        """{code, cpu_s} of the child, or the error that kept the program from starting."""
        report, told = os.pipe()
        child = os.fork()
        if not child:
            self._be_child(descriptors, report, told)
        os.close(told)
        for descriptor in descriptors or []:
            os.close(descriptor)
        self._wait_or_kill(child)
        _, status, usage = os.wait4(child, 0)
        self._sweep()
        error = os.read(report, 4096)
        os.close(report)
        if error:
            return {"error": error.decode(errors="replace")}
        return {"code": os.waitstatus_to_exitcode(status), "cpu_s": usage.ru_utime + usage.ru_stime}

    def _wait_or_kill(self, child: int) -> None:
        """Return when the child has ended by itself, or was killed because the other side said so or is gone."""
        process = os.pidfd_open(child)
        poll = select.poll()
        poll.register(process, select.POLLIN)
        poll.register(self._control, select.POLLIN)
        ready = [number for number, _ in poll.poll()]
        os.close(process)
        if process not in ready:
            os.kill(-1 if self._has_namespaces else child, signal.SIGKILL)
            if not self._control.recv(64):
                os._exit(0)

    def _sweep(self) -> None:
        """Nothing that the child started is left: this worker is the init of its process ids and can kill all of them.

        In a fallback a program is one process, which has ended.
        """
        while self._has_namespaces:
            try:
                os.kill(-1, signal.SIGKILL)
                os.waitpid(-1, 0)
            except (ProcessLookupError, ChildProcessError):
                return

    def _be_child(self, descriptors: list[int] | None, report: int, told: int) -> None:
        """Run the program of the request and end; before that, whatever fails goes to the worker."""
        try:
            os.close(report)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self._has_namespaces:
                isolation.enter_program(self._proc)
            request = program.read_request(descriptors[0]) if descriptors else EMPTY
            if self._has_namespaces:
                isolation.mount_scratch(request["scratch_bytes"])
            for target, descriptor in enumerate(descriptors[1:] if descriptors else []):
                os.dup2(descriptor, target)
            os.dup2(told, 3)
            os.closerange(4, 256)
            isolation.limit(self._size_bytes + request["memory_bytes"], request["cpu_s"], request["scratch_bytes"])
            isolation.refuse_system_calls(with_files=self._has_namespaces)
        except BaseException as error:
            os.write(told, f"{type(error).__name__}: {error}".encode())
            os._exit(1)
        os.close(3)
        if not descriptors:
            os._exit(0)
        program.run(request)


if __name__ == "__main__":
    main()
