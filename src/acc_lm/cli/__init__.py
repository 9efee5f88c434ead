"""`acc-lm`: the companions of a run."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path

from acc_lm.errors import EXIT_INTERRUPTED, ConfigError, UserError, print_problems
from acc_lm.redaction import print_anything


@contextmanager
def stdout_on_stderr(is_wanted: bool = True) -> Iterator[None]:
    """Send what libraries and engines print on stdout to stderr meanwhile, so that only what is asked for comes after it."""
    if not is_wanted:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def main(arguments: list[str] | None = None) -> int:
    """Entry of the `acc-lm` command; returns the exit code."""
    print_anything()
    parser = argparse.ArgumentParser(prog="acc-lm", description="The companions of a training run.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    generate = verbs.add_parser("generate", help="print text that an exported model writes")
    generate.add_argument("model", type=Path, help="folder of an exported model, e.g. runs/quickstart/final")
    generate.add_argument("--prompt", default="", help="text to go on from")
    generate.add_argument(
        "--chat",
        action="store_true",
        help="the prompt is a question, in the model's chat template; print the answer alone",
    )
    generate.add_argument(
        "--max-new-tokens", type=int, default=100, metavar="N", help="length of the text, in tokens (default 100)"
    )
    generate.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0 always takes the likeliest token (default 0.8)"
    )
    generate.add_argument(
        "--top-k", type=int, default=50, metavar="K", help="choose among the K likeliest tokens (default 50)"
    )
    generate.add_argument("--seed", type=int, default=0, help="same seed, same text (default 0)")
    generate.add_argument(
        "--date", metavar="YYYY-MM-DD", help="for a chat template that reads the clock (default: the date of the run)"
    )

    evaluate = verbs.add_parser(
        "evaluate",
        usage="acc-lm evaluate MODEL [--data FILE] [--predictions FILE] [--generate] [--json] [section.key=value ...]",
        help="loss, perplexity, bits per byte and token accuracy of a model on a text, by document; its answers to prompts",
    )
    evaluate.add_argument(
        "model", metavar="MODEL", help="final/ of a run, the run, another model's folder, or a Hub id"
    )
    evaluate.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="FILE",
        help="file or glob of text or conversations; several times for several (default: what the run held out)",
    )
    evaluate.add_argument("--predictions", type=Path, metavar="FILE", help="write a line of JSON for each document")
    evaluate.add_argument(
        "--generate", action="store_true", help="answer each prompt, and compare with the answer that is there"
    )
    evaluate.add_argument(
        "--references-column", metavar="NAME", help="of the records, with other right answers: a text or a list of them"
    )
    evaluate.add_argument("--max-new-tokens", type=int, metavar="N", help="most tokens of an answer (default 100)")
    evaluate.add_argument(
        "--temperature", type=float, metavar="T", help="draw the tokens of an answer (default 0: the likeliest)"
    )
    evaluate.add_argument(
        "--batch-size", type=int, metavar="N", help="rows or prompts at a time; decides memory, never a figure"
    )
    evaluate.add_argument("--revision", metavar="NAME", help="branch, tag or commit of the Hub id")
    evaluate.add_argument("--json", action="store_true", help="for scripts")
    evaluate.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="laid over the recipe, e.g. data.sequence_length=512"
    )

    export = verbs.add_parser("export", help="make another model folder of an exported one")
    export.add_argument("final", type=Path, metavar="FINAL", help="folder of an adapter, e.g. runs/lora/final")
    export.add_argument("output", type=Path, metavar="OUTPUT", help="a new folder")
    export.add_argument(
        "--merge",
        action="store_true",
        required=True,
        help="one model of the adapter and its base, for transformers alone",
    )
    export.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="type of the weights written (default float32)",
    )

    recipe = verbs.add_parser("recipe", help="print the reference of all recipe keys")
    recipe.add_argument(
        "format", choices=("schema", "markdown"), help="schema: recipes/schema.json; markdown: docs/recipe.md"
    )

    parity = verbs.add_parser(
        "parity", help="run one recipe through many Accelerate configs and compare the curves, step by step"
    )
    parity.add_argument(
        "--config",
        type=Path,
        default=Path("recipes/quickstart.yaml"),
        metavar="FILE",
        help="recipe (default: quickstart)",
    )
    parity.add_argument(
        "--cases",
        default="",
        metavar="NAME:N,...",
        help="configs (names in accelerate_configs/, or files) and their numbers of processes; default: all that fit here",
    )
    parity.add_argument("--steps", type=int, default=20, metavar="N", help="optimizer steps of each run (default 20)")
    parity.add_argument("--output", type=Path, metavar="FILE", help="write the table as Markdown, with JSON beside it")
    parity.add_argument("overrides", nargs="*", metavar="section.key=value", help="laid over the recipe")

    scaling = verbs.add_parser(
        "scaling",
        usage="acc-lm scaling [--config RECIPE] [--config_file FILE] [--processes 1,2,4] [--steps N] [--output FILE] [section.key=value ...]",
        help="weak and strong scaling: time and communicated bytes over the number of processes, table and picture",
    )
    scaling.add_argument(
        "--config", type=Path, default=Path("recipes/quickstart.yaml"), metavar="RECIPE", help="default: quickstart"
    )
    scaling.add_argument(
        "--config_file", type=Path, metavar="FILE", help="Accelerate config (default: accelerate_configs/ddp.yaml)"
    )
    scaling.add_argument(
        "--processes", default="1,2", metavar="N,...", help="numbers of processes; one is plain Python (default 1,2)"
    )
    scaling.add_argument("--steps", type=int, default=30, metavar="N", help="optimizer steps of a launch (default 30)")
    scaling.add_argument(
        "--output",
        type=Path,
        default=Path("runs/scaling/scaling.md"),
        metavar="FILE",
        help="Markdown; scaling.json and scaling.png are put beside it (default: runs/scaling/scaling.md)",
    )
    scaling.add_argument("overrides", nargs="*", metavar="section.key=value", help="laid over the recipe")

    comm = verbs.add_parser(
        "bench-comm",
        usage="acc-lm bench-comm [--config RECIPE] [--processes N] [--sizes SIZE,...] [--parts NAME,...] [--output FILE] [section.key=value ...]",
        help="bandwidth of the processes here by size; buckets, hooks, accumulation: time, bytes and error of a step",
    )
    comm.add_argument(
        "--config", type=Path, metavar="RECIPE", help="whose model is taken (default: one with 45 MB of gradients)"
    )
    comm.add_argument("--processes", type=int, metavar="N", help="default: one for each GPU, else 2")
    comm.add_argument(
        "--sizes",
        metavar="SIZE,...",
        help="of the tensors, such as 4KiB,1MiB (default: 4 KiB to 16 MiB, on GPUs to 256 MiB)",
    )
    comm.add_argument(
        "--parts", default="", metavar="NAME,...",
        help="of collectives, buckets, memory, hooks, accumulation, data-parallel (default: all)",
    )  # fmt: skip
    comm.add_argument("--repeats", type=int, default=10, metavar="N", help="timed steps of each row (default 10)")
    comm.add_argument(
        "--output",
        type=Path,
        default=Path("runs/bench-comm/bench-comm.md"),
        metavar="FILE",
        help="Markdown; bench-comm.json is put beside it (default: runs/bench-comm/bench-comm.md)",
    )
    comm.add_argument("overrides", nargs="*", metavar="section.key=value", help="laid over the recipe")

    doctor = verbs.add_parser(
        "doctor", help="what this machine has, and whether an Accelerate config can run on it (exit code 4 if not)"
    )
    doctor.add_argument("--config_file", type=Path, metavar="FILE", help="e.g. accelerate_configs/ddp.yaml")
    doctor.add_argument("--num_processes", type=int, metavar="N", help="in all, as for accelerate launch")
    doctor.add_argument("--config", type=Path, metavar="RECIPE", help="whether this recipe can be trained there")
    doctor.add_argument("--json", action="store_true", help="for scripts")
    doctor.add_argument("overrides", nargs="*", metavar="section.key=value", help="laid over the recipe")

    checkpoint = verbs.add_parser("checkpoint", help="list, verify, export or convert checkpoints")
    actions = checkpoint.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser(
        "list", help="the checkpoints of a run: size, evaluation loss, writer, whether they are whole"
    )
    listing.add_argument("run", type=Path, help="folder of the run, e.g. runs/quickstart")
    verify = actions.add_parser(
        "verify", help="read every byte of a checkpoint against its checksums; exit code 5 if one is wrong"
    )
    verify.add_argument("folder", type=Path, help="e.g. runs/quickstart/checkpoints/latest")
    export = actions.add_parser(
        "export", help="every tensor whole in one safetensors file: weights and the optimizer's moments"
    )
    export.add_argument("folder", type=Path)
    export.add_argument("output", type=Path, metavar="OUTPUT", help="a new file, *.safetensors")
    convert = actions.add_parser(
        "convert-to-hf", help="a folder that transformers loads, from any checkpoint of any backend"
    )
    convert.add_argument("folder", type=Path)
    convert.add_argument("output", type=Path, metavar="OUTPUT", help="a new folder")
    convert.add_argument("--tokenizer", metavar="PATH", help="default: the tokenizer/ of the checkpoint's run")

    keep = verbs.add_parser(
        "keep-going",
        usage="acc-lm keep-going [--attempts N] [--pause SECONDS] -- accelerate launch ... train.py ...",
        help="start a run again until it has ended; exit code 70 when that gets it no further",
    )
    keep.add_argument("--attempts", type=int, metavar="N", help="at most (default: as many as get it further)")
    keep.add_argument("--pause", type=float, default=5, metavar="SECONDS", help="between two attempts (default 5)")
    keep.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what starts the run")

    known, strange = parser.parse_known_args(arguments)
    if "overrides" in known:  # they may stand before, between and after the options
        known.overrides += [word for word in strange if not word.startswith("-")]
        strange = [word for word in strange if word.startswith("-")]
    if strange:
        parser.error(f"unrecognized arguments: {' '.join(strange)}")
    try:
        verbs_by_name = {
            "generate": _generate,
            "evaluate": _evaluate,
            "export": _export,
            "recipe": _recipe,
            "parity": _parity,
            "scaling": _scaling,
            "bench-comm": _bench_comm,
            "checkpoint": _checkpoint,
            "doctor": _doctor,
            "keep-going": _keep_going,
        }
        return verbs_by_name[known.verb](known)
    except BrokenPipeError:  # `| head`: who reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except UserError as error:
        print_problems(error)
        return error.exit_code


def _evaluate(known: argparse.Namespace) -> int:
    from acc_lm.cli.evaluate import Request, evaluate

    for word in known.overrides:
        if "=" not in word:
            raise ConfigError(
                f"command line: must be an option or section.key=value, got {word!r}; data is given as --data {word}"
            )
    return evaluate(
        Request(
            known.model, tuple(known.data), known.predictions, known.generate, known.references_column,
            known.max_new_tokens, known.temperature, known.batch_size, known.revision, known.json,
            tuple(known.overrides),
        )
    )  # fmt: skip


def _export(known: argparse.Namespace) -> int:
    import torch

    from acc_lm.export import merge
    from acc_lm.runtime import quiet_libraries

    quiet_libraries()
    try:
        merge(known.final, known.output, getattr(torch, known.dtype))
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise _not_loadable("FINAL", known.final, error) from None
    print(f"wrote {known.output}: AutoModelForCausalLM.from_pretrained({str(known.output)!r}) loads it")
    return 0


def _not_loadable(key: str, folder: Path, error: Exception) -> ConfigError:
    from acc_lm.tokenizer import first_line

    return ConfigError(
        f"{key} must be a model that transformers loads without code of its own, got {folder}: {first_line(error)}"
    )


def _generate(known: argparse.Namespace) -> int:
    from acc_lm.sources import is_unicode

    if not any((known.model / name).is_file() for name in ("config.json", "adapter_config.json")):
        got = known.model if known.model.is_dir() else f"{known.model}, which does not exist"
        raise ConfigError(
            f"model must be the folder of an exported model, got {got}; name the final/ of a finished run"
        )
    for name, wrong, wanted in (
        ("--max-new-tokens", known.max_new_tokens < 1, "at least 1"),
        ("--temperature", not 0 <= known.temperature < math.inf, "0 or more, and finite"),
        ("--top-k", known.top_k < 1, "at least 1"),
        ("--date", known.date is not None and not _is_day(known.date), "a date as YYYY-MM-DD"),
        ("--seed", not -(2**63) <= known.seed < 2**64, "a number of 64 bits"),
    ):
        if wrong:
            raise ConfigError(f"{name} must be {wanted}, got {getattr(known, name[2:].replace('-', '_'))}; change it")
    if not is_unicode(known.prompt):
        raise ConfigError(f"--prompt must be UTF-8, got {known.prompt!r}; convert it with iconv -t UTF-8")
    from acc_lm.export import sample_text
    from acc_lm.redaction import printable
    from acc_lm.runtime import quiet_libraries

    quiet_libraries()
    try:
        text = sample_text(
            known.model, known.prompt, max_new_tokens=known.max_new_tokens,
            temperature=known.temperature, top_k=known.top_k, seed=known.seed, is_question=known.chat, day=known.date,
        )  # fmt: skip
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise _not_loadable("model", known.model, error) from None
    print(printable(text, keep="\n\t"))
    return 0


def _is_day(text: str) -> bool:
    try:
        return bool(date.fromisoformat(text))
    except ValueError:
        return False


def _recipe(known: argparse.Namespace) -> int:
    from acc_lm.recipe import json_schema, markdown

    print(json_schema() if known.format == "schema" else markdown(), end="")
    return 0


def _doctor(known: argparse.Namespace) -> int:
    import json

    from acc_lm.recipe import load_config
    from acc_lm.runtime import check_config, machine

    if known.config_file is None and (known.config or known.overrides or known.num_processes is not None):
        raise ConfigError(
            "command line: --config and --num_processes must come with --config_file, got none; name the Accelerate config to judge, "
            "e.g. accelerate_configs/ddp.yaml"
        )
    if known.overrides and not known.config:
        raise ConfigError(
            f"overrides must come with --config, got {' '.join(known.overrides)}; name the recipe that they belong to"
        )
    with stdout_on_stderr(known.json):
        found = machine()
    if known.json:
        print(json.dumps(found, indent=1))
    else:
        devices = [
            f"{each['name']}, {each['memory_gb']} GB, compute capability {each['capability']}"
            for each in found["devices"]
        ]
        lines = {
            "python": f"{found['python']}, {found['system']}, {found['cpu_cores']} cores, {found['memory_gb']} GB",
            "libraries": ", ".join(f"{name} {version or '-'}" for name, version in found["libraries"].items()),
            "cuda": f"built for {found['cuda']['built_for'] or 'none'}, {'available' if found['cuda']['available'] else 'not available'}",
            "devices": "; ".join(devices) or "no accelerator",
            "connects": ", ".join(
                f"{name} {'yes' if there else 'no'}" for name, there in found["process_groups"].items()
            ),
            "precision": found["precision"],
            "C++": f"{found['cpp_compiler'] or 'no compiler'}, {'libaio' if found['libaio'] else 'no libaio'}, for extensions that are built here",
        }
        for name, text in lines.items():
            print(f"{name:10}{text}")
    if known.config_file:
        recipe = load_config(known.config, known.overrides) if known.config else None
        with stdout_on_stderr(known.json):
            notes = check_config(known.config_file, known.num_processes, recipe)
        print(*notes, sep="\n", file=sys.stderr if known.json else sys.stdout)
    return 0


def _checkpoint(known: argparse.Namespace) -> int:
    from acc_lm.cli import checkpoint

    if known.action == "list":
        return checkpoint.list_checkpoints(known.run)
    if known.action == "verify":
        return checkpoint.verify(known.folder)
    if known.action == "export":
        return checkpoint.export(known.folder, known.output)
    return checkpoint.convert_to_hf(known.folder, known.output, known.tokenizer)


def _keep_going(known: argparse.Namespace) -> int:
    from acc_lm.cli.keep_going import keep_going

    for name, wrong, wanted in (
        ("attempts", known.attempts is not None and known.attempts < 1, "at least 1"),
        ("pause", not 0 <= known.pause < math.inf, "0 or more"),
    ):
        if wrong:
            raise ConfigError(f"--{name} must be {wanted}, got {getattr(known, name)}; change it")
    command = known.command[1:] if known.command[:1] == ["--"] else known.command
    return keep_going(command, known.attempts, known.pause)


def _parity(known: argparse.Namespace) -> int:
    from acc_lm.cli.parity import parity

    if known.steps < 2:
        raise ConfigError(f"--steps must be at least 2, got {known.steps}; change it")
    root = Path.cwd()
    if not (root / "train.py").is_file():
        raise ConfigError(
            f"acc-lm parity must be started beside train.py, got {root}; change into the project's folder"
        )
    cases = [case for case in known.cases.split(",") if case]
    return parity(known.config, known.overrides, cases, known.steps, root, known.output)


def _scaling(known: argparse.Namespace) -> int:
    from acc_lm.cli.launching import signals_end_it
    from acc_lm.cli.scaling import LEAST_STEPS, read_counts, scaling

    if known.steps < LEAST_STEPS:
        raise ConfigError(f"--steps must be at least {LEAST_STEPS}, got {known.steps}; change it")
    counts = read_counts(known.processes)
    with signals_end_it():
        return scaling(known.config, known.overrides, known.config_file, counts, known.steps, known.output)


def _bench_comm(known: argparse.Namespace) -> int:
    from acc_lm.cli.bench_comm import bench_comm, read_parts
    from acc_lm.cli.launching import signals_end_it

    if known.repeats < 1:
        raise ConfigError(f"--repeats must be at least 1, got {known.repeats}; change it")
    with signals_end_it():
        return bench_comm(
            known.config,
            known.overrides,
            known.processes,
            known.sizes,
            read_parts(known.parts),
            known.repeats,
            known.output,
        )
