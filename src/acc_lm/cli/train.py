"""Every way for a run to end: one line on the terminal, `summary.json`, and the exit code."""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import psutil

from acc_lm.cli.arguments import Mode, parse_train_arguments
from acc_lm.config import Config
from acc_lm.errors import EXIT_INTERRUPTED, Preempted, UserError, print_problems
from acc_lm.redaction import print_anything, redact
from acc_lm.stop import StopRequest, die_with_launcher, handlers_kept
from acc_lm.summary import open_output_dir, write_failure


def end_at_once(output_dir: str | None, error: UserError) -> NoReturn:
    """End this process from any of its threads, while its main one waits in a library, as `run_to_its_end` ends it.

    Args:
        output_dir: of the run; None: it leaves no summary.
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
    """Parse the command line, train, and turn whatever comes of it into the exit code that it stands for."""
    config, mode, status, code, reason, speaks = None, Mode.TRAIN, "failed", 1, "", None
    began, is_ours = time.time(), False
    print_anything()
    gc.disable()  # until the libraries are loaded, see `runtime.keep_libraries`
    try:
        parsed = parse_train_arguments(arguments, default_recipe)
        if parsed is None:
            return 0
        config, mode = parsed
        die_with_launcher()
        output_dir = Path(config.output_dir)
        with StopRequest(output_dir, config.training.max_minutes).listening() as stop_request, ExitStack() as stack:
            stack.enter_context(open_output_dir(output_dir, alone=mode != Mode.DRY_RUN))  # that may try beside a run
            is_ours = mode == Mode.TRAIN
            try:
                return train(config, stop_request, mode)
            finally:
                from acc_lm.runtime import stop_watching

                stop_watching()
    except Preempted as stop:
        status, code, reason = stop.status, stop.exit_code, str(stop)
        print(reason, file=sys.stderr)
    except UserError as error:
        status, code, reason = error.status, error.exit_code, str(error)
        print_problems(error)
    except KeyboardInterrupt:
        status, code, reason = "interrupted", EXIT_INTERRUPTED, "interrupted outside the loop; nothing new to save"
        print(reason, file=sys.stderr)
    except Exception as error:
        from acc_lm.runtime import explain

        reason = f"{type(error).__name__}: {error}"
        explained = explain(error, config)
        if explained is None:
            print(redact(traceback.format_exc()), file=sys.stderr)
            return code
        status, code, reason, speaks = explained.status, explained.exit_code, str(explained), explained.speaks
        print_problems(explained)
    finally:
        gc.enable()
        if reason and is_ours and config:
            write_failure(config.output_dir, status, code, reason, speaks, began)
    return code
