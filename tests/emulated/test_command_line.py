"""``python -m emulated_cuda``: a program and all its processes on CUDA cards without a GPU."""

import json
import os
import signal
import struct
import sys

import pytest

from emulated_cuda import cards, running
from emulated_cuda.cards import CARDS
from emulated_cuda.loading import records

TRAIN = """
import subprocess, sys
import torch, torch.multiprocessing

ONE = "import torch; torch.ones(5, device='cuda:1'); print(torch.cuda.get_device_name())"

def work():
    print("worker", torch.ones(3 * 2**20, device="cuda").sum().item(), torch.cuda.device_count())

if __name__ == "__main__":
    square = torch.full((64, 64), 2.0, device="cuda")
    print(sys.argv[1:], (square @ square)[0, 0].item())
    subprocess.run([sys.executable, "-c", ONE], check=True)
    for method in ("spawn", "forkserver"):
        process = torch.multiprocessing.get_context(method).Process(target=work)
        process.start()
        process.join()
        assert process.exitcode == 0
    del square
    kept = torch.empty(300 * 2**20, dtype=torch.uint8, device="cuda:1")
    del kept
    torch.cuda.reset_peak_memory_stats(1)
    sys.exit(7)
"""


@pytest.fixture
def emulated(python, tmp_path):
    """Return a function that runs a program by ``python -m emulated_cuda`` in an empty folder.

    The process of the program is forked, unless it is to find its device by itself.
    """

    def run(
        source: str, *options: str, arguments: tuple[str, ...] = (), new: bool = False, **given
    ):
        script = tmp_path / "train.py"
        script.write_text(source, encoding="utf-8")
        words = "-m", "emulated_cuda", *options, str(script), *arguments
        return python(*words, forked_children=not new, **given)

    return run


def lines(run) -> list[str]:
    """Return the lines of the summary."""
    start = "emulated_cuda: "
    return [line[len(start) :] for line in run.stderr.splitlines() if line.startswith(start)]


@pytest.mark.slow
def test_script_and_the_processes_that_it_starts_have_the_devices(emulated, tmp_path):
    """Every process of a script that used a device has a line; the exit status is the script's."""
    report = tmp_path / "used.json"
    options = "--card", "h100", "--devices", "2", "--memory", "2GB", "--json", str(report)
    run = emulated(TRAIN, *options, arguments=("--epochs", "3"), new=True)
    assert run.stdout.splitlines() == [
        "['--epochs', '3'] 256.0",
        "NVIDIA H100 80GB HBM3",
        "worker 3145728.0 2",
        "worker 3145728.0 2",
    ], run.stderr
    assert run.returncode == 7
    of = "of 1,536.0 MB: fits"
    early = (
        "of 1,536.0 MB: ended early (exit status 7); it fitted until then, but the rest of "
        "the program did not run"
    )
    script, worker = "train.py", "at most 12.0 MB allocated, 14.0 MB reserved"
    card = "emulated NVIDIA H100 80GB"
    used, *others = lines(run)
    assert used.startswith(f"{script}, cuda:0, {card}: at most ")
    assert used.endswith(early)
    assert others == [
        f"{script}, cuda:1, {card}: at most 300.0 MB allocated, 300.0 MB reserved, {early}",
        f"-c, cuda:1, {card}: at most 0.0 MB allocated, 2.0 MB reserved, {of}",
        *[f"{script}, cuda:0, {card}: {worker}, {of}"] * 2,
    ]
    rows = json.loads(report.read_text(encoding="utf-8"))
    assert [row["device"] for row in rows] == ["cuda:0", "cuda:1", "cuda:1", "cuda:0", "cuda:0"]
    (one,) = [row for row in rows if row["program"] == "-c"]
    del one["process"]
    assert one == {
        "emulated": True,
        "program": "-c",
        "rank": None,
        "device": "cuda:1",
        "card": "h100",
        "total_bytes": 2**31,
        "usable_bytes": 3 * 2**29,
        "max_allocated_bytes": 512,
        "max_reserved_bytes": 2**21,
        "outside_reserve_bytes": list(cards.outside_reserve_of(CARDS["h100"])),
        "late_reserved_bytes": None,
        "missing_bytes": 0,
        "cache_releases": 0,
        "out_of_memory": False,
        "ended": True,
        "end": None,
        "fits": True,
    }
    assert [(row["end"], row["fits"]) for row in rows[:2]] == [("exit status 7", None)] * 2


CHILDREN = """
import multiprocessing, os, signal, torch

MB = 2**20

def allocated(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")

def killed():
    kept = allocated(50 * MB)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    for target, *args in [(allocated, MB), (allocated, MB), (allocated, 2**31), (killed,)]:
        process = multiprocessing.get_context("fork").Process(target=target, args=args)
        process.start()
        process.join()
        print(process.exitcode)
"""


@pytest.fixture(scope="module")
def children(python, tmp_path_factory):
    """Return the run of a program that forks four processes, which end in different ways."""
    script = tmp_path_factory.mktemp("children") / "train.py"
    script.write_text(CHILDREN, encoding="utf-8")
    options = "--memory", "1.5GB", "--no-values"
    return python("-m", "emulated_cuda", *options, str(script), forked_children=True)


OF_CHILD = "train.py, cuda:0, emulated NVIDIA A100 80GB: at most"


def test_forked_processes_are_listed_too(children):
    """Forked children have lines; the parent, which has used no device, has none.

    That which ran out of memory has a second one, and the last line says what to do.
    """
    line = f"{OF_CHILD} 1.0 MB allocated, 2.0 MB reserved, of 1,024.0 MB: fits"
    assert lines(children).count(line) == 2, children.stderr
    why = "on cuda:0, an allocation of 2,048.0 MB was refused when 1,024.0 MB of the card were left"
    assert [line.startswith(why) for line in lines(children)].count(True) == 1
    assert len(lines(children)) == 6
    assert lines(children)[-1].startswith("what to do: python -m pytest_cka_memory repair --card ")


def test_out_of_memory_names_what_was_missing(children):
    """If memory runs out, the traceback is printed, and the line says how much more was needed."""
    assert children.stdout.split()[2] == "1"
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB" in children.stderr
    assert (
        f"{OF_CHILD} 0.0 MB allocated, 0.0 MB reserved, of 1,024.0 MB: out of memory: "
        "1,024.0 MB more would have been needed for this allocation; a larger card shows what all "
        "needs"
    ) in lines(children)


def test_process_that_is_killed_is_listed_with_what_the_library_knows(children):
    """What a killed process had allocated is unknown; its reserve is known."""
    assert children.stdout.split()[3] == str(-signal.SIGKILL)
    assert (
        f"{OF_CHILD} allocated unknown, 50.0 MB reserved, of 1,024.0 MB: "
        "ended early (a signal); it fitted until then, but the rest of the program did not run"
    ) in lines(children)


ENDS = """
import os, signal, sys, torch

# Shells start background processes with SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

def caught():
    try:
        raise RuntimeError
    except RuntimeError as error:
        sys.last_type = type(error)  # as a debugger leaves it
    sys.exit(0)

def fail():
    raise RuntimeError("stops early")

ends = [fail, lambda: sys.exit(3), lambda: sys.exit("text"), lambda: os._exit(4), os.abort,
        lambda: os.kill(os.getpid(), signal.SIGTERM), lambda: signal.raise_signal(signal.SIGINT),
        caught, lambda: os._exit(0), lambda: sys.exit(0)]
for number, end in enumerate(ends):
    child = os.fork()
    if child == 0:
        kept = torch.empty((2 * number + 20) * 2**20, dtype=torch.uint8, device="cuda")
        end()
    os.waitpid(child, 0)
kept = torch.empty(100 * 2**20, dtype=torch.uint8, device="cuda")
raise ValueError("stops early")
"""
EARLY = "ended early ({}); it fitted until then, but the rest of the program did not run"


@pytest.mark.slow
def test_process_that_ends_early_is_not_said_to_fit(emulated, tmp_path):
    """The line says what ended a process, up to which peak; nothing stays in the temporary folder.

    The processes are forked from a new interpreter, because others do not end as it does.
    """
    folder = tmp_path / "temporary"
    folder.mkdir()
    run = emulated(ENDS, "--no-values", new=True, TMPDIR=str(folder))
    assert run.returncode == 1
    expected = [
        "RuntimeError",
        "exit status 3",
        "exit status 1",
        "exit status 4",
        "a signal",
        "a signal",
        "KeyboardInterrupt",
    ]
    ends = [*map(EARLY.format, expected), "fits", "fits", "fits"]
    by_size = {
        100.0: EARLY.format("ValueError"),
        **{20.0 + 2 * i: end for i, end in enumerate(ends)},
    }
    assert len(lines(run)) == len(by_size), run.stderr
    for line in lines(run):
        words = line.partition(": at most ")[2]
        size = float(words.partition(" MB reserved")[0].split()[-1])
        result = words.partition("of 80,640.0 MB: ")[2]
        assert result == by_size.pop(size), line
        is_unknown = words.startswith("allocated unknown")
        assert is_unknown == (result == EARLY.format("a signal")), line
    assert list(folder.iterdir()) == []


SMALLER_WORKSPACE = """
import torch
layer = torch.nn.Conv2d(128, 128, 7, padding=3).cuda()
x = torch.ones(16, 128, 64, 64, device="cuda", requires_grad=True)
fill = torch.empty(FILL * 2**20, dtype=torch.uint8, device="cuda")
layer(x).sum().backward()
print(torch.cuda.memory_stats()["num_ooms"])
"""


@pytest.mark.parametrize(("fill", "refused"), [(1_500, False), (1_830, True)])
def test_program_fits_if_a_library_goes_on_with_less_memory(emulated, tmp_path, fill, refused):
    """A convolution takes a smaller workspace if its own is refused: no error is raised."""
    page = tmp_path / "memory.json"
    run = emulated(
        SMALLER_WORKSPACE.replace("FILL", str(fill)),
        *("--no-values", "--card", "a100", "--memory", "2.5GB", f"--json={page}"),
    )
    assert run.returncode == 0, run.stderr
    if refused and run.stdout.split()[-1] == "0":
        pytest.skip("this version of cuDNN wants a smaller workspace")
    end = "; a library was refused memory, and went on with less, such as a workspace"
    assert lines(run)[0].endswith(f"2,048.0 MB: fits{end if refused else ''}")
    (row,) = json.loads(page.read_text("utf-8"))
    assert (row["fits"], row["out_of_memory"], row["missing_bytes"] > 0) == (True, False, refused)


CACHE = """
import torch
cached = [torch.empty(400 * 2**20, dtype=torch.uint8, device="cuda") for _ in range(3)]
del cached
kept = torch.empty(WANTED * 2**20, dtype=torch.uint8, device="cuda")
"""
RELEASED = (
    "fits; the allocator had to release its cache once, which is slow: the card has no more room "
    "for it"
)
EITHER = (
    "fits; memory was refused: either the allocator then released free blocks, or a library went "
    "on with less, such as a workspace"
)


@pytest.mark.parametrize(
    ("wanted", "setting", "end", "releases"),
    [
        pytest.param(1500, "", RELEASED, 1, id="segments"),
        pytest.param(1500, "max_split_size_mb:200", RELEASED, 1, id="all-of-the-cache"),
        pytest.param(1000, "max_split_size_mb:200", EITHER, 0, id="part-that-is-not-counted"),
        pytest.param(400, "", "fits", 0, id="no-refusal"),
    ],
)
def test_allocator_that_releases_its_cache_is_no_library(
    emulated, tmp_path, wanted, setting, end, releases
):
    """Nothing was refused for good: the allocator has released what it had kept free."""
    page = tmp_path / "memory.json"
    options = ("--no-values", "--card", "t4", "--memory", "2GB", f"--json={page}")
    source = CACHE.replace("WANTED", str(wanted))
    run = emulated(source, *options, PYTORCH_ALLOC_CONF=setting, PYTORCH_CUDA_ALLOC_CONF=setting)
    assert lines(run)[0].endswith(f"of 1,536.0 MB: {end}"), run.stderr
    (row,) = json.loads(page.read_text("utf-8"))
    assert (row["fits"], row["cache_releases"]) == (True, releases)


def test_allocator_that_has_released_its_cache_is_not_why_a_program_ends(emulated):
    """A refusal after which the allocator got the memory has nothing to do with a later error."""
    source = CACHE.replace("WANTED", "1500") + "raise ValueError"
    run = emulated(source, "--no-values", "--card", "t4", "--memory", "2GB", new=True)
    assert lines(run)[0].endswith(EARLY.format("ValueError"))


def test_refused_memory_of_torch_and_of_a_library_are_both_named(emulated):
    """A program may have both: a cache that is released, and a smaller workspace."""
    cached = SMALLER_WORKSPACE.replace("x = torch", "CACHED\nx = torch").replace(
        "CACHED",
        "cached = [torch.empty(150 * 2**20, dtype=torch.uint8, device='cuda') for _ in range(9)]\n"
        "del cached",
    )
    run = emulated(
        cached.replace("FILL", "1830"), "--no-values", "--card", "a100", "--memory", "2.5GB"
    )
    if run.stdout.split()[-1] == "0":
        pytest.skip("this version of cuDNN wants a smaller workspace")
    assert lines(run)[0].endswith(
        f"{RELEASED}; a library was refused memory, and went on with less, such as a workspace"
    )


TOO_LARGE = """
import torch
kept = [torch.empty(300 * 2**20, dtype=torch.uint8, device="cuda") for _ in range(4)]
torch.empty(700 * 2**20, dtype=torch.uint8, device="cuda")
"""


def test_memory_that_is_missing_is_followed_by_the_next_commands(emulated, tmp_path):
    """They are complete: the script with its arguments, and the same card and options."""
    options = ("--no-values", "--card", "t4", "--memory", "2GB")
    run = emulated(TOO_LARGE, *options, arguments=("--name", "a b"))
    script = f"{tmp_path / 'train.py'} --name 'a b'"
    assert lines(run)[1].endswith("1,200.0 MB were in use and only 0.0 MB were free")
    assert lines(run)[2:] == [
        f"what to do: python -m pytest_cka_memory repair --card t4 --to=1536 {script} shows which "
        "change of the program lowers the peak; python -m emulated_cuda --snapshot memory.pickle "
        f"{' '.join(options)} {script} and then python -m pytest_cka_memory snapshot memory.pickle "
        "show which lines fill the card"
    ]


def test_recording_knows_the_card_and_the_script(emulated, python, tmp_path):
    """If there is a recording already, only its reader and the repair are named, as it does."""
    file = tmp_path / "run.pickle"
    run = emulated(TOO_LARGE, "--no-values", "--card", "t4", "--memory=2GB", f"--snapshot={file}")
    repair = f"python -m pytest_cka_memory repair --card t4 --to=1536 {tmp_path / 'train.py'}"
    assert f"what to do: {repair} shows which change of the program lowers the peak" in lines(run)
    printed = python("-m", "pytest_cka_memory", "snapshot", str(file)).stdout.splitlines()
    assert f"to see which change of the program lowers the peak: {repair}" in printed


@pytest.mark.parametrize(
    ("status", "end", "fits"),
    [
        (-signal.SIGABRT, "SIGABRT", None),
        (-signal.SIGRTMIN - 1, f"signal {signal.SIGRTMIN + 1}", None),
        (5, "exit status 5", None),
        (0, None, True),
        (None, "a signal", None),
    ],
)
def test_status_of_the_program_says_how_it_ended(tmp_path, status, end, fits):
    """Where the process could write nothing at its end, its status is what is known of the end."""
    process = 2**22 + 1  # more than any process has
    record = {"program": "x.py", "rank": None, "card": "t4", "total_bytes": 2**31, "began_ns": 0}
    text = json.dumps({**record, "of_torch": None, "exception": None})
    (tmp_path / f"{process}.json").write_text(text, encoding="utf-8")
    figures = [2**20, *[0] * 31, 0, 0]
    (tmp_path / f"{process}.figures").write_bytes(struct.pack("34q", *figures))
    (used,) = records.read(tmp_path, {} if status is None else {process: status})
    (row,) = running.rows([used])
    assert (row["end"], row["fits"], row["ended"]) == (end, fits, False)


def test_process_that_still_runs_is_named(tmp_path):
    """A process that outlives the program is not said to have ended."""
    record = {"program": "x.py", "rank": None, "card": "t4", "total_bytes": 2**31, "began_ns": 0}
    text = json.dumps({**record, "of_torch": None, "exception": None})
    (tmp_path / f"{os.getpid()}.json").write_text(text, encoding="utf-8")
    (tmp_path / f"{os.getpid()}.figures").write_bytes(struct.pack("34q", 2**20, *[0] * 33))
    assert next(running.lines(records.read(tmp_path))).endswith(
        "still running; it has fitted so far"
    )


@pytest.mark.parametrize(
    ("end", "status"),
    [("os.kill(os.getpid(), 9)", -signal.SIGKILL), ("raise ValueError", 1)],
    ids=["signal", "error"],
)
def test_command_ends_as_its_program_does(emulated, end, status):
    """The command ends by the signal that has ended the program, or with its exit status."""
    run = emulated(f"import os\n{end}")
    assert run.returncode == status
    assert lines(run) == ["no process allocated memory on a CUDA device"]


RANKS = """
import os, torch, torch.distributed as dist
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
kept = torch.full(((rank + 1) * 100 * 2**20,), rank + 1, dtype=torch.uint8, device="cuda")
dist.all_reduce(kept[:1])
assert kept[0].item() == 3
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_are_named_and_sorted(python, tmp_path):
    """Lines of ranks have their numbers and are sorted; ``torchrun`` runs like any other module.

    The ranks find NCCL.
    """
    script = tmp_path / "ranks.py"
    script.write_text(RANKS, encoding="utf-8")
    torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)
    run = python("-m", "emulated_cuda", "--devices", "2", "--card", "t4", *torchrun)
    assert run.returncode == 0, run.stderr
    assert lines(run) == [
        f"rank {rank}, ranks.py, cuda:{rank}, emulated NVIDIA T4: at most {size} MB "
        f"allocated, {size} MB reserved, of 14,397.4 MB: fits"
        for rank, size in enumerate(["100.0", "200.0"])
    ]


def test_program_without_a_device_says_so(python):
    """A program that used no device is named as such, so that it
    does not pass for one that fits.
    """
    run = python("-m", "emulated_cuda", "-m", "json.tool", "--help")
    assert (run.returncode, lines(run)) == (0, ["no process allocated memory on a CUDA device"])
    assert run.stdout.startswith("usage: ")


CUSTOM_SITE = """
import os, sys
print("site of the user", "torch" in sys.modules, len([p for p in sys.path if "user" in p]))
"""


def test_numba_has_no_cuda_unless_it_is_asked_for(emulated):
    """Numba reads its setting when it is imported, so it is there before the device is loaded."""
    source = "import os, sys; print(os.environ['NUMBA_DISABLE_CUDA'], 'torch' in sys.modules)"
    assert emulated(source, new=True).stdout.splitlines() == ["1 False"]
    run = emulated(source, new=True, NUMBA_DISABLE_CUDA="0")
    assert run.stdout.splitlines() == ["0 False"]


OWN_CARD = """
import sitecustomize, sys
assert "emulated_cuda" in sys.modules and "torch" not in sys.modules
import emulated_cuda
emulated_cuda.load("t4")
import torch
print(sitecustomize.__file__, torch.cuda.get_device_name())
"""


@pytest.mark.slow
def test_sitecustomize_of_the_user_still_runs_and_the_program_may_load_another_card(
    emulated, tmp_path
):
    """A user's sitecustomize still runs, although Python imports only the first on its path.

    The card that a program loads itself has priority over that of the command line.
    """
    folder = tmp_path / "user"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(CUSTOM_SITE, encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    run = emulated(OWN_CARD, "--card", "h100", new=True, PYTHONPATH=path)
    assert run.stdout.splitlines()[-2:] == [
        "site of the user False 1",
        f"{folder / 'sitecustomize.py'} Tesla T4",
    ], run.stderr


OUTLIVES = """
import os, subprocess, sys

CHILD = '''
import os, time
import torch
from emulated_cuda import loading
kept = torch.ones(5, device="cuda")
print("child", flush=True)
while os.path.exists(loading.setting_of(os.environ)["records"]):
    time.sleep(0.01)
'''
child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE)
print(child.stdout.readline().decode().strip())
"""


def test_process_that_outlives_the_program_ends_without_an_error(emulated):
    """The folder for records is gone when such a process ends, and it prints nothing."""
    run = emulated(OUTLIVES)
    assert run.stdout == "child\n"
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no program to run; write a script, or -m and the name of a module"),
        (["--memory", "3", "x.py"], "--memory: '3' is not a size; write, for example, 40GB"),
        (["--memory", "512MB", "x.py"], "with 512 MB of memory"),
        (["--devices", "17", "x.py"], "cannot emulate 17 devices; write a number from 1 to 16"),
        (["--card", "a1000", "x.py"], "argument --card: invalid choice: 'a1000'"),
        (["torchrun"], "no file 'torchrun'; to run a module write -m before its name, and to run "),
    ],
)
def test_wrong_argument_is_refused_with_what_to_write(emulation, arguments, message, capsys):
    """The error for a wrong argument says what to write, with the usual exit status."""
    with pytest.raises(SystemExit) as raised:
        running.main(arguments)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["-I", "-sE", "-S"])
def test_option_that_would_hide_the_device_is_refused(emulation, monkeypatch, capsys, option):
    """With some options Python ignores variables, by which a program finds the device: an error."""
    monkeypatch.setattr(sys, "orig_argv", ["python", option, "-m", "emulated_cuda", __file__])
    with pytest.raises(SystemExit):
        running.main([__file__])
    assert f"python {option} would hide the emulated device from the" in capsys.readouterr().err


def test_options_of_python_are_kept(python, tmp_path):
    """Options of Python, such as ``-W error``, hold for the program too."""
    (tmp_path / "options.py").write_text("import sys; print(sys.warnoptions)", encoding="utf-8")
    run = python("-W", "error", "-m", "emulated_cuda", str(tmp_path / "options.py"))
    assert run.stdout == "['error']\n", run.stderr
