"""The one error a user can cause, and how a program reports it."""

import sys
from collections.abc import Callable


class UserError(Exception):
    """Something outside the code is wrong: a parameter, a file, a row. The message is one line."""


def run(main: Callable[[], None]) -> None:
    """Run a program: an error that its inputs or its machine cause becomes one line on stderr and exit
    status 1, Ctrl-C becomes 130. Numbers that stopped being finite count as caused by the parameters."""
    try:
        main()
    except (UserError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        print(f"error: {error.strerror or error}: {error.filename or 'no file name'}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted: run the same command again; training and sampling go on", file=sys.stderr)
        sys.exit(130)
