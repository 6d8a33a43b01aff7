"""Makes snapshots as torch writes them, from a few words."""

import pickle

MB = 2**20
BASE = 0x7F00_0000_0000


def frame(file, line, name):
    return {"filename": file, "line": line, "name": name}


TRAIN = [
    frame("/venv/lib/python3.12/site-packages/torch/nn/modules/linear.py", 125, "forward"),
    frame("/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", 1773, "_call_impl"),
    frame("/home/alice/projects/net/model.py", 11, "forward"),
    frame("/home/alice/projects/net/train.py", 30, "main"),
]
STEP = [
    frame("/venv/lib/python3.12/site-packages/torch/optim/adamw.py", 140, "_init_group"),
    frame("/home/alice/projects/net/train.py", 33, "main"),
]
EMPTY = [
    frame("/venv/lib/python3.12/site-packages/torch/cuda/memory.py", 230, "empty_cache"),
    frame("/home/alice/projects/net/train.py", 40, "main"),
]


def event(action, address, size, frames=(), *, stream=0, time=0, **more):
    key = "device_free" if action == "oom" else "addr"
    return {
        "action": action,
        key: address,
        "size": size,
        "stream": stream,
        "time_us": 1_000_000 + time,
        "frames": list(frames),
        **more,
    }


def block(address, size, *, requested=None, state="active_allocated", frames=()):
    return {
        "address": address,
        "size": size,
        "requested_size": size if requested is None else requested,
        "state": state,
        "frames": list(frames),
    }


def segment(address, size, blocks, **more):
    return {
        "device": 0,
        "address": address,
        "total_size": size,
        "stream": 0,
        "segment_type": "large" if size > 2 * MB else "small",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "blocks": blocks,
        **more,
    }


def snapshot(events=(), segments=(), **settings):
    return {
        "device_traces": [list(events)],
        "segments": list(segments),
        "allocator_settings": {"expandable_segments": False, "max_split_size": -1, **settings},
    }


def written(folder, data, name="made.pickle"):
    path = folder / name
    path.write_bytes(pickle.dumps(data))
    return path


def two_allocations():
    """A program that has 30 MB at its peak: 20 of the model, and 10 that it frees again."""
    first, second = BASE, BASE + 20 * MB
    events = [
        event("segment_alloc", first, 20 * MB),
        event("alloc", first, 20 * MB - 100, TRAIN, time=1000),
        event("segment_alloc", second, 10 * MB),
        event("alloc", second, 10 * MB, STEP, time=3000),
        event("free_requested", second, 10 * MB, time=4000),
        event("free_completed", second, 10 * MB, time=5000),
    ]
    segments = [
        segment(first, 20 * MB, [block(first, 20 * MB, requested=20 * MB - 100, frames=TRAIN)]),
        segment(second, 10 * MB, [block(second, 10 * MB, requested=0, state="inactive")]),
    ]
    return snapshot(events, segments)
