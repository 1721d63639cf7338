"""Where the original keeps most of its names: they are the package's."""

from . import *  # noqa: F403
