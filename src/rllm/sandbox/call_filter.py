"""Filter of system calls, which the kernel applies to a process and to all that it starts; see seccomp(2)."""

from __future__ import annotations

import ctypes
import errno
import functools
import platform
import struct
import sys

_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
# Numbers of calls on these machines. Always refused: memory that no limit of a process counts, and keys of the user.
_CALLS = {"io_uring_setup": (425, 425), "memfd_create": (319, 279), "memfd_secret": (447, 447), "mq_open": (240, 180)}
_CALLS |= {"msgget": (68, 186), "semget": (64, 190), "shmget": (29, 194), "userfaultfd": (323, 282)}
_CALLS |= {"add_key": (248, 217), "bpf": (321, 280), "keyctl": (250, 219), "request_key": (249, 218)}
# Refused where the machine's processes and its socket files can be seen: access to those, and all signals to processes.
_SHARED = {"connect": (42, 203), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "ptrace": (101, 117)}
_SHARED |= {"kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138)}
_SHARED |= {"rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438)}
# Also calls that make the kernel send signals to others (F_SETOWN, F_SETSIG, F_SETOWN_EX, FIOSETOWN, SIOCSPGRP), calls
# that change the limits of others,
_FCNTL, _IOCTL, _PRLIMIT = (72, 25), (16, 29), (302, 261)
_SECOND_ARGUMENTS = {_FCNTL: (8, 10, 15), _IOCTL: (0x8901, 0x8902)}
# and datagrams, which need no connection.
_SOCKET, _SOCKETPAIR, _DATAGRAM = (41, 198), (53, 199), 2
# Families of sockets that are permitted: AF_UNIX; in a network of its own, also AF_INET, AF_INET6 and AF_NETLINK.
_LOCAL, _NETWORK = (1,), (1, 2, 10, 16)


@functools.cache
def call_filter(*, namespaced: bool) -> bytes | None:
    """Return the filter for code in namespaces of its own, or in none; `None` if this machine does not support it."""
    if sys.platform != "linux" or platform.machine() not in _MACHINES or struct.calcsize("P") != 8:
        return None
    ctypes.CDLL(None, use_errno=True).prctl(22, 2, None, 0, 0)  # PR_SET_SECCOMP, without a program
    if ctypes.get_errno() != errno.EFAULT:  # an emulated processor, or a kernel that has no filters
        return None
    machine, column = _MACHINES[platform.machine()]

    def load(offset: int) -> bytes:
        return struct.pack("HBBI", 0x20, 0, 0, offset)

    def jump(kind: int, value: int, if_true: int, if_false: int) -> bytes:
        return struct.pack("HBBI", kind, if_true, if_false, value)

    def end(verdict: int) -> bytes:
        return struct.pack("HBBI", 0x06, 0, 0, verdict)

    equal, at_least, refused, permitted = 0x15, 0x35, end(0x50000 | errno.EPERM), end(0x7FFF0000)
    program = [load(4), jump(equal, machine, 1, 0), refused]
    program += [load(0), jump(at_least, 1 << 30, 0, 1), refused]  # a second numbering of x86-64
    for numbers in (_CALLS if namespaced else _CALLS | _SHARED).values():
        program += [jump(equal, numbers[column], 0, 1), refused]
    if not namespaced:
        for numbers, values in _SECOND_ARGUMENTS.items():
            program += [jump(equal, numbers[column], 0, 2 * len(values) + 2), load(24)]
            program += [part for value in values for part in (jump(equal, value, 0, 1), refused)] + [load(0)]
        program += [jump(equal, _PRLIMIT[column], 0, 4), load(16), jump(equal, 0, 1, 0), refused, load(0)]
        program += [jump(equal, _SOCKET[column], 1, 0), jump(equal, _SOCKETPAIR[column], 0, 5), load(24)]
        program += [struct.pack("HBBI", 0x54, 0, 0, 0xF), jump(equal, _DATAGRAM, 0, 1), refused, load(0)]
    program += [jump(equal, _SOCKET[column], 1, 0), permitted, load(16)]
    for family in _NETWORK if namespaced else _LOCAL:
        program += [jump(equal, family, 0, 1), permitted]
    return b"".join([*program, refused])
