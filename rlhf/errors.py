"""The one error a user can cause, and how a program reports it."""

import sys
from collections.abc import Callable

LONGEST = 1000  # characters of a message: names and values that it repeats may be of any size


class UserError(Exception):
    """Something outside the code is wrong: a parameter, a file, a row.

    The message is one printable line, whatever names and values it repeats.
    """

    def __str__(self) -> str:
        return one_line(super().__str__())


def one_line(text: str) -> str:
    """Write characters that do not print, line ends among them, as escapes; cut what is too long."""
    cut = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in cut)


def run(main: Callable[[], None]) -> None:
    """Run a program: an error that its inputs or its machine cause becomes one line on stderr and exit
    status 1, Ctrl-C becomes 130. Numbers that stopped being finite count as caused by the parameters."""
    try:
        main()
    except (UserError, FloatingPointError) as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        what = one_line(f"{error.strerror or error}: {error.filename or 'no file name'}")
        print(f"error: {what}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted: run the same command again; training and sampling go on", file=sys.stderr)
        sys.exit(130)
