"""The Triton replay kernels: their results, in the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


def test_results_in_the_interpreter(tmp_path):
    """Every check of ``triton_replay_checks.py``: the interpreter must be chosen before the kernels are imported."""
    pytest.importorskip("triton", reason="the extra 'gpu' is not installed")
    checks = Path(__file__).with_name("triton_replay_checks.py")
    # Two operations that NumPy would run in many threads are smaller than starting them
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", str(checks), "--noconftest", "-q", "-p", "no:cacheprovider"]
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_tensors_on_the_cpu_are_refused():
    """Outside of the interpreter, with the backend that takes them."""
    triton_replay = pytest.importorskip("kvzip_press.kernels.replay.triton", reason="the extra 'gpu' is not installed")
    query, key = torch.zeros(1, 2, 3, 64), torch.zeros(1, 1, 3, 64)
    columns = {"anchor": 0, "start": 0, "end": 3, "softmax_scale": 1.0}
    with pytest.raises(ValueError, match="takes tensors on a GPU, got cpu; use backend='torch'"):
        triton_replay.replay_attention(query, key, key, key, key, **columns, local=True)
    with pytest.raises(ValueError, match="takes tensors on a GPU, got cpu; use backend='torch'"):
        triton_replay.replay_scores(query, key, key, **columns, reduction="logit")
