"""
Launch tables of the Triton kernels for the GPU at hand: ``python -m kvzip_press.kernels.bench.autotune``.

Tries configurations for one head size and type, compares each one's output with the torch form, times it, and prints
lines to paste into ``triton_config.py``. That table is fixed on purpose: nothing is tuned on a user's machine.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from ..api import decode_attention, replay_attention
from ..backends import REGISTRY
from ..storage.quantization import PackedKeys, PackedValues, quantize_keys, quantize_values
from .case import Shape, Variant, dtype_name, randn
from .decode import decode_input
from .scores import replay_input, row_lse, score_pass
from .timing import CudaTimer, Timer, interleave, percentiles
from .verify import LSE, verify_results

KERNELS = ("decode", "int8", "int4", "attention", "scores")
_DTYPES = ("bfloat16", "float16", "float32")
_BITS = {"int8": 8, "int4": 4}
_CHUNK = 2048
_FINALISTS = 6
_FIRST_ROUNDS, _LAST_ROUNDS = 5, 30


@dataclass(frozen=True)
class Tuning:
    """
    One entry of a table.

    Parameters
    ----------
    name : str
        What it is for.
    current : DecodeConfig or ReplayConfig
        What the table holds now.
    candidates : Sequence[DecodeConfig or ReplayConfig]
        What to try besides.
    make_run : callable
        Makes the function that runs a configuration, whose results are compared and whose time counts.
    expected : dict[str, torch.Tensor]
        The right results by name.
    dtype : torch.dtype
        Decides the tolerance.
    entry : callable
        The line of the table with a configuration.
    """

    name: str
    current: Any
    candidates: Sequence[Any]
    make_run: Callable[[Any], Callable[[], Any]]
    expected: dict[str, torch.Tensor]
    dtype: torch.dtype
    entry: Callable[[Any], str]


def candidates(
    current: Any,
    blocks_m: Iterable[int],
    blocks_n: Iterable[int],
    warps: Iterable[int],
    stages: Iterable[int],
    blocks_per_sm: Iterable[int],
) -> list[Any]:
    """Every combination of these values but ``current`` itself."""
    names = ("block_m", "block_n", "num_warps", "num_stages", "blocks_per_sm")
    grid = itertools.product(blocks_m, blocks_n, warps, stages, blocks_per_sm)
    configs = [replace(current, **dict(zip(names, values, strict=True))) for values in grid]
    return [config for config in configs if config != current]


def tune(tuning: Tuning, timer: Timer, stage: Callable[[str], Any]) -> tuple[Any, dict[Any, float]]:
    """
    Find the fastest configuration of one entry.

    Configurations that can't be launched here (too much shared memory, too many registers) or give wrong results are
    left out with a message, unless it is the one that the table holds: then the error is raised.

    Parameters
    ----------
    tuning : Tuning
        The entry.
    timer : Timer
        Takes the samples.
    stage : callable
        Told what is tried.

    Returns
    -------
    tuple
        The fastest configuration, and the median milliseconds of all that were in the last rounds.
    """
    first: dict[Any, float] = {}
    runs = {}
    for config in (tuning.current, *tuning.candidates):
        stage(f"{tuning.name}: {config}")
        run = tuning.make_run(config)
        try:
            verify_results(f"{tuning.name}, {config}", run(), tuning.expected, tuning.dtype)
        except Exception as error:  # what a launch or a compilation raises differs between versions of triton
            if config == tuning.current:
                raise
            reason = " ".join(str(error).split())[:200]
            tqdm.write(f"left out: {config}: {type(error).__name__}: {reason}", file=sys.stderr)
            continue
        runs[config] = run
        first[config] = percentiles([timer.sample(run) for _ in range(_FIRST_ROUNDS)])[1]
    finalists = sorted(first, key=lambda config: first[config])[:_FINALISTS]
    if tuning.current not in finalists:
        finalists.append(tuning.current)
    variants = [Variant(str(config), runs[config]) for config in finalists]
    samples = interleave(variants, timer, _LAST_ROUNDS, 1, stage)
    times = {config: percentiles(samples[str(config)])[1] for config in finalists}
    return min(times, key=lambda config: times[config]), times


def tunings(
    kernels: Sequence[str], shape: Shape, context: int, dtype: torch.dtype, device: torch.device
) -> Iterator[Tuning]:
    """
    Entries of the tables that serve this head size and type on this device.

    Parameters
    ----------
    kernels : Sequence[str]
        Of :data:`KERNELS`.
    shape : Shape
        Heads.
    context : int
        Length that decoding is timed at, with 30 % kept; the replay's chunk is as long, up to 2048.
    dtype, device
        Of the queries.
    """
    for kernel in kernels:
        if kernel in ("attention", "scores"):
            yield _replay_tuning(kernel, shape, min(context, _CHUNK), dtype, device)
        else:
            yield from _decode_tunings(kernel, shape, context, dtype, device)


def _decode_tunings(
    kernel: str, shape: Shape, context: int, dtype: torch.dtype, device: torch.device
) -> Iterator[Tuning]:
    from ..decode import triton as triton_decode
    from ..triton_config import architecture, decode_configs, decode_kind

    kind = decode_kind(dtype) if kernel == "decode" else kernel
    arch, table = architecture(device), decode_configs()
    size = min(size for name, size, _, _ in table if name == kind and size >= shape.head_dim)
    tiles = sorted(rows for name, dim, rows, of in table if (name, dim, of) == (kind, size, arch))
    data = decode_input(shape, context, dtype, device)
    key: PackedKeys = data.kept_key
    value: PackedValues = data.kept_value
    if kernel in _BITS:
        key = quantize_keys(data.kept_key, data.segments, _BITS[kernel])
        value = quantize_values(data.kept_value, _BITS[kernel])
    for rows in tiles:
        # The lowest tile is that of one token; the others are filled by the tokens of a question
        q_len = 1 if rows == tiles[0] else max(1, rows // shape.group)
        query = randn((1, shape.num_heads, q_len, shape.head_dim), dtype, device, seed=3)
        call = partial(triton_decode.decode_attention, query, key, value, data.segments, softmax_scale=data.scale)
        right = decode_attention(query.float(), key, value, data.segments, softmax_scale=data.scale, backend="torch")
        current = table[kind, size, rows, arch]
        # A key block's scales hold for one tile
        blocks_n = (64,) if kernel in _BITS else (16, 32, 64, 128)
        yield Tuning(
            name=f"{kernel}, {rows} rows",
            current=current,
            candidates=candidates(current, (rows,), blocks_n, (2, 4, 8), (2, 3, 4), (1, 2, 3, 4, 6, 8)),
            make_run=partial(_with_config, call),
            expected=dict(zip(("the output", LSE), right, strict=True)),
            dtype=torch.bfloat16 if kernel in _BITS else dtype,  # codes are multiplied in 16 bits
            entry=partial(table_line, (kind, size, rows), table, arch, skip=1),
        )


def _with_config(call: Callable[..., Any], config: Any) -> Callable[[], Any]:
    return partial(call, config=config)


def _replay_tuning(kernel: str, shape: Shape, chunk: int, dtype: torch.dtype, device: torch.device) -> Tuning:
    from ..replay import triton as triton_replay
    from ..triton_config import REPLAY_CONFIGS, architecture, decode_kind

    data = replay_input(shape, chunk, dtype, device)
    states = (data.query, data.own_key, data.own_value, data.context_key, data.context_value)
    wide = [part.float() for part in states]
    out, scores = replay_attention(*wide, local=True, backend="torch", **data.options)
    kind, arch, table = decode_kind(dtype), architecture(device), dict(REPLAY_CONFIGS)
    size = min(size for name, _, size, _ in table if name == kernel and size >= shape.head_dim)
    key = (kernel, kind, size)
    expected = {"the output": out, "the scores": scores}
    run: Callable[[], Any] = partial(triton_replay.replay_attention, *states, local=True, **data.options)
    if kernel == "scores":
        expected = {"the scores": scores}
        run = partial(score_pass, data, row_lse(data))
    blocks = (32, 64, 128)
    return Tuning(
        name=f"replay {kernel}",
        current=table[(*key, arch)],
        candidates=candidates(
            table[(*key, arch)], blocks, blocks, (4, 8), (2, 3, 4), (1,) if kernel == "attention" else (1, 2, 3)
        ),
        make_run=partial(_with_replay_entry, (*key, arch), run),
        expected=expected,
        dtype=dtype,
        entry=partial(table_line, key, table, arch),
    )


def _with_replay_entry(key: tuple[str, str, int, int], run: Callable[[], Any], config: Any) -> Callable[[], Any]:
    """``run`` with another configuration in the table of the replay's kernels, which look it up at every launch."""
    from ..triton_config import REPLAY_CONFIGS

    def call() -> Any:
        before = REPLAY_CONFIGS[key]
        REPLAY_CONFIGS[key] = config
        try:
            return run()
        finally:
            REPLAY_CONFIGS[key] = before

    return call


def table_line(key: tuple, table: Mapping[tuple, Any], arch: int, best: Any, skip: int = 0) -> str:
    """
    The line of ``triton_config.py`` that holds ``best`` for one architecture and what it held for the others.

    Parameters
    ----------
    key : tuple
        Of the line.
    table : Mapping[tuple, DecodeConfig or ReplayConfig]
        All configurations, by key and architecture.
    arch : int
        Whose configuration is replaced.
    best : DecodeConfig or ReplayConfig
        The new one.
    skip : int
        Leading fields that the line leaves to its key.
    """
    from ..triton_config import ARCHITECTURES

    configs = [best if of == arch else table[(*key, of)] for of in ARCHITECTURES]
    entries = ", ".join(str(astuple(config)[skip:]) for config in configs)
    names = ", ".join(f'"{part}"' if isinstance(part, str) else str(part) for part in key)
    return f"    ({names}): ({entries}),"


def make_parser() -> argparse.ArgumentParser:
    """The options, their defaults and what they mean."""
    parser = argparse.ArgumentParser(
        prog="python -m kvzip_press.kernels.bench.autotune",
        description="Time launch configurations of the Triton kernels on the first CUDA device and print the fastest "
        "as lines of triton_config.py.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--kernel", nargs="+", choices=KERNELS, default=KERNELS, help="what to tune")
    parser.add_argument("--head-dim", type=int, default=128, help="channels of a head")
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="of the queries")
    parser.add_argument("--num-kv-heads", type=int, default=8, help="KV heads")
    parser.add_argument("--group", type=int, default=4, help="query heads of a KV head")
    parser.add_argument("--context", type=int, default=32 << 10, help="context that decoding is timed at, 30 %% kept")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Tune and print."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    sizes = ("head_dim", "num_kv_heads", "group", "context")
    small = [name for name in sizes if getattr(arguments, name) < 1]
    if small:
        parser.error(f"--{small[0].replace('_', '-')} must be at least 1, got {getattr(arguments, small[0])}")
    if not torch.cuda.is_available():
        parser.error("PyTorch sees no CUDA device: launch tables can only be tuned on the GPU they are for")
    if not REGISTRY["triton"].installed:
        parser.error('triton is not installed: run `pip install "kvzip-press[gpu]"`')
    device, dtype = torch.device("cuda:0"), getattr(torch, arguments.dtype)
    shape = Shape(arguments.num_kv_heads, arguments.group, arguments.head_dim)
    reason = REGISTRY["triton"].unsupported(device, (dtype,), shape.head_dim)
    if reason is not None:
        parser.error(f"backend 'triton' {reason}")
    print(f"{torch.cuda.get_device_name(device)}, {shape} {dtype_name(dtype)}")
    report(tunings(arguments.kernel, shape, arguments.context, dtype, device), CudaTimer.on(device))


def report(entries: Iterable[Tuning], timer: Timer) -> None:
    """Tune each entry and print its line, with what was gained."""
    for tuning in entries:
        with tqdm(desc=tuning.name, unit="step", leave=False) as bar:

            def stage(what: str, bar: Any = bar) -> None:
                bar.set_postfix_str(what)
                bar.update()

            best, times = tune(tuning, timer, stage)
        now, found = times[tuning.current], times[best]
        print(f"# {tuning.name}: {found:.4f} ms, {now / found:.2f} x as fast as {tuning.current}")
        print(tuning.entry(best), flush=True)
    print("# blocks_per_sm must stay what registers and shared memory allow: run the compile tests after pasting.")


if __name__ == "__main__":
    main()
