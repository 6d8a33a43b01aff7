"""Files of strangers: what is admitted, and that everything else ends in one line."""

import io
import pickle
import struct

import made
import pytest

from pytest_cka_memory.cli.main import UNUSABLE, main
from pytest_cka_memory.errors import ReportError
from pytest_cka_memory.snapshots import reading, unpickling
from pytest_cka_memory.snapshots.reading import read
from pytest_cka_memory.snapshots.unpickling import WrongContentError, compacted, unpickled

MB = made.MB


def test_events_segments_and_stacks_are_read(tmp_path):
    """Each event, block and line of a snapshot is what torch has written."""
    found = read(made.written(tmp_path, made.two_allocations()))
    (device,) = found.devices
    assert [unpickling.ACTIONS[action] for action in device.actions] == [
        *("segment_alloc", "alloc", "segment_alloc", "alloc", "free_requested", "free_completed"),
    ]
    assert list(device.sizes) == [size * MB for size in (20,)] + [
        *(20 * MB - 100, 10 * MB, 10 * MB, 10 * MB, 10 * MB)
    ]
    assert [segment.bytes for segment in device.segments] == [20 * MB, 10 * MB]
    assert device.segments[0].blocks[0].requested_bytes == 20 * MB - 100
    site = found.sites[device.places[1]]
    assert [(line.file, line.line) for line in site.frames] == [
        ("/home/alice/projects/net/model.py", 11),
        ("/home/alice/projects/net/train.py", 30),
    ]
    assert site.flags == unpickling.IN_MODULE
    assert found.settings["max_split_size"] == -1


def test_pools_are_read_from_events_of_new_versions(tmp_path):
    """An event that names its pool is in that pool, and others are in the allocator's own."""
    data = made.snapshot(
        [
            made.event("alloc", made.BASE, 512, pool_id=(0, 0)),
            made.event("alloc", made.BASE + 512, 512, pool_id=(3, 1)),
        ]
    )
    (device,) = read(made.written(tmp_path, data)).devices
    assert [device.pool_names[pool] for pool in device.pools] == [(0, 0), (3, 1)]


def test_devices_without_a_recording_are_left_out(tmp_path):
    """A job on device 1 leaves an empty trace of device 0, which is not shown."""
    data = made.two_allocations()
    data["device_traces"].insert(0, [])
    for segment in data["segments"]:
        segment["device"] = 1
    assert [device.index for device in read(made.written(tmp_path, data)).devices] == [1]


class _Calls:
    """Unpickles as a call of a function."""

    def __init__(self, function, *arguments):
        self._call = function, arguments

    def __reduce__(self):
        return self._call


def _event(**changes):
    return made.snapshot([{**made.event("alloc", made.BASE, 512), **changes}])


def _segment(**changes):
    return made.snapshot((), [{**made.segment(made.BASE, 2 * MB, []), **changes}])


def _block(**changes):
    return _segment(blocks=[{**made.block(made.BASE, 512), **changes}])


WRONG_VALUES = [None, -1, 1.5, "text", b"bytes", [], {}, (), 2**70, complex(1)]
CALLS = [
    *("os.system", "builtins.eval", "builtins.exec", "subprocess.Popen", "posix.system"),
    *("builtins.getattr", "builtins.__import__", "builtins.open", "shutil.rmtree", "torch.load"),
    *("builtins.bytearray", "builtins.range", "builtins.object", "collections.OrderedDict"),
    *("numpy.core.multiarray._reconstruct", "functools.partial", "operator.attrgetter"),
    *("pickle.loads", "_pickle.loads", "codecs.decode", "types.CodeType", "builtins.type"),
]
STREAMS = {
    "empty": b"",
    "text": b"not a pickle",
    "zeros": bytes(1000),
    "only a protocol": b"\x80\x04",
    "no end": b"\x80\x04K\x01",
    "nothing on the stack": b"\x80\x04.",
    "unknown protocol": b"\x80\xff.",
    "unknown opcode": b"\x80\x04\xff.",
    "frame longer than the file": b"\x80\x04\x95" + struct.pack("<Q", 2**40) + b"N.",
    "string longer than the file": b"\x80\x04\x8d" + struct.pack("<Q", 2**40) + b"a.",
    "bytes longer than the file": b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"a.",
    "memo that is missing": b"\x80\x04h\x07.",
    "persistent object": b"\x80\x04Vobject\nP.",
    "persistent object on the stack": b"\x80\x04K\x01Q.",
    "extension": b"\x80\x04\x82\x01.",
    "extension without a code": b"\x80\x04\x84\x00\x00\x00\x00.",
    "instance": b"(ios\nsystem\n.",
    "class": b"cos\nsystem\n(S'true'\ntR.",
    "call of a number": b"\x80\x04K\x01)R.",
    "new object of a number": b"\x80\x04K\x01)\x81.",
    "state of a dict": b"\x80\x04}}b.",
    "items of a number": b"\x80\x04K\x01(K\x01K\x02u.",
    "odd number of items": b"\x80\x04}(K\x01u.",
    "append to a number": b"\x80\x04K\x01K\x02a.",
    "mark that is missing": b"\x80\x04t.",
    "unhashable key": b"\x80\x04}]K\x01s.",
    "buffer outside": b"\x80\x05\x97.",
    "a long number of digits": b"I" + b"9" * 10_000 + b"\n.",
    "text that is not UTF-8": b"\x80\x04\x8c\x02\xff\xff.",
    "a number": pickle.dumps(1),
    "a list": pickle.dumps([]),
    "another dict": pickle.dumps({"model": {"weight": [0.0]}}),
}
WRONG_POOLS = (1, "ab", [0, 0], (1,), ("a", 1))
WRONG_FRAMES = (1, "text", {1: 2}, [1], [[]])
OF_A_SEGMENT = ("address", "total_size", "stream", "device", "segment_pool_id")
OF_A_BLOCK = ("address", "size", "requested_size", "state")
OF_A_FRAME = ("name", "filename", "line")


def _of(kind, make, values):
    return {f"{kind} {value!r}": make(value) for value in values}


DATA = {
    **_of("event with address", lambda value: _event(addr=value), WRONG_VALUES),
    **_of("event with size", lambda value: _event(size=value), WRONG_VALUES),
    **_of("event with stream", lambda value: _event(stream=value), ([], "text", {})),
    **_of("event with pool", lambda value: _event(pool_id=value), WRONG_POOLS),
    **_of("event with frames", lambda value: _event(frames=value), WRONG_FRAMES),
    **_of("frame with", lambda key: _event(frames=[{**made.TRAIN[0], key: 2.5}]), OF_A_FRAME),
    **_of("segment with", lambda key: _segment(**{key: "x"}), OF_A_SEGMENT),
    **_of("segment with blocks", lambda value: _segment(blocks=value), (1, None, [1], ["text"])),
    **_of("block with", lambda key: _block(**{key: "x"}), OF_A_BLOCK),
    "event that is a list": made.snapshot([[1, 2]]),
    "trace that is a dict": {"device_traces": [{}], "segments": []},
    "traces that are a dict": {"device_traces": {}, "segments": []},
    "segments that are a dict": {"device_traces": [], "segments": {}},
    "too many devices": {"device_traces": [[]] * 2000, "segments": []},
    "device that no machine has": _segment(device=2**40),
}


def _call_of(name):
    module, function = name.rsplit(".", 1)
    return f"c{module}\n{function}\n(tR.".encode()


HOSTILE = {
    **_of("call of", _call_of, CALLS),
    **STREAMS,
    **{name: pickle.dumps(data) for name, data in DATA.items()},
}


def test_there_are_a_hundred_hostile_files():
    """The list has more than a hundred files, each wrong in another way."""
    assert len(set(HOSTILE.values())) > 100


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file_is_refused(name):
    """A file that is not a snapshot is refused with one line, and nothing in it is called."""
    content = HOSTILE[name]
    with pytest.raises((WrongContentError, MemoryError)) as raised:
        compacted(unpickled(io.BytesIO(content)))
    assert len(str(raised.value)) < 500
    assert "\n" not in str(raised.value)


def test_call_is_not_made(tmp_path):
    """A pickle that would write a file when it is loaded does not write it."""
    target = tmp_path / "called"
    path = tmp_path / "hostile.pickle"
    path.write_bytes(pickle.dumps(_Calls(open, str(target), "w")))
    with pytest.raises(
        ReportError, match=r"the file asks for .*open, but a snapshot has only builtin"
    ):
        read(path)
    assert not target.exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("memo of 2**31 entries", b"\x80\x04Nr\xff\xff\xff\x7f."),
        ("list in a list in a list", b"]" * 400_000 + b"a" * 399_999 + b"."),
        ("device that no machine has", pickle.dumps(_segment(device=2**40))),
        ("no snapshot", pickle.dumps({})),
    ],
    ids=["memo", "nested", "device", "empty"],  # the contents are too long for the environment
)
def test_command_refuses_a_hostile_file_in_one_line(tmp_path, capsys, name, content):
    """The command prints one line with the file's name, and exits with 2."""
    path = tmp_path / f"{name.replace('*', '')}.pickle"
    path.write_bytes(content)
    assert main(["snapshot", str(path)]) == UNUSABLE
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert path.name in lines[0]


@pytest.mark.slow
def test_file_that_takes_too_long_is_given_up(tmp_path, monkeypatch):
    """Keys with equal hashes make a dict quadratic: the process that reads them is ended."""
    monkeypatch.setattr(reading, "_LEAST_SECONDS", 1)
    path = tmp_path / "slow.pickle"
    path.write_bytes(pickle.dumps({n * (2**61 - 1): 0 for n in range(1, 3)}))
    numbers = b"".join(
        pickle.LONG1 + bytes([10]) + (n * (2**61 - 1)).to_bytes(10, "little") + b"K\x00"
        for n in range(1, 100_000)
    )
    path.write_bytes(b"\x80\x04}(" + numbers + b"u.")
    with pytest.raises(ReportError, match="reading it took more than 1 s or"):
        read(path)


def test_file_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    """A file above the limit is refused before anything reads it."""
    monkeypatch.setattr(reading, "_MOST_FILE_BYTES", 10)
    with pytest.raises(ReportError, match=r"the limit is 10 B; record fewer events"):
        read(made.written(tmp_path, made.two_allocations()))


def test_missing_file_and_folder_are_named(tmp_path):
    """A path without a regular file is an error that says so."""
    with pytest.raises(ReportError, match="No such file"):
        read(tmp_path / "no.pickle")
    with pytest.raises(ReportError, match="not a regular file"):
        read(tmp_path)
