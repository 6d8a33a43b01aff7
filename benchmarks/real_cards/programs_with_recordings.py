"""Programs of other people whose recordings are beside them: which they are, and how they ran."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Program:
    """One recording, and the program that wrote it."""

    name: str
    repository: str
    """Its owner and name on GitHub."""
    commit: str
    recording: str
    """The file that the card's run wrote."""
    script: str
    arguments: Sequence[str]
    card: str
    """An emulated card; where the source names none, one with the workspaces of its recording."""
    torch: str = "2.6"
    """The version of torch in the source."""
    dump: int = 1
    """The recording is what this call of ``_dump_snapshot`` writes, counted from 1."""
    recorded_in: str = ""
    """The commit that has the recording, if it is another one than the program's."""
    edits: Sequence[tuple[str, str, str]] = ()
    """Texts that are replaced in the program: its file, what it has, and what it gets."""
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: Sequence[str] = ("einops", "jaxtyping")
    """Packages to install beside torch."""
    assumed: str = ""
    """What the source does not say."""
    cause: str = ""
    """Why the requests or the reserve differ, if they do and it is known."""
    seen: str = ""
    """Why its levels are not blind: what was changed after a comparison."""

    @property
    def title(self) -> str:
        """The name; a runner shows it."""
        return self.name


_A100_OF_2_6 = {"TORCH_CUBLAS_WORKSPACE_CACHE": "1", "TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"}


_PLACES = "the same requests, in other free blocks: addresses and the version of torch decide"


def _wedsonlin() -> Iterator[Program]:
    for pattern, tokens, autocast in (
        ("training", 128, False),
        ("training", 256, False),
        ("training", 512, True),
        ("training", 1024, True),
        ("inference", 128, False),
        ("inference", 256, False),
        ("inference", 512, True),
        ("inference", 1024, False),
    ):
        kind = "full-training-step" if pattern == "training" else "forward-only"
        script = "cs336_systems/nsys_profile.py"
        yield Program(
            name=f"wedsonlin, {pattern}, {tokens} tokens{', autocast' if autocast else ''}",
            repository="Wedsonlin/assignment2-systems",
            commit="HEAD",
            recording=f"results/medium_{tokens}_{pattern}_memory_snapshot.pickle",
            script=script,
            arguments=(
                "--d_model 1024 --d_ff 4096 --num_layers 24 --num_heads 16 --model_name medium "
                f"--memory-profiler pytorch --context_length {tokens} --pattern {kind} "
                f"--autocast {str(autocast).lower()}"
            ).split(),
            card="a100",
            torch="2.11",
            needs=("einops", "einx", "jaxtyping"),
            # Quotes within quotes are read from Python 3.12 on.
            edits=((script, '["context_length"]', "['context_length']"),),
            assumed="autocast where the events are those of autocast",
            cause=_PLACES if pattern == "training" else "",
            seen="run by others before: seven of eight reserves were equal",
        )


_OTHER_TORCH = (
    "ran with torch 2.9.1 first, where the gradient of an index that takes all of a dimension "
    "has two requests fewer"
)


def _niuhuangxiaozi() -> Iterator[Program]:
    for mode in ("forward", "forward_and_backward"):
        for tokens, is_mixed in ((100, False), (150, False), (200, False), (200, True)):
            stem = f"{mode}_memory_snapshot_{tokens}" + "_mixed_precision" * is_mixed
            script = "profile_mixprecision_memory.py" if is_mixed else "profile_memory.py"
            arguments = ["--mode", mode, "--context_length", str(tokens)]
            yield Program(
                name=f"niuhuangxiaozi, {mode}, {tokens} tokens{', autocast' if is_mixed else ''}",
                repository="NiuHuangxiaozi/assignment2-systems",
                commit="9d868b9",
                recording=f"cs336_systems/profile_memory/{stem}.pickle",
                script=f"cs336_systems/profile_memory/{script}",
                arguments=arguments + ["--use_mixed_precision"] * is_mixed,
                card="a100",
                environment=_A100_OF_2_6,
                seen=_OTHER_TORCH if mode == "forward_and_backward" else "",
            )


def _yyin_dev() -> Iterator[Program]:
    for is_mixed in (False, True):
        for tokens in (128, 256, 512):
            folder = "forward_only" + "_mixed" * is_mixed
            stem = f"d_model_1600_layers_48_heads_25_batch_4_ctx_{tokens}_memory_snapshot"
            yield Program(
                name=f"yyin-dev, forward, {tokens} tokens{', autocast' if is_mixed else ''}",
                repository="yyin-dev/cs336-a2",
                commit="e667d2a",
                recording=f"data/memory_profiles/{folder}/{stem}.pickle",
                script="benchmark.py",
                arguments=(
                    "--d_model 1600 --num_layers 48 --num_heads 25 --d_ff 6400 --batch_size 4 "
                    f"--context_length {tokens} --num_warmups 5 --num_trials 1 --forward_only "
                    f"--profile_memory {'--mixed_precision' * is_mixed}"
                ).split(),
                card="a100",
                environment=_A100_OF_2_6,
                # Version 0.3 of einx, as its lock file has it: 0.4 indexes by other operations.
                needs=("einops", "einx", "jaxtyping"),
                assumed="one step after five",
                seen="" if tokens > 128 else "ran with another version of einx first",
            )


PROGRAMS: Sequence[Program] = (
    *_wedsonlin(),
    *_niuhuangxiaozi(),
    *_yyin_dev(),
    Program(
        name="magma27, forward and backward",
        repository="MAGMA27/assignment2-systems",
        commit="15883f2",
        recording="memory_snapshot.pickle",
        script="cs336_systems/benchmarking_script.py",
        arguments=(),
        card="rtx4090",
        torch="2.11",
        needs=("einops", "einx", "jaxtyping", "pandas"),
    ),
    Program(
        name="bcrafton, compiled training",
        repository="bcrafton/assignment2-systems",
        commit="0c0e8a7",
        recording="memory_snapshot.pickle",
        script="benchmarking_script.py",
        arguments=(),
        card="rtx4090",
        environment=_A100_OF_2_6,
        cause="Inductor of torch 2.9 in place of 2.6: it fuses and orders the code otherwise",
    ),
    Program(
        name="nothanmin, training",
        repository="notHanmin/assignment2-systems",
        commit="33be88e",
        recording="memory_snapshot.pickle",
        script="cs336_systems/benchmarking_script.py",
        arguments=(),
        card="a100",
        dump=40,
        environment=_A100_OF_2_6,
        assumed="the last of 40 recordings",
    ),
)
