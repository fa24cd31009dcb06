"""The system calls a program may make, as a seccomp filter; every other one fails (EPERM, or ENOSYS for new ones).

The list is of what may be called, so that what a kernel adds is refused. Forks, execs, sockets, signals to others and
everything that only administrators need are not on it: a program is one process.
"""

import ctypes
import errno
import functools
import os
import platform
import struct

NEW_CALLS = 424  # from here on the numbers are the same everywhere, and the C library can do without any of them
# name, number on x86_64, number on aarch64 (- has none). Files are apart, since the fallback refuses them.
PLAIN = """
read 0 63, write 1 64, close 3 57, fstat 5 80, lseek 8 62, mmap 9 222, mprotect 10 226, munmap 11 215, brk 12 214,
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, pread64 17 67, pwrite64 18 68, readv 19 65,
writev 20 66, pipe 22 -, select 23 -, sched_yield 24 124, mremap 25 216, msync 26 227, mincore 27 232, madvise 28 233,
dup 32 23, dup2 33 -, pause 34 -, nanosleep 35 101, getitimer 36 102, alarm 37 -, setitimer 38 103, getpid 39 172,
shutdown 48 210, sendto 44 206, recvfrom 45 207, sendmsg 46 211, recvmsg 47 212, setsockopt 54 208,
getsockopt 55 209, getsockname 51 204, getpeername 52 205, exit 60 93, wait4 61 260, uname 63 160, fsync 74 82,
fdatasync 75 83, umask 95 166, gettimeofday 96 169, getrlimit 97 163, getrusage 98 165, sysinfo 99 179, times 100 153,
getuid 102 174, getgid 104 176, geteuid 107 175, getegid 108 177, getppid 110 173, getpgrp 111 -, getgroups 115 158,
rt_sigpending 127 136, rt_sigtimedwait 128 137, rt_sigsuspend 130 133, sigaltstack 131 132, getpriority 140 141,
arch_prctl 158 -, gettid 186 178, time 201 -, futex 202 98, sched_getaffinity 204 123, set_tid_address 218 96,
restart_syscall 219 128, timer_create 222 107, timer_settime 223 110, timer_gettime 224 108, timer_getoverrun 225 109,
timer_delete 226 111, clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, exit_group 231 94,
epoll_wait 232 -, epoll_ctl 233 21, waitid 247 95, pselect6 270 72, poll 7 -, ppoll 271 73, set_robust_list 273 99,
get_robust_list 274 100, epoll_pwait 281 22, timerfd_create 283 85, timerfd_settime 286 86, timerfd_gettime 287 87,
eventfd2 290 19, epoll_create1 291 20, dup3 292 24, pipe2 293 59, preadv 295 69, pwritev 296 70, getcpu 309 168,
getrandom 318 278, membarrier 324 283, rseq 334 293, sched_getparam 143 121, sched_getscheduler 145 120,
sched_get_priority_max 146 125, sched_get_priority_min 147 126, close_range 436 436, stat 4 -, lstat 6 -,
newfstatat 262 79, statx 332 291
"""
FILES = """
open 2 -, access 21 -, flock 73 32, truncate 76 45, ftruncate 77 46, getdents 78 -, getcwd 79 17,
chdir 80 49, fchdir 81 50, rename 82 -, mkdir 83 -, rmdir 84 -, creat 85 -, link 86 -, unlink 87 -, symlink 88 -,
readlink 89 -, chmod 90 -, fchmod 91 52, utimes 235 -, statfs 137 43, fstatfs 138 44, getdents64 217 61,
fadvise64 221 223, openat 257 56, mkdirat 258 34, unlinkat 263 35, renameat 264 38, linkat 265 37,
symlinkat 266 36, readlinkat 267 78, fchmodat 268 53, faccessat 269 48, utimensat 280 88, fallocate 285 47,
renameat2 316 276, copy_file_range 326 285, sendfile 40 71
"""
# Allowed for these values of an argument, or of two, only: threads of the C library, signals to the program itself, its
# own limits, no order to the kernel to signal somebody else when a descriptor is ready, and pairs of stream sockets:
# one of a pair of datagram sockets could send to every other of the machine.
THREADS = (0x3D0F00, 0x7D0F00)  # clone flags of glibc and of musl
OWN_PID = -1
CHECKED: dict[str, list[tuple[int, tuple[int, ...]]]] = {
    "clone 56 220": [(0, THREADS)],
    "kill 62 129": [(0, (OWN_PID,))],
    "tgkill 234 131": [(0, (OWN_PID,))],
    "prlimit64 302 261": [(0, (0, OWN_PID))],
    "fcntl 72 25": [(1, (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032))],
    "ioctl 16 29": [(1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451))],
    "socketpair 53 199": [(0, (1,)), (1, (1, 0x801, 0x80001, 0x80801))],
}
_MACHINES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}  # column above, AUDIT_ARCH
_KILL, _ALLOW, _ERROR = 0x80000000, 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06


@functools.lru_cache(maxsize=2)
def program(own_pid: int, with_files: bool) -> bytes:
    """The filter as instructions of classic BPF; OSError on a machine whose system calls are not listed."""
    if platform.machine() not in _MACHINES:
        raise OSError(f"no list of system calls for {platform.machine()!r}; there is one for {', '.join(_MACHINES)}")
    column, architecture = _MACHINES[platform.machine()]
    rows = [row.split() for row in (PLAIN + "," + FILES * with_files).split(",") if row.split()]
    plain = [row[column] for row in rows if row[column] != "-"]
    code = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    for number in plain:
        code += [(_EQUAL, 0, 1, int(number)), (_RETURN, 0, 0, _ALLOW)]
    for name, conditions in CHECKED.items():
        body = []
        for argument, values in conditions:
            body += [(_LOAD, 0, 0, 16 + 8 * argument)]  # its low half: the kernel takes an int
            for index, value in enumerate(values):  # where it is equal over the rest and the refusal
                body += [(_EQUAL, len(values) - index, 0, own_pid if value == OWN_PID else value)]
            body += [(_RETURN, 0, 0, _ERROR | errno.EPERM)]
        body += [(_RETURN, 0, 0, _ALLOW)]
        code += [(_EQUAL, 0, len(body), int(name.split()[column])), *body]
    code += [(_AT_LEAST, 0, 1, NEW_CALLS), (_RETURN, 0, 0, _ERROR | errno.ENOSYS)]
    code += [(_RETURN, 0, 0, _ERROR | errno.EPERM)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def refuse_the_rest(libc: ctypes.CDLL, own_pid: int, with_files: bool) -> None:
    """From now on this thread, and those it starts, may make the listed calls only; it can never be undone."""
    instructions = program(own_pid, with_files)
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    header = struct.pack("HxxxxxxP", len(instructions) // 8, ctypes.addressof(buffer))
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, header, 0, 0):  # NO_NEW_PRIVS; SECCOMP, MODE_FILTER
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp filter: {os.strerror(number)}")
