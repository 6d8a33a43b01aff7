"""Run accelerate's test of FSDP's peak memory on two emulated devices, with its own bounds.

python benchmarks/accelerate_peaks.py [--values] [--json FILE]

Each case starts the program of that test (``test_peak_memory_usage.py`` in accelerate's package)
by ``accelerate launch``, as ``tests/fsdp/test_fsdp.py`` in its repository does: two ranks,
bert-base-cased in float16, 160 examples. The program ends with an error if a rank's peak exceeds
the bound. Model and examples come from the network there and are generated here: weights drawn by
chance for the same configuration, and pairs of sentences about as long as those of MRPC. Needs
accelerate, transformers and datasets, and no GPU. Exits with 1 if a bound is exceeded.
"""

import argparse
import json
import os
import random
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

CARD = "a10"
RANKS = 2
EXAMPLES = 160
WORDS = 28_996
"""In the vocabulary of bert-base-cased."""
PROGRAM = "accelerate.test_utils.scripts.external_deps.test_peak_memory_usage"


class Case(NamedTuple):
    """A case of accelerate's test: the bound of the peak in MB, and how FSDP is set up."""

    bound: int
    options: tuple[str, ...]


CASES = {
    "FSDP1, SHARD_GRAD_OP": Case(
        2000, ("--fsdp_version=1", "--fsdp_sharding_strategy=SHARD_GRAD_OP")
    ),
    "FSDP1, FULL_SHARD": Case(1900, ("--fsdp_version=1", "--fsdp_sharding_strategy=FULL_SHARD")),
    "FSDP2, FULL_SHARD": Case(1900, ("--fsdp_version=2", "--fsdp_reshard_after_forward=true")),
}


def make_model(folder: Path) -> None:
    """Write a model like bert-base-cased, with weights drawn by chance, and its tokenizer."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*special, *(f"w{number}" for number in range(WORDS - len(special)))]
    (folder / "vocab.txt").write_text("\n".join(words), "utf-8")
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig(vocab_size=WORDS)).save_pretrained(folder)


def examples(count: int) -> dict[str, list[Any]]:
    """Return pairs of sentences of 25 words on average, with labels, as in MRPC."""
    chance = random.Random(0)

    def sentence() -> str:
        length = min(max(round(chance.gauss(25, 6)), 7), 49)
        return " ".join(f"w{chance.randrange(20_000)}" for _ in range(length))

    return {
        "idx": list(range(count)),
        "sentence1": [sentence() for _ in range(count)],
        "sentence2": [sentence() for _ in range(count)],
        "label": [chance.randrange(2) for _ in range(count)],
    }


def run_program() -> None:
    """Run accelerate's program in a rank, with generated examples in place of those of MRPC."""
    import datasets

    def load(*_: Any, **__: Any) -> Any:
        part = datasets.Dataset.from_dict(examples(EXAMPLES))
        return datasets.DatasetDict(train=part, validation=part)

    datasets.load_dataset = load
    del sys.argv[1]
    runpy.run_module(PROGRAM, run_name="__main__")


def run(case: Case, model: Path, values: bool) -> int:
    """Return the highest peak of a rank in MB; raises CalledProcessError if a rank fails."""
    with tempfile.TemporaryDirectory() as written:
        command = [
            *(sys.executable, "-m", "emulated_cuda", "--card", CARD, "--devices", str(RANKS)),
            *([] if values else ["--no-values"]),
            *("-m", "accelerate.commands.launch", f"--num_processes={RANKS}", "--num_machines=1"),
            *("--machine_rank=0", "--mixed_precision=fp16", "--use_fsdp", *case.options),
            "--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP",
            "--fsdp_transformer_layer_cls_to_wrap=BertLayer",
            *(__file__, "rank", f"--model_name_or_path={model}", f"--output_dir={written}"),
            *(f"--peak_memory_upper_bound={case.bound}", f"--n_train={EXAMPLES}"),
            f"--n_val={EXAMPLES}",
        ]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        found = json.loads((Path(written) / "peak_memory_utilization.json").read_text("utf-8"))
    return int(max(found.values()))


def main() -> None:
    """Run every case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--values", action="store_true", help="compute values too")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        for name, case in CASES.items():
            try:
                peak = run(case, Path(folder), options.values)
            except subprocess.CalledProcessError:
                peak = None
            print(f"{name}: {peak} MB, at most {case.bound}", flush=True)
            rows.append({"case": name, "peak_mb": peak, "bound_mb": case.bound})
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    sys.exit(not all(row["peak_mb"] for row in rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        run_program()
    else:
        main()
