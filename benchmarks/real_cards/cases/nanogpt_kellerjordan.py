"""A GPT-2 of 124 million parameters on eight cards, as two records of modded-nanogpt trained it."""

import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

from case import Case, Figure

TRACK = "records/track_1_short"
# Of each record: its log, which has the program's text, and the peaks that the log ends with.
RECORDS = {
    "2025-05-24, stable torch": (
        "2025-05-24_StableTorch/89d9f224-3b01-4581-966e-358d692335e0.txt",
        ("30724", "45392"),
    ),
    "2025-07-13, torch 2.9": (
        "2025-07-13_UpgradeTorch190/692f80e0-5e64-4819-97d4-0dc83b7106b9.txt",
        ("33278", "48294"),
    ),
}
CAUSES = {
    "2025-07-13, torch 2.9": (
        "not known which tensors: the program is not the one of May, whose peaks are within 2 MiB. "
        "21 logs of the day before differ by 1 % in what is allocated and by 2 % in the reserve. "
        "NCCL, which does not run here, copies the lists of tensors that this program reduces"
    )
}
CARDS, VOCABULARY_MAGIC = 8, 20240520
TOKENS = {"train": 12_000_000, "val": 10_485_760 + 8}


def _figures() -> dict[str, Figure]:
    found = {}
    for name, (_, sizes) in RECORDS.items():
        for size, counts in zip(sizes, ("peak allocated", "peak reserved"), strict=True):
            title = f"{name}, {counts}"
            found[title] = Figure(size, "MiB", counts, cause=CAUSES.get(name, ""))
    return found


CASE = Case(
    title="GPT-2 of 124 million parameters, FlexAttention, compiled, float8 head, eight cards",
    source="https://github.com/KellerJordan/modded-nanogpt/tree/master/records/track_1_short",
    kind="compiled",
    card="h100",
    real="eight H100; nightlies of torch: 2.8 of 2025-05-24, and 2.9 of 2025-07-13",
    torch="2.9",
    figures=_figures(),
    runs=tuple(RECORDS),
    programs={
        "KellerJordan/modded-nanogpt@f411b3d346aa52d3504324ca93c230fd84c6c07f": tuple(
            f"{TRACK}/{log}" for log, _ in RECORDS.values()
        )
    },
    takes="Inductor compiles a network of twelve layers in two lengths, twice.",
    differs=(
        "The record's own program, with two steps instead of 1,770, two to warm up instead of "
        "ten, and no recording of times. One process is rank 0 of a group of eight that does not "
        "communicate. Made-up text. The log counts whole MiB, rounded down."
    ),
)


def _shortened(text: str) -> str:
    """Return the program's text for few steps."""
    for name, value in (("num_iterations", 2), ("val_loss_every", 2), ("warmup_steps", 2)):
        text, count = re.subn(rf"\b{name} = \d+", f"{name} = {value}", text)
        if count != 1:
            raise ValueError(f"the program sets {name} {count} times")
    return text


class _NoRecording:
    """In place of the recording of times, which is not needed."""

    def __enter__(self) -> "_NoRecording":
        return self

    def __exit__(self, *_arguments: object) -> None:
        pass

    def export_chrome_trace(self, _name: str) -> None:
        """Write nothing."""


def _write_text(folder: Path) -> None:
    """Write files of tokens as the program reads them; all tokens are 0."""
    folder.mkdir(parents=True)
    for name, count in TOKENS.items():
        head = [VOCABULARY_MAGIC, 1, count, *[0] * 253]
        with (folder / f"fineweb_{name}_000001.bin").open("wb") as file:
            file.write(b"".join(number.to_bytes(4, "little") for number in head))
            file.truncate(1024 + 2 * count)


def measured(run: str) -> dict[str, int]:
    """Run the program of a record, and return its peaks."""
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    place = Path(os.environ["REAL_CARDS_PROGRAM"])
    os.chdir(place)
    log = (place / TRACK / RECORDS[run][0]).read_text("utf-8")
    program = place / "program.py"  # torch.compile reads the lines of the file
    program.write_text(_shortened(log.split("\n" + "=" * 100, 1)[0]), "utf-8")
    data = place / "data" / "fineweb10B"
    if not data.exists():
        _write_text(data)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(CARDS))
    join, called = torch.distributed.init_process_group, subprocess.run

    def alone(*_arguments: Any, **_named: Any) -> None:
        join("fake", store=FakeStore(), rank=0, world_size=CARDS)

    def without_a_card(command: Any, *arguments: Any, **named: Any) -> Any:
        if command == ["nvidia-smi"]:
            return types.SimpleNamespace(stdout="")
        return called(command, *arguments, **named)

    torch.distributed.init_process_group = alone
    torch.profiler.profile = _NoRecording
    subprocess.run = without_a_card
    sys.argv = [str(program)]
    exec(compile(program.read_text("utf-8"), str(program), "exec"), {"__name__": "__main__"})
    return {
        f"{run}, peak allocated": torch.cuda.max_memory_allocated(),
        f"{run}, peak reserved": torch.cuda.max_memory_reserved(),
    }
