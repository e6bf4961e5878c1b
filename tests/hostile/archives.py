"""Archives of output files that attack whoever unpacks them. Each is made from headers, byte by byte where no library would."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

DECLARED = ["results", "best"]
KEY = b"ssh-ed25519 AAAA mallory\n"
FILE, HARD, LINK, CHAR, BLOCK, FOLDER, PIPE, CONTIGUOUS, SPARSE, LONG_NAME, LONG_LINK, PAX, GLOBAL = (
    b"01234567SLKxg".decode()
)

Members = Callable[[Path], bytes]
"""The unpacked archive, for a home folder."""


def head(
    name: str | bytes,
    kind: str = FILE,
    link: str | bytes = "",
    size: int | bytes = 0,
    mode: int = 0o644,
    prefix: bytes = b"",
    sparse: bytes = b"",
) -> bytes:
    """One header. `size`: in bytes, or the field as it is."""
    fields = [
        *(os.fsencode(name)[:100].ljust(100, b"\0"), b"%07o\0" % mode, b"0000000\0", b"0000000\0"),
        *(size if isinstance(size, bytes) else b"%011o\0" % size, b"%011o\0" % 1_700_000_000, b" " * 8),
        *(kind.encode(), os.fsencode(link)[:100].ljust(100, b"\0")),
        *(b"ustar\00000" if not sparse else b"ustar  \0", b"root".ljust(32, b"\0"), b"root".ljust(32, b"\0")),
        *(b"0000000\0", b"0000000\0", sparse or prefix.ljust(155, b"\0")),
    ]
    block = b"".join(fields).ljust(512, b"\0")
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def padded(content: bytes) -> bytes:
    return content.ljust(-(-len(content) // 512) * 512, b"\0")


def file(name: str | bytes, content: bytes = KEY, mode: int = 0o644) -> bytes:
    return head(name, size=len(content), mode=mode) + padded(content)


def link(name: str | bytes, target: str | bytes) -> bytes:
    return head(name, LINK, target)


def hard(name: str, target: str) -> bytes:
    return head(name, HARD, target)


def folder(name: str) -> bytes:
    return head(name, FOLDER, mode=0o755)


def gnu_long(name: bytes, kind: str = LONG_NAME) -> bytes:
    return head("././@LongLink", kind, size=len(name) + 1) + padded(name + b"\0")


def pax(kind: str = PAX, /, **records: bytes) -> bytes:
    content = b""
    for key, value in records.items():
        body = b" " + key.replace("__", ".").encode() + b"=" + value + b"\n"
        length = len(body) + 1
        while len(str(length)) + len(body) != length:
            length += 1
        content += str(length).encode() + body
    return head("PaxHeaders/x", kind, size=len(content)) + padded(content)


def beyond_path_max(home: Path) -> bytes:
    """Sixteen nested folders with long names, each with a short link beside it, make a path that realpath() gives up on. From
    there, a link of only `..` leads to the home folder, and the file system follows it."""
    long, steps = "d" * 255, "abcdefghijklmnop"
    made, path = b"", ""
    for step in steps:
        made += pax(path=f"results/{path}{long}".encode()) + folder("x")
        made += pax(linkpath=long.encode()) + link(f"results/{path}{step}", "y")
        path = f"{path}{step}/"
    # `l` leads to `results`. From there, it is one step to the folder in which the archive is unpacked, and one more to the home.
    last = f"{path}{'l' * 254}"
    made += pax(path=f"results/{last}".encode(), linkpath=("../" * len(steps)).encode()) + link("x", "y")
    made += pax(linkpath=f"{last}/../../.ssh".encode()) + link("results/escape", "y")
    made += hard("results/keys", "results/escape/authorized_keys")
    return made + file("results/keys") + file("results/escape/authorized_keys")


def through(target: str) -> Members:
    return lambda home: link("results/door", target.format(home=home)) + file("results/door/authorized_keys")


LEFT_OUT: dict[str, Members] = {
    "realpath gives up beyond PATH_MAX": beyond_path_max,
    "absolute": lambda home: file(f"{home}/.bashrc"),
    "absolute with a declared name": lambda home: file("/results/x"),
    "two slashes": lambda home: file(f"//{home}/.bashrc"),
    "up": lambda home: file("results/../.bashrc"),
    "up at the end": lambda home: file("results/.."),
    "up from the prefix of ustar": lambda home: head("authorized_keys", size=0, prefix=b"results/../.ssh"),
    "not declared": lambda home: file(".bashrc"),
    "a name that begins like a declared one": lambda home: file("resultsx") + file("results.ssh/key"),
    "GNU's long name": lambda home: gnu_long(b"results/" + b"./" * 100 + b"../.bashrc") + file("results/x"),
    "GNU's long link": lambda home: gnu_long(b"../" * 50 + b".ssh", LONG_LINK) + link("results/door", "x"),
    "pax path": lambda home: pax(path=b"results/../.bashrc") + file("results/x"),
    "pax path, absolute": lambda home: pax(path=os.fsencode(home) + b"/.bashrc") + file("results/x"),
    "pax link": lambda home: pax(linkpath=b"../.ssh") + link("results/door", "x"),
    "pax path for all": lambda home: pax(GLOBAL, path=b"results/../.bashrc") + file("results/x"),
    "pax sparse name": lambda home: pax(GNU__sparse__name=b".bashrc") + file("results/x"),
    "link up": through("../.ssh"),
    "link up and down": through("x/../../.ssh"),
    "absolute link": through("{home}/.ssh"),
    "absolute link to the folder itself": through("{home}/results"),
    "link to the root": through("/"),
    "link to the working directory": through(".."),
    "link of slashes": through("..//..//../"),
    "empty link": lambda home: pax(linkpath=b"") + link("results/door", ""),
    "link to a process's files": through("/proc/self/cwd"),
    "link beside a declared folder": through("../results/../.ssh"),
    "declared folder is a link": lambda home: link("best", ".ssh") + file("best/authorized_keys"),
    "declared folder is an absolute link": lambda home: link("best", f"{home}/.ssh") + file("best/authorized_keys"),
    "link to a link": lambda home: link("results/a", ".") + link("results/b", "a/../.ssh") + file("results/b/x"),
    "links one by one upwards": lambda home: (
        folder("results/d") + link("results/d/a", "..") + link("results/b", "d/a/..") + file("results/b/.bashrc")
    ),
    "link, folder of its name, file": lambda home: (
        link("results/a", "../.ssh") + folder("results/a") + file("results/a/authorized_keys")
    ),
    "folder, link of its name, file": lambda home: (
        folder("results/a") + link("results/a", "../.ssh") + file("results/a/authorized_keys")
    ),
    "file, then a folder of its name": lambda home: file("results/a") + file("results/a/b"),
    "folder, then a file of its name": lambda home: file("results/a/b") + file("results/a"),
    "hard link up": lambda home: hard("results/a", "../.bashrc"),
    "hard link from the working directory": lambda home: hard("results/a", ".bashrc") + file("results/a"),
    "absolute hard link": lambda home: hard("results/a", f"{home}/.bashrc") + file("results/a"),
    "hard link beside": lambda home: hard("results/a", "results/../.bashrc"),
    "hard link to a link": lambda home: (
        link("results/a", "../.bashrc") + hard("results/b", "results/a") + file("results/b")
    ),
    "hard link to a link inside": lambda home: (
        file("results/c") + link("results/a", "c") + hard("results/b", "results/a")
    ),
    "hard link through a link": lambda home: link("results/a", "../.ssh") + hard("results/b", "results/a/id"),
    "hard link to what is not there": lambda home: hard("results/a", "results/never"),
    "hard link to a folder": lambda home: folder("results/d") + hard("results/a", "results/d"),
    "hard link whose link comes later": lambda home: hard("results/a/k", "results/b") + link("results/a", "../.ssh"),
    "pipe": lambda home: head("results/pipe", PIPE),
    "character device": lambda home: head("results/null", CHAR),
    "block device": lambda home: head("results/disk", BLOCK),
    "a long name": lambda home: pax(path=b"results/" + b"x" * 256) + file("results/x"),
    "too deep": lambda home: pax(path=b"results" + b"/d" * 5000 + b"/x") + file("results/x"),
    "NUL in a name": lambda home: pax(path=b"results/a\0/../../.bashrc") + file("results/x"),
    "NUL in a link": lambda home: pax(linkpath=b"a\0b") + link("results/a", "x"),
    "a declared folder that is a file": lambda home: file("best"),
    "old sparse file of a tebibyte": lambda home: head(
        "results/big", SPARSE, sparse=(b"%011o " % 0 + b"%011o " % 0).ljust(97, b"\0") + b"%011o " % 2**40
    ),
    "sparse file of pax": lambda home: (
        pax(GNU__sparse__map=b"0,1", GNU__sparse__size=b"%d" % 2**50, GNU__sparse__name=b"results/big")
        + file("x", b"y")
    ),
}
"""Each has at least one member that is left out, and named."""

DAMAGED: dict[str, Members] = {
    "empty": lambda home: b"",
    "no end": lambda home: file("results/x"),
    "a header that is no header": lambda home: file("results/x") + b"x" * 512 + file("results/y"),
    "half a header": lambda home: file("results/x") + head("results/y")[:100],
    "half a file": lambda home: head("results/x", size=10_000) + KEY,
    "size below zero": lambda home: head("results/x", size=b"\xff" * 11 + b"\x00"),
    "size below zero, then back": lambda home: file("results/x") + head("results/y", size=b"\xff" * 10 + b"\xfc\0"),
    "long name of gigabytes": lambda home: head("././@LongLink", LONG_NAME, size=2**32) + bytes(2**21),
    "long name beyond every memory": lambda home: head("x", LONG_NAME, size=b"\x80\0\0\0\x7f" + b"\xff" * 7),
    "pax header of gigabytes": lambda home: head("x", PAX, size=2**32) + bytes(2**21),
    "pax header whose length is 0": lambda home: head("x", PAX, size=512) + padded(b"0 path=x\n") + file("results/x"),
    "pax size below zero": lambda home: pax(size=b"-1024") + file("results/x"),
    "a thousand pax headers": lambda home: pax(comment=b"x") * 2000 + file("results/x"),
    "sparse map without end": lambda home: (
        pax(
            GNU__sparse__major=b"1", GNU__sparse__minor=b"0", GNU__sparse__name=b"results/x", GNU__sparse__realsize=b"1"
        )
        + head("x", size=2**30)
        + b"%d\n" % 10**9
        + b"0\n" * 2**20
    ),
    "old sparse headers without end": lambda home: (
        head("results/x", SPARSE, sparse=b"\0" * 96 + b"\x01" + b"%011o " % 1)
        + (b"%011o %011o " % (0, 0) * 21).ljust(504, b"\0").ljust(512, b"\x01") * 4096
    ),
    "something after the end": lambda home: file("results/x") + bytes(1024) + file("results/y") * 3,
}
"""None of their files comes back, because nobody can say what is missing."""

HARMLESS: dict[str, Members] = {
    "set-id bits": lambda home: file("results/a", mode=0o7777) + head("results/d", FOLDER, mode=0o7777),
    "no permission at all": lambda home: file("results/a", mode=0) + head("results/d", FOLDER, mode=0),
    "file over a link": lambda home: link("results/a", "good") + file("results/a"),
    "file over a hard link": lambda home: file("results/b", b"b") + hard("results/a", "results/b") + file("results/a"),
    "link to itself": lambda home: link("results/a", "a"),
    "links in a circle": lambda home: link("results/a", "b") + link("results/b", "a"),
    "newline and escapes": lambda home: file("results/a\n\x1b[2Jb"),
    "bytes that are no UTF-8": lambda home: file(b"results/\xff\xfe") + link(b"results/\xfd", b"\xff\xfe"),
    "a dot before everything": lambda home: folder("./") + folder("./results/") + file("./results/./a"),
    "times that no file has": lambda home: (
        pax(mtime=b"1e300") + file("results/a") + pax(mtime=b"nan") + file("results/b")
    ),
    "a time of many digits": lambda home: pax(mtime=b"9" * 10_000) + file("results/a"),
    "contiguous file": lambda home: head("results/a", CONTIGUOUS, size=4) + padded(b"abcd"),
    "hard link with data": lambda home: file("results/b", b"b") + head("results/a", HARD, "results/b"),
}
