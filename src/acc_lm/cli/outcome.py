"""Every way for a run to end: one line on the terminal, `summary.json`, and the exit code."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from acc_lm.cli.arguments import Mode, parse_train_arguments
from acc_lm.config import Config
from acc_lm.errors import EXIT_INTERRUPTED, Preempted, UserError, print_problems
from acc_lm.redaction import redact
from acc_lm.stop import StopRequest, die_with_launcher
from acc_lm.summary import write_failure


def run_to_its_end(
    train: Callable[[Config, StopRequest, Mode], int], arguments: Sequence[str], default_recipe: Path
) -> int:
    """Parse the command line, train, and turn whatever comes of it into the exit code that it stands for."""
    config, mode, status, code, reason, speaks = None, Mode.TRAIN, "failed", 1, "", None
    try:
        parsed = parse_train_arguments(arguments, default_recipe)
        if parsed is None:
            return 0
        config, mode = parsed
        die_with_launcher()
        with StopRequest(Path(config.output_dir), config.training.max_minutes).listening() as stop_request:
            return train(config, stop_request, mode)
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
        if reason:
            write_failure(config.output_dir if config and mode == Mode.TRAIN else None, status, code, reason, speaks)
    return code
