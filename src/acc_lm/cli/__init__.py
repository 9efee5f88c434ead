"""The command line: `train.py`'s arguments and exit codes, and the verbs of `acc-lm`.

Each verb has a file with `add_arguments` and `run`; only the file of the requested verb is imported.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from acc_lm.config.project import find_accelerate_config
from acc_lm.errors import EXIT_INTERRUPTED, ConfigError, UserError, print_problems
from acc_lm.files import written_aside
from acc_lm.redaction import print_anything

VERBS = {
    "start": {
        "train": "train a recipe, as `python train.py` does: acc-lm train [RECIPE] [section.key=value ...]",
        "launch": "train on several processes: `accelerate launch` with a config by name",
        "recipes": "list the recipes; --show NAME prints one",
        "new": "make a folder with train.py, a recipe and an Accelerate config, to own and edit",
        "data": "show the rows that a recipe trains on, or tokenise its text in advance",
        "plan": "compare what fits on which GPUs, how fast it is and what it costs, before a run (exit code 4 if nothing fits)",
        "path": "print where a recipe, an Accelerate config or train.py is",
    },
    "run": {
        "keep-going": "restart a run until it has ended; exit code 70 when a restart makes no progress",
        "doctor": "show what this machine has; check whether an Accelerate config can run on it (exit code 4 if not)",
    },
    "look at a model or a run": {
        "report": "write one page about a run, live or ended, with curves, samples and proof; compare several runs",
        "generate": "print text that an exported model writes",
        "evaluate": "measure loss, perplexity, bits per byte and token accuracy on a text, by document; score answers to prompts; run benchmarks",
        "export": "convert an exported model into another model folder",
        "push": "upload a model folder to the Hub, private by default",
        "checkpoint": "list, verify, export or convert checkpoints",
    },
    "study": {
        "parity": "run one recipe through many Accelerate configs and compare the curves, step by step",
        "scaling": "measure weak and strong scaling: time and communicated bytes by number of processes, as table and plot",
        "bench-comm": "measure bandwidth between processes by size; time, bytes and error of a step by bucket, hook and accumulation",
    },
    "reference": {
        "recipe": "print the reference of all recipe keys",
        "completion": "print a script that lets the shell complete verbs, recipes, configs and keys",
    },
}
USAGES = {
    "launch": "acc-lm launch CONFIG [--num_processes N ...] [RECIPE] [section.key=value ...]",
    "data": "acc-lm data show|prepare [RECIPE] [--rows N] [--ids] [--html FILE] [--processes N] [section.key=value ...]",
    "plan": "acc-lm plan [RECIPE] --gpus 8xH100 [--measure] [--config NAME] [--price X] [--network GBIT] [--machine-memory GB] [--all] [--json] [--html FILE] [section.key=value ...]",
    "evaluate": "acc-lm evaluate MODEL [--data FILE] [--predictions FILE] [--generate] [--tasks NAME,...] [--json] [section.key=value ...]",
    "scaling": "acc-lm scaling [--config RECIPE] [--config_file FILE] [--processes 1,2,4] [--steps N] [--output FILE] [section.key=value ...]",
    "bench-comm": "acc-lm bench-comm [--config RECIPE] [--processes N] [--sizes SIZE,...] [--parts NAME,...] [--output FILE] [section.key=value ...]",
    "keep-going": "acc-lm keep-going [--attempts N] [--pause SECONDS] -- accelerate launch ... train.py ...",
}
"""Usage lines of the verbs for which argparse's own would mislead."""


@contextmanager
def stdout_on_stderr(is_wanted: bool = True) -> Iterator[None]:
    """Redirect stdout to stderr inside the context, so that prints of libraries and engines do not mix with the result."""
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


@contextmanager
def replaced_file(file: Path) -> Iterator[Path]:
    """Path for a file that replaces `file` at once, so that a browser never reads half a page.

    Raises:
        ConfigError: there can be no such file.
        StorageError: the disk is full or cannot be written.
    """
    try:
        with written_aside(file) as work:
            yield work
    except OSError as error:
        raise ConfigError(
            f"{file} must be a file that can be written, got: {error.strerror or error}; choose another"
        ) from None


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the `acc-lm` command; returns the exit code."""
    print_anything()
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if arguments[:1] in (["train"], ["launch"]):  # train.py and Accelerate parse what follows
            code: int = importlib.import_module(f"acc_lm.cli.{arguments[0]}").main(arguments[1:])
        else:
            known = parse(arguments)
            code = importlib.import_module(f"acc_lm.cli.{known.verb.replace('-', '_')}").run(known)
        return code
    except BrokenPipeError:  # the reader closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except UserError as error:
        print_problems(error)
        return error.exit_code


def _versions() -> list[str]:
    """Versions of acc-lm, Python and every library that it requires, one line each."""
    package = "acc-lm"
    required = [
        re.split(r"[^\w.-]", line)[0] for line in importlib.metadata.requires(package) or [] if "extra ==" not in line
    ]
    lines = [f"{package} {importlib.metadata.version(package)}", f"python {sys.version.split()[0]}"]
    for library in sorted(required):
        try:
            lines.append(f"{library} {importlib.metadata.version(library)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{library} not installed")
    return lines


def split_recipe(config: str | None, words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Recipe and overrides of a command line: the first word without `=` may be the recipe, instead of --config.

    Raises:
        ConfigError: two recipes are given.
    """
    names = [word for word in words if "=" not in word]
    if len(names) > 1:
        raise ConfigError(
            f"command line: must have one recipe, got {' and '.join(names)}; write keys as section.key=value"
        )
    return (*names, config)[0], [word for word in words if "=" in word]


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the arguments of a verb; exit the process if they are invalid."""
    lines = [
        f"\n{group}:\n" + "\n".join(f"  {verb:12}{line}" for verb, line in verbs.items())
        for group, verbs in VERBS.items()
    ]
    parser = argparse.ArgumentParser(
        prog="acc-lm",
        usage="acc-lm VERB ...",
        description="Tools around a training run.",
        epilog="\n".join(lines).lstrip() + "\n\nacc-lm VERB --help explains a verb.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [verb for verbs in VERBS.values() for verb in verbs]
    parser.add_argument("--version", action="store_true", help="print the versions of acc-lm and of its main libraries")
    if arguments[:1] == ["--version"]:
        print("\n".join(_versions()))
        parser.exit()
    parser.add_argument("verb", choices=names, metavar="VERB", help=argparse.SUPPRESS)
    verb = parser.parse_args(arguments[:1]).verb
    help_line = next(verbs[verb] for verbs in VERBS.values() if verb in verbs)
    parser = argparse.ArgumentParser(prog=f"acc-lm {verb}", usage=USAGES.get(verb), description=help_line)
    importlib.import_module(f"acc_lm.cli.{verb.replace('-', '_')}").add_arguments(parser)
    known, strange = parser.parse_known_args(arguments[1:])
    if "overrides" in known:  # overrides may come before, between and after the options
        known.overrides += [word for word in strange if not word.startswith("-")]
        strange = [word for word in strange if word.startswith("-")]
        if "config" in known:
            known.config, known.overrides = split_recipe(known.config, known.overrides)
    if getattr(known, "config_file", None) is not None:
        known.config_file = find_accelerate_config(known.config_file)
    if strange:
        parser.error(f"unrecognized arguments: {' '.join(strange)}")
    known.verb = verb
    return known
