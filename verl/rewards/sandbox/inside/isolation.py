"""Namespaces, mounts and limits of the sandbox, by ctypes. It runs in processes of the sandbox, never in the trainer.

A worker has namespaces of its own (process ids, mounts, network without devices, ipc, host name) and sees a root of
memory with the Python library read-only. Each program gets a further user, process-id, mount and ipc namespace.
"""

import contextlib
import ctypes
import os
import resource
import signal
import struct
from collections.abc import Sequence

import system_calls

NOBODY = 65534
THREADS, DESCRIPTORS, SCRATCH_FILES = 64, 64, 1024
STACK_BYTES = 120 << 20  # below the gap of 128 MB that the kernel leaves under the stack
_NEW_MOUNTS, _NEW_NAME, _NEW_IPC, _NEW_USER, _NEW_PIDS, _NEW_NET = (
    0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
_WORKER = _NEW_MOUNTS | _NEW_NAME | _NEW_IPC | _NEW_PIDS | _NEW_NET
_PROGRAM = _NEW_MOUNTS | _NEW_IPC | _NEW_PIDS | _NEW_USER
_READ_ONLY, _NO_SETUID, _NO_DEVICES, _NO_EXEC, _BIND, _RECURSIVE, _PRIVATE = 1, 2, 4, 8, 0x1000, 0x4000, 0x40000
_DEATH_SIGNAL, _DUMPABLE, _KEEP_CAPABILITIES, _MOUNT_SETATTR, _DETACH = 1, 4, 8, 442, 2
libc = ctypes.CDLL(None, use_errno=True)
_MOUNT_POINT = "/proc"  # exists everywhere, and no library is below it
_SCRATCH, _HIDDEN = "/tmp", "/.visible"  # the second has again what the scratch folder covers, such as a venv in /tmp
_covered: list[str] = []  # paths below the scratch folder


def call(name: str, *arguments: object) -> None:
    """Call a function of the C library that returns 0; OSError names it otherwise."""
    if getattr(libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def enter_worker(visible: Sequence[str]) -> int:
    """Leave the machine's namespaces and files; a descriptor of /proc, for `enter_program`. Returns in a new process.

    `visible` are the paths that remain, read-only. Without the rights of an administrator this needs user namespaces.
    The process that called waits for the new one.
    """
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
    root = os.geteuid() == 0 and not libc.unshare(_WORKER)
    if not root:
        if os.geteuid() == 0:
            become_nobody()
        user, group = os.geteuid(), os.getegid()
        call("unshare", _NEW_USER | _WORKER)
        _map_ids(proc, 0, user, group)
    child = os.fork()
    if child:
        _leave_to(child)
    _build_root(visible)
    if root:
        become_nobody(keep_capabilities=True)
    call("prctl", _DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    return proc


def _leave_to(child: int) -> None:
    """Keep nothing but the wait for the child, which is the init of its process ids; then end."""
    os.closerange(0, 256)
    os.waitpid(child, 0)
    os._exit(0)


def become_nobody(keep_capabilities: bool = False) -> None:
    """Another user than root, so that limits hold and no file of root can be read; the same where there is no other."""
    call("prctl", _KEEP_CAPABILITIES, int(keep_capabilities), 0, 0, 0)
    with contextlib.suppress(OSError):  # a container without that right, or that has one user only
        os.setgroups([])
    with contextlib.suppress(OSError):
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    if keep_capabilities:  # some kernels let no plain user make a user namespace that is worth something
        _set_capabilities(0xC0 | 0x200000)  # SETGID, SETUID, SYS_ADMIN
    call("prctl", _DUMPABLE, 1, 0, 0, 0)  # /proc/self is its own again


def _set_capabilities(bits: int) -> None:
    call("capset", struct.pack("II", 0x20080522, 0), struct.pack("IIIIII", bits, bits, 0, 0, 0, 0))


def _map_ids(proc: int, inside: int, user: int, group: int) -> None:
    for name, text in (
        ("setgroups", "deny"), ("uid_map", f"{inside} {user} 1"), ("gid_map", f"{inside} {group} 1"),
    ):  # fmt: skip
        _write(proc, f"self/{name}", text)


def _write(proc: int, name: str, text: str) -> None:
    number = os.open(name, os.O_WRONLY, dir_fd=proc)
    os.write(number, text.encode())
    os.close(number)


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    call(
        "mount", source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), options.encode()
    )  # fmt: skip


def _build_root(visible: Sequence[str]) -> None:
    call("sethostname", b"sandbox", 7)
    _mount("none", "/", None, _PRIVATE | _RECURSIVE)
    _mount("root", _MOUNT_POINT, "tmpfs", _NO_SETUID | _NO_DEVICES, "size=1m,mode=755")
    _covered[:] = [path for path in visible if path.startswith(f"{_SCRATCH}/")]
    for path in ["/dev/null", "/dev/zero", "/dev/urandom", *visible]:
        _show(path, _MOUNT_POINT + path)
    for path in _covered:
        _show(path, _MOUNT_POINT + _HIDDEN + path)
    os.chdir(_MOUNT_POINT)
    os.makedirs(_SCRATCH.lstrip("/"), exist_ok=True)
    attributes = struct.pack("QQQQ", _READ_ONLY | _NO_SETUID, 0, 0, 0)
    call("syscall", _MOUNT_SETATTR, -100, b".", 0x8000, attributes, len(attributes))  # with all mounts below
    call("pivot_root", b".", b".")
    call("umount2", b".", _DETACH)
    os.chdir("/")


def _show(path: str, target: str) -> None:
    os.makedirs(os.path.dirname(target), 0o755, exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, 0o755, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT, 0o644))
    _mount(path, target, None, _BIND | _RECURSIVE)


def enter_program(proc: int) -> None:
    """New namespaces for one program; returns in the init of its process ids, and the caller passes its end on."""
    user, group = os.geteuid(), os.getegid()
    call("unshare", _PROGRAM)
    _map_ids(proc, 1000, user, group)
    child = os.fork()
    if child:
        pass_on(os.waitpid(child, 0)[1])
    _write(proc, "self/oom_score_adj", "1000")


def pass_on(status: int) -> None:
    """End as a child ended."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        call("prctl", _DUMPABLE, 0, 0, 0, 0)
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 255)


def mount_scratch(size_bytes: int) -> None:
    """A folder of memory at /tmp, where the program starts, without files of its own; nothing else can be written."""
    options = f"size={size_bytes},nr_inodes={SCRATCH_FILES},mode=700"
    _mount("scratch", _SCRATCH, "tmpfs", _NO_SETUID | _NO_DEVICES | _NO_EXEC, options)
    for path in _covered:
        _show(_HIDDEN + path, path)
    os.chdir(_SCRATCH)


def limit(memory_bytes: int, processor_s: int, file_bytes: int) -> None:
    """Limits on address space, processor time, threads, descriptors and files; no capability is left, and no crash is
    handed to a core handler of the machine, which RLIMIT_CORE does not stop."""
    limits = {
        resource.RLIMIT_AS: memory_bytes, resource.RLIMIT_CPU: processor_s, resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NPROC: THREADS, resource.RLIMIT_NOFILE: DESCRIPTORS, resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0, resource.RLIMIT_MSGQUEUE: 0, resource.RLIMIT_SIGPENDING: 64,
        resource.RLIMIT_STACK: STACK_BYTES,
    }  # fmt: skip
    for name, value in limits.items():
        most = resource.getrlimit(name)[1]
        allowed = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(name, (allowed, allowed))
    _set_capabilities(0)
    call("prctl", _DUMPABLE, 0, 0, 0, 0)


def refuse_system_calls(with_files: bool) -> None:
    """Install the filter of `system_calls`; in a fallback the end of the worker ends the program, too."""
    call("prctl", _DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    system_calls.refuse_the_rest(libc, os.getpid(), with_files)
