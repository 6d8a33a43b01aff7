"""Ask cuSOLVER on a card what workspace each decomposition wants, over many sizes.

    python benchmarks/card/card_solvers.py RESULT.jsonl.gz

Nothing is computed: these are the answers of the library's own functions ``*_bufferSize``, which
need a card. One line of JSON for each function and its options: ``sizes`` (rows and columns) and
``bytes`` (of the workspace on the card, then of that on the host where a function has one).
"""

import ctypes
import gzip
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

TYPES = {"S": (0, 0, 4, 4), "D": (1, 1, 5, 8), "C": (4, 0, 4, 8), "Z": (5, 1, 5, 16)}
"""cudaDataType, the real and the complex one beside it, and bytes of a number."""
SIGNATURES = {
    "{S}getrf": "m n - m count",
    "{S}geqrf": "m n - m count",
    "{S}orgqr": "m n n - m - count",
    "{S}ormqr": "0 0 m n k - m - - m count",
    "{S}gesvd": "m n count",
    "{S}potrf": "0 n - n count",
    "{S}potri": "0 n - n count",
    "{S}sytrf": "n - n count",
    "{S}syevd": "vectors 0 n - n - count",
    "{S}syevj": "vectors 0 n - n - count syevj",
    "{S}syevjBatched": "vectors 0 n - n - count syevj batch",
    "{S}gesvdj": "vectors thin m n - m - - m - n count gesvdj",
    "{S}gesvdjBatched": "vectors m n - m - - m - n count gesvdj batch",
    "{S}gesvdaStridedBatched": "vectors k m n - m MN - K - m MN - n NN count batch",
    "Xsyevd": "params vectors 0 N type - N real - type device host",
    "XsyevBatched": "params vectors 0 N type - N real - type device host BATCH",
    "Xgeev": "params 0 vectors N type - N complex - type - N type - N type device host",
    "Xgetrf": "params M N type - M type device host",
    "Xgeqrf": "params M N type - M type - type device host",
    "Xpotrf": "params 0 N type - N type device host",
}
"""The arguments after the handle: a letter in upper case is a 64-bit number, - an address."""
OTHER_NAMES = {
    **{f"{letter}syev{end}": f"{letter}heev{end}" for letter in "CZ" for end in ("d", "j")},
    **{f"{letter}syevjBatched": f"{letter}heevjBatched" for letter in "CZ"},
    **{f"{letter}or{end}": f"{letter}un{end}" for letter in "CZ" for end in ("gqr", "mqr")},
}
SQUARES = [
    *range(1, 130),
    *range(130, 1100, 7),
    *range(1100, 9000, 61),
    512,
    1024,
    2048,
    4096,
    8192,
]
SIDES = (1, 2, 5, 16, 31, 32, 33, 48, 64, 65, 100, 128, 200, 256, 500, 512, 1000, 1024, 2000, 4096)
BATCHES = (1, 2, 3, 8, 32, 100)


class Solver:
    """cuSOLVER of this process, with one handle."""

    def __init__(self) -> None:
        torch.linalg.qr(torch.ones(2, 2, device="cuda"))  # loads the library
        self.matrix = torch.empty(2**20, device="cuda")  # addresses that nothing reads
        self.library = ctypes.CDLL(f"libcusolver.so.{12 if torch.version.cuda >= '13' else 11}")
        self.handle = self.made("")
        self.infos = {
            "params": self.made("Params"),
            "gesvdj": self.made("GesvdjInfo"),
            "syevj": self.made("SyevjInfo"),
        }

    def made(self, kind: str) -> ctypes.c_void_p:
        """Return what a function of the library makes."""
        address = ctypes.c_void_p()
        if status := getattr(self.library, f"cusolverDnCreate{kind}")(ctypes.byref(address)):
            raise RuntimeError(f"cuSOLVER's status is {status}")
        return address

    def ask(self, name: str, letter: str, numbers: dict[str, int]) -> list[int] | None:
        """Return the bytes of a workspace; nothing if the library refuses the size."""
        dtype, real, complex_, itemsize = TYPES[letter]
        m, n = numbers["m"], numbers["n"]
        known = {**numbers, "k": min(m, n), "type": dtype, "real": real, "complex": complex_}
        wide = {"M": m, "N": n, "K": min(m, n), "BATCH": numbers["batch"]}
        wide |= {"MN": m * min(m, n), "NN": n * min(m, n)}
        count, device, host = ctypes.c_int(), ctypes.c_size_t(), ctypes.c_size_t()
        answers = {"count": count, "device": device, "host": host}
        arguments: list[object] = [self.handle]
        for word in SIGNATURES[name].split():
            if word in answers:
                arguments.append(ctypes.byref(answers[word]))
            elif word in self.infos:
                arguments.append(self.infos[word])
            elif word == "-":
                arguments.append(ctypes.c_void_p(self.matrix.data_ptr()))
            elif word in wide:
                arguments.append(ctypes.c_int64(wide[word]))
            else:
                arguments.append(ctypes.c_int(known[word] if word in known else int(word)))
        own = name.format(S=letter)
        function = getattr(self.library, f"cusolverDn{OTHER_NAMES.get(own, own)}_bufferSize")
        if function(*arguments):
            return None
        if "count" in SIGNATURES[name]:
            return [count.value * itemsize]
        return [device.value, host.value]


def sizes(name: str) -> list[tuple[int, int]]:
    """Return the rows and columns that a function is asked for."""
    if " m " not in f" {SIGNATURES[name]} " and "M" not in SIGNATURES[name].split():
        return [(n, n) for n in SQUARES]
    both = list(itertools.product(SIDES, SIDES))
    tall = "gesvdj" not in name and ("gesvd" in name or "orgqr" in name)
    found = [(m, n) for m, n in both if m >= n or not tall]
    return found + [(n, n) for n in SQUARES[::3]]


def questions() -> Iterator[tuple[str, str, dict[str, int]]]:
    """Yield function, letter of the type, and options."""
    for name, words in SIGNATURES.items():
        given = words.split()
        ranges = {
            "vectors": (0, 1) if "vectors" in given else (0,),
            "thin": (0, 1) if "thin" in given else (0,),
            "batch": BATCHES if {"batch", "BATCH"} & set(given) else (1,),
        }
        for letter in TYPES:
            for values in itertools.product(*ranges.values()):
                yield name, letter, dict(zip(ranges, values, strict=True))


def main() -> None:
    """Ask everything."""
    solver = Solver()
    with gzip.open(Path(sys.argv[1]), "wt", encoding="utf-8") as file:
        for name, letter, options in questions():
            asked = sizes(name)
            answers = [solver.ask(name, letter, {"m": m, "n": n, **options}) for m, n in asked]
            row = {"function": name, "letter": letter, **options, "sizes": asked, "bytes": answers}
            print(json.dumps(row), file=file, flush=True)


if __name__ == "__main__":
    main()
