"""Programs that are recorded and replayed, of four kinds; each takes less than a second.

``python recorded_programs.py FOLDER [late|wrapped] [NAME ...]`` runs each on an emulated card, in a
process of its own, and writes ``NAME.pickle``, as torch does, and ``NAME.json`` with the
allocator's own figures. Settings are those of ``PYTORCH_ALLOC_CONF``. A ``late`` recording begins
in the middle of a program, and of a ``wrapped`` one only the last events are kept.
"""

import json
import os
import sys
from pathlib import Path

import emulated_cuda

DEVICE = "cuda"


def gpt_of_changing_lengths(torch):
    """Trains a transformer with sequences of changing lengths."""
    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    for length in (512, 256, 384, 700, 320, 512, 640, 128):
        model(torch.zeros(8, length, 512, device=DEVICE)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def convolutions_of_changing_sizes(torch):
    """Trains a network on images whose sizes change, with a last small batch."""
    layers = [torch.nn.Conv2d(3 if n == 0 else 64, 64, 3, padding=1) for n in range(6)]
    model = torch.nn.Sequential(*layers).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch, side in ((16, 96), (16, 128), (16, 80), (16, 112), (3, 128), (16, 128)):
        model(torch.zeros(batch, 3, side, side, device=DEVICE)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def accumulated_gradients(torch):
    """Accumulates gradients over batches of several lengths, and evaluates between."""
    model = torch.nn.Sequential(
        *(
            torch.nn.Sequential(
                torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024)
            )
            for _ in range(4)
        )
    ).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(2):
        for rows in (1000, 3000, 500, 2500):
            (model(torch.zeros(rows, 1024, device=DEVICE)).sum() / 4).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=epoch == 0)
        with torch.no_grad():
            kept = [model(torch.zeros(9000, 1024, device=DEVICE)) for _ in range(3)]
        del kept


def cache_by_concatenation(torch):
    """Generates with a cache that grows by concatenation with each token."""
    keys = [torch.zeros(4, 16, 300, 64, device=DEVICE) for _ in range(12)]
    for _ in range(150):
        new = torch.zeros(4, 16, 1, 64, device=DEVICE)
        for layer, cache in enumerate(keys):
            keys[layer] = torch.cat([cache, new], dim=2)
            scores = torch.matmul(new, keys[layer].transpose(2, 3)).softmax(-1)
            del cache, scores


def cache_that_doubles(torch):
    """Generates for several requests with caches that double when they are full."""
    for prompt in (700, 90, 1500, 300):
        caches = [torch.zeros(8, prompt, 1024, device=DEVICE) for _ in range(6)]
        while caches[0].shape[1] < 4000:
            for layer, cache in enumerate(caches):
                larger = torch.zeros(8, 2 * cache.shape[1], 1024, device=DEVICE)
                larger[:, : cache.shape[1]] = cache
                caches[layer] = larger


def beams_that_are_reordered(torch):
    """Searches with beams: the cache is indexed again at each step, and requests end."""
    beams = 6
    cache = [torch.zeros(beams, 8, 512, 64, device=DEVICE) for _ in range(16)]
    order = torch.zeros(beams, dtype=torch.long, device=DEVICE)
    for step in range(60):
        for layer in range(len(cache)):
            cache[layer] = torch.cat([cache[layer], cache[layer][:, :, :1]], 2).index_select(
                0, order
            )
        if step % 20 == 19:
            cache = [each[:, :, ::2].contiguous() for each in cache]


def graph_of_a_step(torch):
    """Captures a step of inference in a graph and replays it."""
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(6))).to(DEVICE)
    batch = torch.zeros(1500, 2048, device=DEVICE)
    with torch.no_grad():
        model(batch)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = model(batch)
        for _ in range(5):
            graph.replay()
            kept = output.clone()
        del kept


def graphs_that_share_a_pool(torch):
    """Captures graphs of several batch sizes in one pool, the largest first."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).to(DEVICE)
    pool, graphs = None, []
    with torch.no_grad():
        for rows in (8000, 4000, 2000, 1000, 3000):
            batch = torch.zeros(rows, 1024, device=DEVICE)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                output = model(batch)
            pool = graph.pool()
            graphs.append((graph, batch, output))
        for graph, _, output in graphs:
            graph.replay()
            output.sum()


def graphs_that_are_deleted(torch):
    """Captures, deletes the graph, empties the cache, and captures a larger one."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).to(DEVICE)
    with torch.no_grad():
        for rows in (3000, 6000, 5000):
            batch = torch.zeros(rows, 1024, device=DEVICE)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = model(batch)
            graph.replay()
            del graph, output
            torch.cuda.empty_cache()
            model(batch)


def batches_on_a_side_stream(torch):
    """Copies batches on a second stream, with record_stream, while the first one trains."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).to(DEVICE)
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    for rows in (2000, 9000, 4000, 6000, 1000, 9000, 3000):
        with torch.cuda.stream(side):
            batch = torch.zeros(rows, 1024, device=DEVICE)
        main.wait_stream(side)
        batch.record_stream(main)
        model(batch).mean().backward()
        del batch


def three_streams_with_caches_of_their_own(torch):
    """Works on three streams in turn; none can use what another has cached."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    for rows in (3000, 7000, 2000, 5000, 8000):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                first = torch.zeros(rows + 500 * number, 1024, device=DEVICE)
                second = first @ torch.zeros(1024, 512, device=DEVICE)
                del first, second
    torch.cuda.empty_cache()
    torch.zeros(20_000, 1024, device=DEVICE)


def layers_that_are_offloaded(torch):
    """Moves layers to the host and back on a side stream, and empties the cache."""
    side = torch.cuda.Stream()
    layers = [torch.zeros(3000, 1000 + 300 * n, device=DEVICE) for n in range(8)]
    for _ in range(3):
        on_host = [layer.cpu() for layer in layers]
        layers.clear()
        torch.cuda.empty_cache()
        work = torch.zeros(30_000, 1024, device=DEVICE)
        with torch.cuda.stream(side):
            layers += [layer.to(DEVICE) for layer in on_host]
        torch.cuda.current_stream().wait_stream(side)
        for layer in layers:
            layer.record_stream(torch.cuda.current_stream())
        del work
        layers = [layer[:, :-100].contiguous() for layer in layers]


PROGRAMS = {
    program.__name__: program
    for program in (
        *(gpt_of_changing_lengths, convolutions_of_changing_sizes, accumulated_gradients),
        *(cache_by_concatenation, cache_that_doubles, beams_that_are_reordered),
        *(graph_of_a_step, graphs_that_share_a_pool, graphs_that_are_deleted),
        *(batches_on_a_side_stream, three_streams_with_caches_of_their_own),
        *(layers_that_are_offloaded,),
    )
}
SETTINGS = (
    *("", "expandable_segments:True", "max_split_size_mb:128", "max_split_size_mb:64"),
    *("garbage_collection_threshold:0.6", "roundup_power2_divisions:4"),
    "max_split_size_mb:128,expandable_segments:True",
)


def record(torch, program, path, *, entries=1_000_000, late=False):
    """Run a program and write its recording, and the allocator's own figures beside it."""
    memory = torch.cuda.memory
    if not late:
        memory._record_memory_history(max_entries=entries, stacks="python")
    program(torch)
    if late:
        memory._record_memory_history(max_entries=entries, stacks="python")
        program(torch)
    figures = {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }
    memory._dump_snapshot(str(path))
    path.with_suffix(".json").write_text(json.dumps(figures), encoding="utf-8")


def main(arguments):
    """Run programs, each in a forked process."""
    folder, *names = arguments
    folder = Path(folder)
    kind = names.pop(0) if names and names[0] in ("late", "wrapped") else ""
    more = {"late": {"late": True}, "wrapped": {"entries": 60}, "": {}}[kind]
    emulated_cuda.load("h100", total_bytes=2**39, values=False)
    import torch

    for name in names or PROGRAMS:
        process = os.fork()
        if process == 0:
            status = 1
            try:
                record(torch, PROGRAMS[name], folder / f"{name}.pickle", **more)
                status = 0
            finally:
                sys.stderr.flush()
                os._exit(status)
        if os.waitpid(process, 0)[1]:
            sys.exit(f"{name} failed")


if __name__ == "__main__":
    main(sys.argv[1:])
