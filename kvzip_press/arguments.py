"""What the command lines share: one-line errors, exit states, and types of options. Imports nothing that takes time."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn


class CommandParser(argparse.ArgumentParser):
    """
    A parser whose errors are one line, and whose command runs until its end or a mistake that the user can mend.

    Parsed arguments hold the function to run as ``command``, and what to say when the user interrupts it, if anything,
    as ``interrupted``.
    """

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and end with status 2."""
        self.exit(2, f"{self.prog.split()[0]}: error: {message} (see {self.prog} --help)\n")

    def run(self, argv: Sequence[str] | None = None) -> int:
        """
        Run the command that the arguments, by default those of the process, ask for.

        Return the exit status: 0, 1 when whoever read the output has seen enough, 2 after an error that the user can
        mend, 130 when interrupted.
        """
        arguments = self.parse_args(argv)
        try:
            arguments.command(arguments)
            sys.stdout.flush()
        except BrokenPipeError:
            # The interpreter flushes what is left at its end: it must have somewhere to go
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except (ValueError, OSError, ImportError) as error:
            print(f"{self.prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            if hasattr(arguments, "interrupted"):
                print(f"\n{self.prog}: {arguments.interrupted}", file=sys.stderr)
            return 130
        return 0


def ratio(text: str) -> float:
    """A kept fraction, in (0, 1]."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be in (0, 1], got {text}")
    return value


def positive(text: str) -> int:
    """A whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value
