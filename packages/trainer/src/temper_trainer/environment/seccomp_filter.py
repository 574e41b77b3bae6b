"""A seccomp filter for the programs of the policy: an allowlist of what a Python interpreter calls.

Namespaces hide files, processes and the network. The filter also closes what they leave open: new
processes and namespaces, memory outside RLIMIT_AS (SysV shared memory, memfd), io_uring, keyrings,
ptrace. A system call that a later kernel adds is refused without a change here.
"""

import ctypes
import errno
import os
import tempfile
from collections.abc import Iterator
from functools import cache

from temper_trainer.environment.protocol import BrokenEnvironmentError

LIBRARY = "libseccomp.so.2"
"""Translates names of system calls into a filter for this host's architecture."""

ALLOWED_CALLS = {
    # Ownership, device nodes and extended attributes cannot be set. No flock: the interpreter's
    # files are the host's, so a lock on one would be seen by other programs and by the host.
    # Copying a file with its times needs utimensat, with which everyone may also set those of
    # /dev/null to the current time: see SECURITY.md.
    "files and folders": (
        "open openat creat close close_range read write readv writev pread64 pwrite64 preadv "
        "pwritev preadv2 pwritev2 lseek stat fstat lstat newfstatat statx statfs fstatfs access "
        "faccessat faccessat2 readlink readlinkat getdents getdents64 getcwd chdir fchdir mkdir "
        "mkdirat rmdir unlink unlinkat rename renameat renameat2 link linkat symlink symlinkat "
        "chmod fchmod fchmodat truncate ftruncate fallocate fadvise64 fsync fdatasync utime utimes "
        "utimensat futimesat umask sendfile copy_file_range getxattr lgetxattr fgetxattr listxattr "
        "llistxattr flistxattr"
    ),
    "file descriptors": (
        "dup dup2 dup3 pipe pipe2 poll ppoll select pselect6 eventfd eventfd2 epoll_create "
        "epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 timerfd_create "
        "timerfd_settime timerfd_gettime"
    ),
    # asyncio wakes itself with a connected pair. There is no socket(), so nothing else can be
    # sent to.
    "connected pairs": (
        "sendto recvfrom sendmsg recvmsg shutdown getsockopt getsockname getpeername"
    ),
    "memory": "mmap munmap mremap mprotect madvise brk msync",
    # bubblewrap needs execve and wait4 below the filter. There is nothing else to execute than the
    # interpreter, which keeps the filter and its limits.
    "the process and its threads": (
        "execve wait4 waitid exit exit_group getpid getppid gettid getuid geteuid getgid getegid "
        "getgroups getresuid getresgid getpgid getpgrp getsid getpriority getrusage getrlimit "
        "set_tid_address set_robust_list get_robust_list rseq futex arch_prctl sched_yield "
        "sched_getaffinity sched_getscheduler sched_getparam sched_get_priority_max "
        "sched_get_priority_min restart_syscall"
    ),
    "signals": (
        "rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait "
        "sigaltstack kill tkill tgkill alarm setitimer getitimer pause"
    ),
    "time and the machine": (
        "clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time times uname "
        "sysinfo getrandom getcpu"
    ),
}
"""System calls that are allowed with any arguments, by purpose.

`build_seccomp_filter` adds others that are allowed with certain arguments only.
"""

_FORBIDDEN_CALLS = (
    *("fork", "vfork", "socket", "ptrace", "unshare"),
    *("setns", "mount", "umount2", "chroot"),
)
"""System calls that fail with EPERM and not ENOSYS."""

_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_EQUAL, _MASKED_EQUAL = 4, 7  # enum scmp_compare

_CLONE_THREAD = 0x00010000
_NEW_NAMESPACES = 0x7E020080  # every CLONE_NEW* flag
_TERMINAL_QUERIES = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""ioctl: TCGETS (isatty), TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX. No TIOCSTI."""
_DESCRIPTOR_COMMANDS = (*range(5), 1030, 1031, 1032)
"""fcntl: duplicates, flags, and sizes of pipes. No F_NOTIFY and no leases: they show when other
processes use the interpreter's files, which are the host's."""
_RECORD_LOCKS = (5, 6, 7, 36, 37, 38)
"""fcntl: F_GETLK, F_SETLK, F_SETLKW and the same of open files (F_OFD_*). Each lock takes memory of
the kernel that no limit of a process counts, and one on the interpreter's files shows outside. They
fail with EPERM, which SQLite reports as "access permission denied"; ENOSYS would be its "disk I/O
error"."""
_PR_SET_NAME, _PR_GET_NAME = 15, 16
_RLIMIT_CORE, _NUM_RLIMITS = 4, 16
_AF_UNIX = 1


class _Comparison(ctypes.Structure):
    """`struct scmp_arg_cmp`."""

    _fields_ = (
        ("arg", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("datum_a", ctypes.c_uint64),
        ("datum_b", ctypes.c_uint64),
    )


@cache
def build_seccomp_filter() -> bytes:
    """Return the filter as the BPF program that `bwrap --seccomp` reads.

    Most refused system calls fail with ENOSYS, so that the C library falls back to older system
    calls. A few fail with EPERM, so that the program reports "Operation not permitted".

    Raises:
        BrokenEnvironmentError: If libseccomp is not installed or refuses a rule.
    """
    library = _load_library()
    context = library.seccomp_init(_ERRNO | errno.ENOSYS)
    if not context:
        raise BrokenEnvironmentError(f"{LIBRARY} cannot make a filter for this host")
    try:
        for action, name, comparisons in _list_rules():
            number = library.seccomp_syscall_resolve_name(name.encode())
            if number == -1:  # unknown to this version of the library: stays refused
                continue
            array = (_Comparison * len(comparisons))(*(_Comparison(*each) for each in comparisons))
            code = library.seccomp_rule_add_array(context, action, number, len(comparisons), array)
            if code != 0:
                raise BrokenEnvironmentError(
                    f"{LIBRARY} refuses a rule for {name}: {os.strerror(-code)}"
                )
        with tempfile.TemporaryFile() as file:
            if (code := library.seccomp_export_bpf(context, file.fileno())) != 0:
                raise BrokenEnvironmentError(
                    f"{LIBRARY} cannot export the filter: {os.strerror(-code)}"
                )
            file.seek(0)
            return file.read()
    finally:
        library.seccomp_release(context)


def _load_library() -> ctypes.CDLL:
    """Load libseccomp and declare the signatures of its functions."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise BrokenEnvironmentError(f"{LIBRARY} cannot be loaded: {error}") from error
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_init.argtypes = (ctypes.c_uint32,)
    library.seccomp_release.argtypes = (ctypes.c_void_p,)
    library.seccomp_export_bpf.argtypes = (ctypes.c_void_p, ctypes.c_int)
    library.seccomp_rule_add_array.argtypes = (
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_int,
        ctypes.c_uint,
        ctypes.POINTER(_Comparison),
    )
    return library


def _list_rules() -> Iterator[tuple[int, str, tuple[tuple[int, int, int, int], ...]]]:
    """Yield the action, the name of the system call, and the comparisons that must all hold."""
    for names in ALLOWED_CALLS.values():
        for name in names.split():
            yield _ALLOW, name, ()
    # Threads, but neither processes nor namespaces.
    thread_flags = (0, _MASKED_EQUAL, _CLONE_THREAD | _NEW_NAMESPACES, _CLONE_THREAD)
    yield _ALLOW, "clone", (thread_flags,)
    yield _ERRNO | errno.EPERM, "clone", ((0, _MASKED_EQUAL, _CLONE_THREAD, 0),)
    for name in _FORBIDDEN_CALLS:
        yield _ERRNO | errno.EPERM, name, ()
    yield _ALLOW, "socketpair", ((0, _EQUAL, _AF_UNIX, 0),)
    for request in _TERMINAL_QUERIES:
        # The kernel reads 32 bits of the request; the caller may leave anything in the upper ones.
        yield _ALLOW, "ioctl", ((1, _MASKED_EQUAL, 0xFFFFFFFF, request),)
    for command in _DESCRIPTOR_COMMANDS:
        yield _ALLOW, "fcntl", ((1, _MASKED_EQUAL, 0xFFFFFFFF, command),)
    for command in _RECORD_LOCKS:
        refused = (1, _MASKED_EQUAL, 0xFFFFFFFF, command)
        yield _ERRNO | errno.EPERM, "fcntl", (refused,)
    for option in (_PR_SET_NAME, _PR_GET_NAME):
        yield _ALLOW, "prctl", ((0, _EQUAL, option, 0),)
    # A program may lower its own limits (process 0), but not those of bubblewrap, whose death
    # would look like a failure of the host and stop the run. For the one on core dumps see
    # Bubblewrap.
    for limit in set(range(_NUM_RLIMITS)) - {_RLIMIT_CORE}:
        own_limit = (1, _MASKED_EQUAL, 0xFFFFFFFF, limit)
        yield _ALLOW, "prlimit64", ((0, _EQUAL, 0, 0), own_limit)
    yield _ALLOW, "prlimit64", ((0, _EQUAL, 0, 0), (2, _EQUAL, 0, 0))
