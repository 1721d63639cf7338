"""Opening a pretrained transformers model from this machine only: no network, no remote code, no pickle."""

import contextlib
import hashlib
import importlib
import importlib.util
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .._errors import InputError


@dataclass(frozen=True)
class Pretrained:
    """Where a model's files are, and what to call it without naming a path of this machine."""

    name: str
    argument: str  # what was passed as the model, without the folders above it
    folder: Path
    gguf: str | None  # file name in the folder

    def load_tokenizer(self) -> Any:
        """Load the tokenizer; `InputError` if there is none."""
        return self._load("AutoTokenizer", "tokenizer")

    def load_config(self) -> Any:
        """Load the configuration; `InputError` if there is none."""
        return self._load("AutoConfig", "configuration")

    def load_model(self, *, head: bool = False) -> Any:
        """Load the model in float32 and evaluation mode; a converted one comes back converted.

        **Arguments**

        - `head`: with the task head that its configuration names, such as a language model's, so that it can
          write text and be saved again; otherwise without.

        **Raises** `InputError`: no weights in safetensors or GGUF, damaged ones, or weights that lack a part
        of the model, which transformers would fill with random numbers.
        """
        # Nobody else may have imported it, and without it a converted checkpoint loads as softmax attention.
        importlib.import_module("reassoc.hf")
        how: dict[str, Any] = {} if self.gguf else {"use_safetensors": True}
        loader = "AutoModel"
        if head:
            named = getattr(self.load_config(), "architectures", None) or ["AutoModel"]
            # A GGUF file holds a language model, and its configuration may not say so.
            loader = "AutoModelForCausalLM" if self.gguf else named[0]
            if not hasattr(import_transformers(), loader):
                raise InputError(f"{self.name}: config.json names {loader!r}, unknown to transformers")
            if self.gguf:  # weights as stored cannot be saved in another format
                how["quantization_config"] = import_transformers().GgufConfig(dequantize=True)
        model, report = self._load(loader, "model", dtype=torch.float32, output_loading_info=True, **how)
        # A checkpoint of a task model has no pooler; nothing that attention sees depends on one.
        missing = sorted(key for key in report["missing_keys"] if "pooler" not in key)
        if missing:
            raise InputError(
                f"{self.name}: the weights lack {len(missing)} tensors of the model, first {missing[0]!r}; "
                "expected a complete checkpoint"
            )
        return model.eval()

    def sha256(self) -> dict[str, str]:
        """Return the SHA-256 of each file that decides the result: configuration, tokenizer and weights."""
        names = [self.gguf] if self.gguf else ["config.json", "tokenizer.json"]
        paths = [self.folder / name for name in names if (self.folder / name).is_file()]
        paths += [] if self.gguf else sorted(self.folder.glob("*.safetensors"))
        return {path.name: file_sha256(path) for path in paths}

    def _load(self, loader: str, what: str, **options: Any) -> Any:
        if self.gguf:
            options["gguf_file"] = self.gguf
        try:
            with quiet_and_offline():
                return getattr(import_transformers(), loader).from_pretrained(
                    str(self.folder), local_files_only=True, trust_remote_code=False, **options
                )
        except MemoryError:
            raise
        except Exception as error:  # whatever a foreign loader finds wrong with the user's files
            reason = " ".join(str(error).split())
            raise InputError(
                f"{self.name}: cannot load the {what} ({type(error).__name__}: {reason:.300}); expected a "
                "folder saved by save_pretrained with safetensors weights and a tokenizer, or a GGUF file"
            ) from error


def find_pretrained(model: str | os.PathLike[str], gguf: str | None) -> Pretrained:
    """Find a model's files.

    **Arguments**

    - `model`: a folder, or a name that an earlier download left in the Hugging Face cache.
    - `gguf`: name of a GGUF file in that folder.

    **Raises** `InputError`: no such folder or file, or a package that is needed is not installed.
    """
    folder = Path(model)
    name = folder.resolve().name
    import_transformers()
    if not folder.is_dir():
        if folder.exists():
            raise InputError(
                f"{model}: is a file; --model takes the folder, and --gguf the name of a GGUF file in it"
            )
        hub: Any = importlib.import_module("huggingface_hub")
        try:
            folder = Path(hub.snapshot_download(str(model), local_files_only=True))
        except Exception as error:  # its own errors, and ValueError for what cannot be a name
            raise InputError(
                f"{model}: no such model folder, nor a model of this name in the local Hugging Face cache "
                "(nothing is downloaded here); expected a folder saved by save_pretrained"
            ) from error
        name = str(model)
    argument = name
    if gguf is not None:
        if Path(gguf).name != gguf or not (folder / gguf).is_file():
            found = ", ".join(sorted(path.name for path in folder.glob("*.gguf"))) or "none"
            raise InputError(f"{name}: no GGUF file {gguf!r} in the folder; found: {found}")
        for package in ("gguf", "accelerate"):
            if importlib.util.find_spec(package) is None:
                raise InputError(f"reading GGUF needs the package {package}; pip install 'reassoc[hf]'")
        name = Path(gguf).stem
    return Pretrained(name, argument, folder, gguf)


def import_transformers() -> Any:
    """Import transformers, or raise `InputError` that says how to install it.

    Imported by name, so that type checking this package does not read the whole of transformers.
    """
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise InputError("this needs the package transformers; pip install 'reassoc[hf]'") from error


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def quiet_log() -> Iterator[None]:
    """Silence transformers' log and bars of loading and saving within the block, not those of a training."""
    logging: Any = importlib.import_module("transformers.utils.logging")
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def quiet_and_offline() -> Iterator[None]:
    """Be quiet, and forbid transformers' use of the network, within the block."""
    constants: Any = importlib.import_module("huggingface_hub.constants")
    offline = constants.HF_HUB_OFFLINE
    # The environment variable is read once, at import; this is what it sets.
    constants.HF_HUB_OFFLINE = True
    try:
        # The GGUF reader draws a bar of its own that no setting turns off.
        with quiet_log(), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        constants.HF_HUB_OFFLINE = offline
