"""Writing files so that a failure leaves the old one: whole file or no file."""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Replace a file in one step once its new content is complete.

    ```python
    with atomic_write("report.json") as temporary:
        temporary.write_text(text)
    ```

    **Arguments**

    - `path`: the file to create or replace. A symbolic link is followed, so the link stays.

    **Yields** a temporary path in the same folder (the same file system, which makes the replacement atomic)
    with the same suffix (some writers choose the format by it). Leaving the block normally moves it to
    `path`; leaving it by any exception, `KeyboardInterrupt` included, removes it and leaves an earlier
    `path` as it was.

    **Raises** `OSError`: the folder does not exist or is not writable, the disk is full, or `path` exists
    and is not an ordinary file (replacing a folder or a device is never what was meant).
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    replaces = target.exists()
    if replaces and not target.is_file():
        raise OSError(errno.EINVAL, "not an ordinary file", str(path))
    # The stem is cut so that the longer temporary name still fits in a folder entry.
    temporary = target.with_name(f".{target.stem[:80]}.{secrets.token_hex(6)}.tmp{target.suffix[:40]}")
    try:
        # Created here, exclusively, and with the permissions an ordinary new file gets (tempfile would give
        # 0600).
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        if replaces:
            shutil.copymode(target, temporary)
        yield temporary
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
