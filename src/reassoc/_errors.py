"""The one exception that means "the user can fix this"."""


class InputError(ValueError):
    """A user's mistake: a wrong file, option or value.

    The message is one line that names what was wrong, what was expected and what to do. The command line
    prints it without a traceback and exits with status 2; anything else that is raised is a defect of this
    library.
    """
