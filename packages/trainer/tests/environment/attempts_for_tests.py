"""Programs that try to leave the sandbox of the Python tool. Each prints ESCAPED if it got out.

A program is run after PRELUDE, in which HOST describes this machine: see Host in test_escapes.py.
"""

from dataclasses import dataclass
from typing import Literal

PRELUDE = """
import ctypes, os, platform, sys
HOST = {host!r}
LIBRARY = os.path.dirname(os.__file__)
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.shmat.restype = ctypes.c_void_p
NUMBERS = {{
    "x86_64": dict(
        pivot_root=155, init_module=175, add_key=248, keyctl=250, perf_event_open=298,
        open_by_handle_at=304, bpf=321, userfaultfd=323, clone=56,
    ),
    "aarch64": dict(
        pivot_root=41, init_module=105, add_key=217, keyctl=219, perf_event_open=241,
        open_by_handle_at=265, bpf=280, userfaultfd=282, clone=220,
    ),
}}.get(platform.machine(), {{}})

def checked(result):
    if result in (-1, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

def call(number, *arguments):
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return checked(libc.syscall(ctypes.c_long(NUMBERS.get(number, number)), *words))

def escaped(*what):
    print("ESCAPED", *what)

"""

Unconfined = Literal["escapes", "as root", "kernel", "not run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One program, and what it must come to."""

    name: str
    code: str
    unconfined: Unconfined = "escapes"
    """Its result without a sandbox, to show that the program does what its name says.

    It escapes as any user, as root with all capabilities, or if the kernel is set up to allow it.
    Programs that would harm the host are not run."""
    says: str = ""
    """Part of the output in the sandbox."""
    timeout_s: float = 60.0
    machine: str = ""
    """Architecture that it is written for; empty for all."""


def read(path: str) -> str:
    return f"escaped(open({path}).read(100))"


# Each page needs two page tables of its own, because it is 1 GiB away from the one before.
PAGE_TABLES = """
RW, PRIVATE_ANONYMOUS_FIXED_NOREPLACE = 3, 0x100022
for i in range(58000):
  page = libc.mmap(ctypes.c_void_p((1 << 44) + (i << 30)), 4096, RW, PRIVATE_ANONYMOUS_FIXED_NOREPLACE, -1, 0)
  ctypes.c_char.from_address(checked(page)).value = b'x'
escaped(58000 * 8 >> 10, 'MiB of page tables')
"""
ATTEMPTS = (
    # What an audit of an earlier sandbox tried, with audit hooks and limits.
    Attempt(
        name="leave a file behind",
        code="""
open('left', 'w').write('x')
escaped() if os.path.exists(HOST['folder']) else print('own folder only')
""",
    ),
    Attempt(
        name="read /etc/passwd",
        code="escaped(open('/etc/passwd').read(100))",
    ),
    Attempt(
        name="read a file of the trainer",
        code="escaped(open(HOST['secret_file']).read(100))",
    ),
    Attempt(
        name="connect to a server on the host",
        code="import socket; socket.create_connection(('127.0.0.1', HOST['port']), 2); escaped()",
    ),
    Attempt(
        name="start a process with fork",
        code="""
pid = os.fork()
if pid == 0: os._exit(0)
os.waitpid(pid, 0); escaped()
""",
    ),
    Attempt(
        name="signal the trainer",
        code="os.kill(HOST['pid'], 0); escaped()",
    ),
    Attempt(
        name="read through ctypes",
        code="""
fd = checked(libc.open(HOST['secret_file'].encode(), 0))
b = ctypes.create_string_buffer(100)
checked(libc.read(fd, b, 99)); escaped(b.value)
""",
    ),
    Attempt(
        name="read through a symbolic link",
        code="os.symlink(HOST['secret_file'], 'link'); escaped(open('link').read())",
    ),
    Attempt(
        name="take 8 GiB of memory",
        code="x = bytearray(8 << 30)",
        unconfined="not run",
        says="MemoryError",
    ),
    Attempt(
        name="print without end",
        code="while True: print('x' * 1000)",
        unconfined="not run",
        says="of output",
    ),
    Attempt(
        name="loop without end",
        code="while True: pass",
        unconfined="not run",
        says="no result within 0.5 s",
        timeout_s=0.5,
    ),
    Attempt(
        name="read next to the library by ..",
        code="escaped(open(LIBRARY + '/../../../../../../../etc/passwd').read(100))",
    ),
    Attempt(
        name="read by a str that lies about itself",
        code="""
class S(str):
  __str__ = lambda s: LIBRARY
escaped(open(S(HOST['secret_file'])).read())
""",
    ),
    Attempt(
        name="read the trainer's environment",
        code="""
class S(str):
  __str__ = lambda s: LIBRARY
escaped(open(S(f"/proc/{HOST['pid']}/environ")).read())
""",
    ),
    Attempt(
        name="read the parent's environment",
        code="""
class S(str):
  __str__ = lambda s: LIBRARY
escaped(open(S(f'/proc/{os.getppid()}/environ')).read())
""",
    ),
    Attempt(
        name="overwrite a checkpoint's manifest",
        code="""
fd = os.open(LIBRARY + '/../../../../../../..' + HOST['manifest'], os.O_WRONLY | os.O_CREAT)
os.write(fd, b'{}'); escaped()
""",
    ),
    Attempt(
        name="create a file in the run's folder",
        code="""
path = LIBRARY + '/../../../../../../..' + HOST['folder'] + '/new'
os.close(os.open(path, os.O_WRONLY | os.O_CREAT)); escaped()
""",
    ),
    Attempt(
        name="open the trainer's memory for writing",
        code="""
os.open(LIBRARY + f"/../../../../../../../proc/{HOST['pid']}/mem", os.O_RDWR); escaped()
""",
        unconfined="as root",
    ),
    Attempt(
        name="switch the guard off in __main__",
        code="""
import __main__; __main__.BLOCKED = ('zz',); __main__.LIBRARY = ('',)
escaped(open('/etc/passwd').read(100))
""",
    ),
    Attempt(
        name="run a shell",
        code="""
import __main__; __main__.BLOCKED = ('zz',); __main__.LIBRARY = ('',)
import subprocess
escaped(subprocess.run(['/bin/sh', '-c', 'id'], capture_output=True).stdout)
""",
    ),
    Attempt(
        name="listen on every address",
        code="""
import __main__; __main__.BLOCKED = ('zz',); __main__.LIBRARY = ('',)
import socket
s = socket.socket(); s.bind(('0.0.0.0', 0)); s.listen(); escaped()
""",
    ),
    Attempt(
        name="run a shell by _posixsubprocess",
        code="""
import subprocess; r, w = os.pipe()
arguments = [b'/bin/sh', b'-c', b'exit 7'], [b'/bin/sh'], True, (), None, None, *[-1] * 6, r, w
p = subprocess._fork_exec(*arguments, False, False, -1, None, None, None, -1, None, False)
escaped() if os.waitpid(p, 0)[1] >> 8 == 7 else print('no shell')
""",
    ),
    Attempt(
        name="outlive the tool in a session of its own",
        code="""
import __main__; __main__.BLOCKED = ('zz',); __main__.LIBRARY = ('',)
import subprocess
subprocess.Popen(['sleep', HOST['nap']], start_new_session=True); escaped()
""",
        unconfined="not run",
    ),
    Attempt(
        name="fork bomb",
        code="while True: os.fork()",
        unconfined="not run",
        says="Operation not permitted",
    ),
    Attempt(
        name="run a shell by os.system",
        code="escaped() if os.system('exit 7') >> 8 == 7 else print('no shell')",
    ),
    # Files of the host
    Attempt(
        name="climb from / by a directory descriptor",
        code="""
fd = os.open('/', os.O_PATH)
escaped(os.open('../../..' + HOST['secret_file'], 0, dir_fd=fd))
""",
    ),
    Attempt(
        name="list /",
        code="""
names = set(os.listdir('/')) - {'tmp', 'dev', 'lib', 'lib64', 'usr', 'root', 'home', 'opt'}
if names: escaped(names)
""",
    ),
    Attempt(
        name="list the root user's folder",
        code="""
names = os.listdir('/root')
if set(names) - {'.pyenv', '.local'}: escaped(names)
""",
        unconfined="as root",
    ),
    Attempt(
        name="read /proc/self/root",
        code="escaped(open('/proc/self/root/etc/passwd').read(100))",
    ),
    Attempt(
        name="read every environment in /proc",
        code="""
import glob
for f in glob.glob('/proc/[0-9]*/environ'):
  try: escaped(open(f).read())
  except OSError: pass
""",
    ),
    Attempt(
        name="read the command line of process 1",
        code="escaped(open('/proc/1/cmdline').read(100))",
    ),
    Attempt(
        name="import a third-party package",
        code="sys.path.append(LIBRARY + '/site-packages'); import pip; escaped()",
        unconfined="not run",
    ),
    Attempt(
        name="import from the trainer's environment",
        code="sys.path.append(HOST['packages']); import pytest; escaped()",
        says="ModuleNotFoundError",
    ),
    Attempt(
        name="write sitecustomize.py next to the library",
        code="open(LIBRARY + '/sitecustomize.py', 'x'); escaped()",
        unconfined="not run",
        says="Read-only file system",
    ),
    Attempt(
        name="write a .pth file",
        code="open(LIBRARY + '/site-packages/x.pth', 'w'); escaped()",
        unconfined="not run",
        says="OSError",
    ),
    Attempt(
        name="change a module of the library",
        code="os.chmod(os.__file__, 0o777); open(os.__file__, 'a'); escaped()",
        unconfined="not run",
        says="Read-only file system",
    ),
    Attempt(
        name="hard link a module and write to it",
        code="os.link(os.__file__, 'os.py'); open('os.py', 'a'); escaped()",
        unconfined="not run",
        says="OSError",
    ),
    Attempt(
        name="write to /",
        code="open('/x', 'w'); escaped()",
        unconfined="not run",
        says="Read-only file system",
    ),
    Attempt(
        name="write to /dev",
        code="open('/dev/x', 'w'); escaped()",
        unconfined="not run",
        says="Read-only file system",
    ),
    Attempt(
        name="watch who reads the interpreter's files",
        code="""
import fcntl, signal
signal.signal(signal.SIGIO, signal.SIG_IGN)
fcntl.fcntl(os.open(LIBRARY, os.O_RDONLY), fcntl.F_NOTIFY, fcntl.DN_ACCESS | fcntl.DN_MULTISHOT)
escaped()
""",
        says="Function not implemented",
    ),
    Attempt(
        name="write to shared memory of the host",
        code="open('/dev/shm/' + HOST['nap'], 'w'); os.unlink('/dev/shm/' + HOST['nap']); escaped()",
    ),
    Attempt(
        name="open a file by handle",
        code="""
call('open_by_handle_at', -100, ctypes.create_string_buffer(b'\\x08\\0\\0\\0\\x01\\0\\0\\0' + b'\\x02' + bytes(15)), 0)
escaped()
""",
        unconfined="not run",
    ),
    # Mounts and namespaces
    Attempt(
        name="unshare the user namespace",
        code="checked(libc.unshare(0x10000000)); escaped()",
        unconfined="kernel",
    ),
    Attempt(
        name="unshare the network namespace",
        code="checked(libc.unshare(0x40000000)); escaped()",
        unconfined="as root",
    ),
    Attempt(
        name="clone into a user namespace",
        code="""
pid = call('clone', 0x10000011, 0, 0, 0, 0)
if pid == 0: os._exit(0)
escaped()
""",
        unconfined="kernel",
    ),
    Attempt(
        name="clone a thread into a namespace",
        code="call('clone', 0x50010900, 0, 0, 0, 0); escaped()",
        unconfined="not run",
        says="OSError",
    ),
    Attempt(
        name="clone3 into a user namespace",
        code="""
a = (ctypes.c_ulong * 11)(0x10000000, 0, 0, 0, 17)
pid = call(435, a, 88)
if pid == 0: os._exit(0)
escaped()
""",
        unconfined="kernel",
    ),
    Attempt(
        name="enter a namespace of process 1",
        code="checked(libc.setns(os.open('/proc/1/ns/mnt', 0), 0)); escaped()",
        unconfined="not run",
    ),
    Attempt(
        name="enter a namespace by a pidfd",
        code="checked(libc.setns(call(434, os.getppid(), 0), 0x40000000)); escaped()",
        unconfined="as root",
    ),
    Attempt(
        name="mount /proc",
        code="""
os.mkdir('p')
checked(libc.mount(b'proc', b'p', b'proc', 0, None))
libc.umount2(b'p', 2)
escaped()
""",
        unconfined="as root",
    ),
    Attempt(
        name="mount tmpfs over the folder",
        code="checked(libc.mount(b'x', b'/tmp', b'tmpfs', 0, None)); escaped()",
        unconfined="not run",
        says="Operation not permitted",
    ),
    Attempt(
        name="remount / for writing",
        code="checked(libc.mount(None, b'/', None, 0x1020, None)); open('/x', 'w'); escaped()",
        unconfined="not run",
        says="Operation not permitted",
    ),
    Attempt(
        name="unmount what hides site-packages",
        code="checked(libc.umount2((LIBRARY + '/site-packages').encode(), 2)); escaped()",
        unconfined="not run",
        says="Operation not permitted",
    ),
    Attempt(
        name="open_tree of /",
        code="call(428, -100, b'/', 0x8001); escaped()",
        unconfined="as root",
    ),
    Attempt(
        name="fsopen proc",
        code="call(430, b'proc', 0); escaped()",
        unconfined="as root",
    ),
    Attempt(
        name="chroot and climb",
        code="""
os.mkdir('c')
os.chroot('c')
[os.chdir('..') for _ in range(50)]
os.chroot('.')
escaped()
""",
        unconfined="as root",
    ),
    Attempt(
        name="pivot_root",
        code="os.mkdir('n'); call('pivot_root', b'n', b'n'); escaped()",
        unconfined="not run",
        says="OSError",
    ),
    # Other processes
    Attempt(
        name="ptrace the trainer",
        code="checked(libc.ptrace(16, HOST['pid'], 0, 0)); escaped()",
        unconfined="not run",
        says="Operation not permitted",
    ),
    Attempt(
        name="read the trainer's memory by process_vm_readv",
        code="""
b = ctypes.create_string_buffer(8); v = (ctypes.c_ulong * 2)(ctypes.addressof(b), 8)
r = (ctypes.c_ulong * 2)(0, 0)
checked(libc.process_vm_readv(HOST['pid'], v, 1, r, 0, 0))
escaped()
""",
        unconfined="as root",
    ),
    Attempt(
        name="take a descriptor of the trainer",
        code="call(438, call(434, HOST['pid'], 0), 1, 0); escaped()",
        unconfined="as root",
    ),
    Attempt(
        name="kill every process",
        code="""
for pid in os.getppid(), 1, -1:
  try: os.kill(pid, 9)
  except ProcessLookupError: pass
print('signals sent')
""",
        unconfined="not run",
        says="signals sent",
    ),
    Attempt(
        name="kill the process group",
        code="os.killpg(0, 9)",
        unconfined="not run",
        says="status 137",
    ),
    Attempt(
        name="daemon by two forks",
        code="""
if os.fork() == 0:
  os.setsid()
  if os.fork() == 0: open(HOST['folder'] + '/daemon', 'w')
  os._exit(0)
escaped()
""",
    ),
    Attempt(
        name="setsid",
        code="os.setsid(); escaped()",
        unconfined="not run",
        says="OSError",
    ),
    Attempt(
        name="raise the priority",
        code="os.nice(-5); escaped()",
        unconfined="as root",
    ),
    Attempt(
        name="become root",
        code="os.setuid(0); escaped()",
        unconfined="as root",
    ),
    Attempt(
        name="be root",
        code="if os.getuid() == 0: escaped()",
        unconfined="as root",
    ),
    Attempt(
        name="execute a program from memory",
        code="""
fd = os.memfd_create('x', 0)
os.write(fd, b'#!/bin/sh\\necho ESCAPED\\n')
os.execve(f'/proc/self/fd/{fd}', ['x'], {})
""",
    ),
    Attempt(
        name="execute a shell in place",
        code="os.execv('/bin/sh', ['sh', '-c', 'echo ESCAPED'])",
    ),
    Attempt(
        name="use the 32-bit system calls",
        code="""
a = checked(libc.mmap(None, 4096, 7, 0x22, -1, 0))
ctypes.memmove(a, b'\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3', 8)
escaped(ctypes.CFUNCTYPE(ctypes.c_int)(a)())
""",
        machine="x86_64",
    ),
    # Network
    Attempt(
        name="abstract socket of the host",
        code="""
import socket
s = socket.socket(socket.AF_UNIX)
s.connect('\\0' + HOST['abstract'])
escaped()
""",
    ),
    Attempt(
        name="socket file of the host",
        code="import socket; s = socket.socket(socket.AF_UNIX); s.connect(HOST['socket']); escaped()",
    ),
    Attempt(
        name="send a datagram",
        code="""
import socket
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))
escaped()
""",
    ),
    Attempt(
        name="raw socket",
        code="import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); escaped()",
        unconfined="as root",
    ),
    Attempt(
        name="packet socket",
        code="import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW); escaped()",
        unconfined="as root",
    ),
    Attempt(
        name="netlink socket",
        code="import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW); escaped()",
    ),
    Attempt(
        name="vsock",
        code="import socket; socket.socket(40, socket.SOCK_STREAM); escaped()",
        unconfined="not run",
        says="PermissionError",
    ),
    Attempt(
        name="socketpair of the internet",
        code="import socket; socket.socketpair(socket.AF_INET6, socket.SOCK_STREAM); escaped()",
        unconfined="not run",
        says="OSError",
    ),
    # Kernel
    Attempt(
        name="add a key",
        code="call('add_key', b'user', b'temper', b'x', 1, -2); escaped()",
        unconfined="not run",
    ),
    Attempt(
        name="read a keyring",
        code="call('keyctl', 0, -4, 0); escaped()",
        unconfined="kernel",
    ),
    Attempt(
        name="io_uring",
        code="call(425, 2, ctypes.create_string_buffer(120)); escaped()",
        unconfined="kernel",
    ),
    Attempt(
        name="bpf",
        code="call('bpf', 0, (ctypes.c_uint * 20)(2, 4, 4, 1), 80); escaped()",
        unconfined="kernel",
    ),
    Attempt(
        name="perf_event_open",
        code="""
a = ctypes.create_string_buffer(120)
a[4] = 120
call('perf_event_open', a, 0, -1, -1, 0)
escaped()
""",
        unconfined="not run",
        says="OSError",
    ),
    Attempt(
        name="userfaultfd",
        code="call('userfaultfd', 1); escaped()",
        unconfined="kernel",
    ),
    Attempt(
        name="load a kernel module",
        code="call('init_module', b'x', 1, b''); escaped()",
        unconfined="not run",
        says="OSError",
    ),
    Attempt(
        name="write a cgroup",
        code="os.mkdir('/sys/fs/cgroup/' + HOST['nap']); escaped()",
        unconfined="not run",
        says="No such file",
    ),
    Attempt(
        name="read /sys",
        code="escaped(os.listdir('/sys'))",
    ),
    Attempt(
        name="open the kernel's log and memory",
        code="""
for d in '/dev/kmsg', '/dev/mem', '/dev/kvm', '/dev/tty', '/dev/vda', '/dev/sda', '/dev/fuse':
  try: os.open(d, os.O_RDONLY); escaped(d)
  except OSError: pass
""",
        unconfined="as root",
    ),
    Attempt(
        name="make a device node",
        code="import stat; os.mknod('d', stat.S_IFCHR | 0o666, os.makedev(1, 1)); escaped()",
        unconfined="as root",
    ),
    Attempt(
        name="type into a terminal by TIOCSTI",
        code="""
import fcntl
for fd in 0, 1, 2: fcntl.ioctl(fd, 0x5412, b'x')
escaped()
""",
        unconfined="not run",
        says="OSError",
    ),
    Attempt(
        name="set the host's name",
        code="import socket; socket.sethostname('x'); escaped()",
        unconfined="not run",
        says="OSError",
    ),
    Attempt(
        name="set the clock",
        code="import time; time.clock_settime(0, 0); escaped()",
        unconfined="not run",
        says="OSError",
    ),
    # Limits
    Attempt(
        name="fork bomb by clone",
        code="while True: call('clone', 17, 0, 0, 0, 0)",
        unconfined="not run",
        says="Operation not permitted",
    ),
    Attempt(
        name="thread bomb",
        code="""
import threading, time
threading.stack_size(65536)
for i in range(10000): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
""",
        unconfined="not run",
        says="can't start new thread",
    ),
    Attempt(
        name="raise the limit of memory",
        code="import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1)); escaped()",
        unconfined="not run",
        says="not allowed to raise",
    ),
    Attempt(
        name="raise the limit of processes",
        code="import resource; resource.setrlimit(resource.RLIMIT_NPROC, (-1, -1)); escaped()",
        unconfined="not run",
        says="not allowed to raise",
    ),
    Attempt(
        name="let the host take a core dump",
        code="import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); escaped()",
    ),
    Attempt(
        name="dump core",
        code="os.abort()",
        unconfined="not run",
        says="status 134",
    ),
    Attempt(
        name="map memory piece by piece",
        code="""
x = []
while True: checked(libc.mmap(None, 1 << 20, 3, 0x22, -1, 0))
""",
        unconfined="not run",
        says="Cannot allocate memory",
    ),
    Attempt(
        name="memory in memfd files",
        code="while True: os.write(os.memfd_create('x'), bytes(1 << 20))",
        unconfined="not run",
        says="OSError",
    ),
    Attempt(
        name="memory in System V segments",
        code="""
i = checked(libc.shmget(0, 1 << 20, 0o1600))
checked(libc.shmctl(i, 0, None))
escaped()
""",
    ),
    Attempt(
        name="leave System V objects behind",
        code="checked(libc.semget(0x5EC2E7, 1, 0o1666)); escaped()",
        unconfined="not run",
        says="OSError",
    ),
    Attempt(
        name="leave POSIX shared memory behind",
        code="""
from multiprocessing import shared_memory
shared_memory.SharedMemory('left', True, 100)
escaped()
""",
        unconfined="not run",
        says="Error",
    ),
    Attempt(
        name="fill the folder",
        code="""
f = 0
while True:
  f += 1
  with open(f'f{f}', 'wb') as file: file.write(bytes(1 << 22))
""",
        unconfined="not run",
        says="No space left",
    ),
    Attempt(
        name="one enormous file",
        code="f = open('f', 'wb'); f.truncate(1 << 40)",
        unconfined="not run",
        says="OSError",
    ),
    Attempt(
        name="files without number",
        code="for i in range(10 ** 9): open(f'{i}', 'w').close()",
        unconfined="not run",
        says="more than 4096 files",
    ),
    Attempt(
        name="descriptors without number",
        code="""
x = []
while True: x.append(os.pipe())
""",
        unconfined="not run",
        says="Too many open files",
    ),
    Attempt(
        name="record locks without number",
        code="""
import fcntl
f = open('f', 'wb'); n = 0
while n < 1 << 12: fcntl.lockf(f, fcntl.LOCK_EX, 1, n); n += 2
escaped()
""",
        says="Operation not permitted",
    ),
    Attempt(
        name="record locks of open files without number",
        code="""
import fcntl, struct
f = open('f', 'wb'); n = 0
while n < 1 << 12: fcntl.fcntl(f, 37, struct.pack('hhqqi4x', 1, 0, n, 1, 0)); n += 2
escaped()
""",
        says="Operation not permitted",
    ),
    Attempt(
        name="wait for record locks",
        code="""
import fcntl, struct
f = open('f', 'wb')
for command in 7, 38: fcntl.fcntl(f, command, struct.pack('hhqqi4x', 1, 0, command, 1, 0))
escaped()
""",
        says="Operation not permitted",
    ),
    Attempt(
        name="page tables without number",
        code=PAGE_TABLES,
        unconfined="not run",
        says="more than 256 MiB of memory",
        machine="x86_64",
    ),
    Attempt(
        name="take a name that is no text",
        code="""
import time
libc.prctl(15, b'\\xff\\xfe')  # the supervisor reads it from /proc
time.sleep(0.3)
print('still watched')
""",
        unconfined="not run",
        says="still watched",
    ),
    Attempt(
        name="ask who locks a file of the interpreter",
        code="""
import fcntl, struct
for command in 5, 36:
  try: fcntl.fcntl(os.open(os.__file__, os.O_RDONLY), command, struct.pack('hhqqi4x', 1, 0, 0, 0, 0)); escaped()
  except PermissionError as error: print(error)
""",
        says="Operation not permitted",
    ),
    Attempt(
        name="lock a file of the interpreter for reading",
        code="import fcntl; fcntl.lockf(os.open(os.__file__, os.O_RDONLY), fcntl.LOCK_SH); escaped()",
        says="Operation not permitted",
    ),
    Attempt(
        name="errors without end",
        code="while True: sys.stderr.write('x' * 1000)",
        unconfined="not run",
        says="of output",
    ),
    Attempt(
        name="silence and a loop",
        code="""
os.close(0); os.close(1); os.close(2)
while True: pass
""",
        unconfined="not run",
        says="no result within 0.5 s",
        timeout_s=0.5,
    ),
    Attempt(
        name="ignore every signal",
        code="""
import signal
for s in range(1, 65):
  try: signal.signal(s, signal.SIG_IGN)
  except (OSError, ValueError): pass
while True: pass
""",
        unconfined="not run",
        says="no result within 0.5 s",
        timeout_s=0.5,
    ),
    Attempt(
        name="sleep past the limit",
        code="import time; time.sleep(1000)",
        unconfined="not run",
        says="no result within 0.5 s",
        timeout_s=0.5,
    ),
    Attempt(
        name="stop the supervisor",
        code="""
import signal
os.kill(os.getppid(), signal.SIGSTOP); os.kill(os.getpid(), signal.SIGSTOP)
""",
        unconfined="not run",
        says="no result within 0.5 s",
        timeout_s=0.5,
    ),
    # The protocol
    Attempt(
        name="use an inherited descriptor",
        code="""
for fd in range(3, 2000):
  try: os.fstat(fd); escaped(fd)
  except OSError: pass
""",
        unconfined="not run",
    ),
    Attempt(
        name="climb from a standard stream",
        code="""
for fd in range(3):
  try: escaped(os.open('..', 0, dir_fd=fd))
  except OSError: pass
""",
        unconfined="not run",
    ),
    Attempt(
        name="read more from stdin",
        code="escaped() if sys.stdin.read() else print('empty')",
        unconfined="not run",
        says="empty",
    ),
    Attempt(
        name="limit the supervisor",
        code="""
import resource
for limit in range(16):
  try: resource.prlimit(1, limit, (0, 0)); escaped(limit)
  except (OSError, ValueError): pass
print('still here'); raise SystemExit(3)
""",
        unconfined="not run",
        says="still here",
    ),
    Attempt(
        name="close everything and fail",
        code="os.closerange(0, 1000); os._exit(5)",
        unconfined="not run",
        says="status 5",
    ),
    Attempt(
        name="attach a filter to a socket",
        code="import socket; socket.socketpair()[0].setsockopt(1, 26, bytes(16)); escaped()",
        unconfined="not run",
        says="Function not implemented",
    ),
    Attempt(
        name="run a binary of its own",
        code="""
open('b', 'wb').write(open(sys.executable, 'rb').read()); os.chmod('b', 0o700)
os.execv('b', ['b', '-I', '-S', '-c', 'open("/etc/passwd"); print("ESCAPED")'])
""",
        unconfined="not run",
        says="No such file",
    ),
    Attempt(
        name="run the loader on a file of the host",
        code="os.execv('/lib64/ld-linux-x86-64.so.2', ['ld', '/bin/sh', '-c', 'echo ESCAPED'])",
        machine="x86_64",
    ),
    Attempt(
        name="crash the interpreter",
        code="ctypes.string_at(0)",
        unconfined="not run",
        says="status 139",
    ),
    Attempt(
        name="crash the parser",
        code="exec('(' * 100000 + ')' * 100000); print('survived')",
        unconfined="not run",
    ),
    Attempt(
        name="write what is no text",
        code="os.write(1, bytes(range(256))); print('\\ud800'.encode('utf-8', 'surrogatepass')); os.write(2, b'\\xff'); os._exit(1)",
        unconfined="not run",
    ),
    Attempt(
        name="forge the supervisor's report",
        code="""
for fd in range(3, 100):
  try: os.write(fd, b'{"exit-code": 0}\\n'); escaped()
  except OSError: pass
print('{"exit-code": 0}'); raise SystemExit('failed')
""",
        unconfined="not run",
        says="failed",
    ),
    Attempt(
        name="read secrets from os.environ",
        code="if {'HF_TOKEN', 'WANDB_API_KEY'} & set(os.environ): escaped(os.environ)",
        unconfined="not run",
    ),
)
"""All programs; the first 25 are those of the audit."""
