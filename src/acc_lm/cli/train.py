"""`train.py`'s command line, and every way a run can end: one line on the terminal, `summary.json`, and the exit code."""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import psutil

from acc_lm.cli import split_recipe
from acc_lm.config import Config, Mode
from acc_lm.config.loading import dump_config, load_config
from acc_lm.config.messages import FOREIGN_NAMES
from acc_lm.config.project import training_script
from acc_lm.config.reference import help_text
from acc_lm.errors import EXIT_INTERRUPTED, ConfigError, OutOfMemoryError, Preempted, UserError, print_problems
from acc_lm.launcher import bound_spinning, die_with_launcher
from acc_lm.redaction import print_anything, redact
from acc_lm.run_files.log_file import copied_to_log
from acc_lm.run_files.output_dir import open_output_dir
from acc_lm.run_files.summary import write_failure
from acc_lm.stop import StopRequest, handlers_kept

EXIT_SECONDS = 10.0
"""Seconds for the libraries to end their threads, at the end of a process in which a tracker hangs."""
USAGE = "train.py [--config RECIPE | RECIPE] [--dry-run | --eval-only] [--print-config] [section.key=value ...]"


def end_at_once(output_dir: str | None, error: UserError) -> NoReturn:
    """End this process from any of its threads as `run_to_its_end` does, while the main thread waits in a library.

    Args:
        output_dir: Folder of the run; None: write no summary.
    """
    try:
        print_problems(error)
        began = psutil.Process().create_time()
        write_failure(output_dir, error.status, error.exit_code, str(error), error.speaks, began)
    finally:
        os._exit(error.exit_code)


@handlers_kept()
def run_to_its_end(
    train: Callable[[Config, StopRequest, Mode], int], arguments: Sequence[str], default_recipe: Path
) -> int:
    """Parse the command line, train, and turn the outcome into its exit code."""
    config, mode, status, code, reason, speaks = None, Mode.TRAIN, "failed", 1, "", None
    began, is_ours, log = time.time(), False, ExitStack()
    print_anything()
    bound_spinning()
    gc.disable()  # until the libraries are loaded, see `runtime.keep_libraries`
    try:
        parsed = parse_train_arguments(arguments, default_recipe)
        if parsed is None:
            return 0
        config, mode = parsed
        die_with_launcher()
        output_dir = Path(config.output_dir)
        with StopRequest(output_dir, config.training.max_minutes).listening() as stop_request, ExitStack() as stack:
            # A dry run may use the folder of a run that is under way.
            stack.enter_context(open_output_dir(output_dir, alone=mode != Mode.DRY_RUN))
            is_ours = mode == Mode.TRAIN
            if mode != Mode.DRY_RUN:
                log.enter_context(copied_to_log(output_dir))
            try:
                code = train(config, stop_request, mode)
            finally:
                from acc_lm.runtime import stop_watching

                stop_watching()
    except Preempted as stop:
        status, code, reason = stop.status, stop.exit_code, str(stop)
        print(reason, file=sys.stderr)
    except UserError as error:
        status, code, reason = error.status, error.exit_code, str(error)
        _print_memory(error, config)
        print_problems(error)
    except KeyboardInterrupt:
        status, code, reason = "interrupted", EXIT_INTERRUPTED, "interrupted outside the loop; nothing new to save"
        print(reason, file=sys.stderr)
    except Exception as error:
        from acc_lm.runtime import explain

        code, reason = 1, f"{type(error).__name__}: {error}"
        explained = explain(error, config)
        if explained is None:
            print(redact(traceback.format_exc()), file=sys.stderr)
            return code
        status, code, reason, speaks = explained.status, explained.exit_code, str(explained), explained.speaks
        _print_memory(explained, config)
        print_problems(explained)
    finally:
        log.close()
        gc.enable()
        if reason and is_ours and config:
            write_failure(config.output_dir, status, code, reason, speaks, began)
        leave_hanging_tracker(code)
    return code


def leave_hanging_tracker(code: int) -> None:
    """Let this process end with its exit code although an abandoned tracker, at the end of Python, waits for its own threads."""
    from acc_lm.reporting.trackers import TRACKING_THREAD

    def leave() -> None:
        threading.main_thread().join()
        time.sleep(EXIT_SECONDS)
        os._exit(code)

    if any(thread.name == TRACKING_THREAD and thread.is_alive() for thread in threading.enumerate()):
        threading.Thread(target=leave, daemon=True).start()


def _print_memory(error: UserError, config: Config | None) -> None:
    """Print what was predicted and used, if the memory of a GPU was too small."""
    if isinstance(error, OutOfMemoryError) and config is not None:
        from acc_lm.planning.here import predicted_and_used

        if line := predicted_and_used(config):
            print(line, file=sys.stderr)


def main(arguments: list[str]) -> int:
    """`acc-lm train`: run train.py with these arguments; return its exit code."""
    script = training_script()
    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script), *arguments]
    code: int = importlib.import_module("train").main(arguments)
    return code


def parse_train_arguments(arguments: Sequence[str], default_recipe: Path) -> tuple[Config, Mode] | None:
    """Recipe of this command line and the mode to run it in; None after --print-config, which has printed the recipe.

    Raises:
        ConfigError: an unknown argument, or any problem of the recipe.
    """
    parser = argparse.ArgumentParser(
        prog="train.py",
        usage=USAGE,
        description="Train a causal language model: the recipe says what to learn, the Accelerate config only where.",
        epilog="Keys of a recipe; each can be set on the command line as section.key=value:\n" + help_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", metavar="RECIPE", help="recipe: a file, or the name of one in recipes/ (default: quickstart)"
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print the resolved recipe, which reproduces the run, and exit"
    )
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument(
        "--dry-run",
        action="store_const",
        const=Mode.DRY_RUN,
        default=Mode.TRAIN,
        dest="mode",
        help="run a step, an evaluation, a save and a load on this launch's engine, measure a step, keep nothing, and exit",
    )
    modes.add_argument(
        "--eval-only",
        action="store_const",
        const=Mode.EVAL_ONLY,
        dest="mode",
        help="evaluate the newest checkpoint of output_dir, else model.name_or_path, add a line to metrics.jsonl, and exit",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="keys of the recipe to override; the last one wins; a word without = is the recipe",
    )
    known, unknown = parser.parse_known_intermixed_args(list(arguments))
    strange = [argument for argument in unknown if argument.startswith("-")]
    if strange:
        raise ConfigError(*(_explain_option(option) for option in strange))
    recipe, overrides = split_recipe(known.config, known.overrides)
    config = load_config(recipe or default_recipe, overrides)
    if known.print_config:
        print(dump_config(config), end="")
        return None
    return config, known.mode


def _explain_option(option: str) -> str:
    name = option.lstrip("-").partition("=")[0].replace("-", "_")
    if name in FOREIGN_NAMES:
        hint = f"{name} is another tool's name, here it is {FOREIGN_NAMES[name]}=VALUE"
    else:
        hint = "write keys without dashes, as section.key=value"
    return f"command line: must be --config, --dry-run, --eval-only, --print-config or section.key=value, got {option!r}; {hint}"
