"""`acc-lm launch CONFIG`: `accelerate launch` with a config by name and acc-lm's train.py."""

from __future__ import annotations

import os
import shlex
import sys

from acc_lm.cli import USAGES
from acc_lm.config.project import find_accelerate_config, training_script
from acc_lm.errors import ConfigError

END = "end of the command line"


def main(arguments: list[str]) -> int:
    """Print the `accelerate launch` command that these arguments stand for, and become it.

    Options before the recipe are the launcher's, everything from the recipe or the first section.key=value on is train.py's.
    """
    if not arguments or arguments[0].startswith("-"):
        asks = bool({"-h", "--help"} & set(arguments[:1]))
        print(f"usage: {USAGES['launch']}\n\n{main.__doc__}", file=sys.stdout if asks else sys.stderr)
        return 0 if asks else 2
    file, rest = find_accelerate_config(arguments[0]), arguments[1:]
    from accelerate.commands.launch import launch_command_parser

    known = launch_command_parser().parse_args([*rest, END])
    of_training = [known.training_script, *known.training_script_args][:-1]
    options = rest[: len(rest) - len(of_training)]
    if "--config_file" in options:
        raise ConfigError(
            f"--config_file must be left out, got it with {arguments[0]}, which names the config; remove one"
        )
    command = [
        "accelerate",
        "launch",
        "--quiet",
        "--config_file",
        str(file),
        *options,
        str(training_script()),
        *of_training,
    ]
    print(shlex.join(command), file=sys.stderr, flush=True)
    os.execv(sys.executable, [sys.executable, "-m", "accelerate.commands.launch", *command[2:]])
