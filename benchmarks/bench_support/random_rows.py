"""Owns the comparison of built kernels with torch's best form of each operator, in both protocols, and why a time model expects a time.

Knows nothing of how operators are drawn or built. Runs in a process of its own (`OwnProcess`).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

from bench_support.gpu.comparison import ERRORS, Arguments, arguments_of, kernel_call
from bench_support.gpu.kernels import Built, Entry
from bench_support.own_process import first_line

from kerneldecl.model import Candidate, Gpu

Row = dict[str, Any]
OURS = "ours"


def compared(entry: Entry, built: Built, rounds: int) -> Row:
    """Return seconds by protocol and contender, and torch's best by ours; raise ValueError if the kernel is wrong."""
    from bench_support.gpu.protocols import sampled
    from bench_support.gpu.torch_baselines import baselines
    from bench_support.host_protocols import sampled as sampled_on_host

    arguments = arguments_of(entry)
    calls = {OURS: kernel_call(built, arguments.sets, arguments.outputs)}
    errors: dict[str, float] = {OURS: arguments.error(calls[OURS])}
    failures: dict[str, str] = {}
    try:
        rivals = baselines(entry.workload.rule, dict(entry.workload.attrs), arguments.sets)
    except ERRORS as error:
        rivals, failures = {}, {"baselines": first_line(error)}
    for name, call in rivals.items():
        try:
            errors[name] = arguments.error(call)
            calls[name] = call
        except ERRORS as error:
            failures[name] = first_line(error)
    if entry.arch.gpu is None:
        samples = sampled_on_host({name: functools.partial(call, 0) for name, call in calls.items()}, rounds)
    else:
        samples = sampled(_captured(calls, arguments, failures), len(arguments.sets), arguments.flush, rounds)
    return {"errors": errors, "rival_failures": failures, "samples": samples, **ratios(samples)}


def _captured(calls: Mapping[str, Any], arguments: Arguments, failures: dict[str, str]) -> dict[str, Any]:
    """Return the calls that a CUDA graph can hold, and note why others cannot; all have run before one is captured."""
    found = {OURS: calls[OURS]}
    for name, call in calls.items():
        try:
            arguments.replay(call)
            found[name] = call
        except ERRORS as error:
            failures[name] = first_line(error)
    return found


def ratios(samples: Mapping[str, Mapping[str, Sequence[float]]]) -> Row:
    """Return, by protocol, the median seconds of each contender, and torch's best by ours: above 1, ours is faster."""
    from bench_support.table import quantiles

    secs = {protocol: {name: quantiles(found)[1] for name, found in each.items()} for protocol, each in samples.items()}
    best = {protocol: min((value for name, value in each.items() if name != OURS), default=None) for protocol, each in secs.items()}
    return {"secs": secs, "ratio": {protocol: value and value / secs[protocol][OURS] for protocol, value in best.items()}}


def why(entry: Entry, policy: str, candidate: Candidate) -> str:
    """Return what the time model says of a candidate: which term binds, waves, blocks on an SM."""
    from kerneldecl.compiler import canonical
    from kerneldecl.compiler.iter_space import iter_space
    from kerneldecl.plugins.load import load_module, load_rule
    from kerneldecl.policies.gpu import time_model

    rule = load_rule(entry.root, entry.workload.rule).of(entry.root, dict(entry.workload.attrs))
    params = " ".join(f"{name}={value}" for name, value in candidate.params)
    if entry.arch.gpu is None:
        return f"{candidate.template} {params}"
    module = load_module("policies", entry.root, policy)
    works: dict[Candidate, Any] = {}

    def recorded(template: str, gpu: Gpu, timed: Any, top_k: int) -> Any:
        """Note each candidate's work on its way into the ranking."""
        kept = list(timed)
        works.update((Candidate.of(template, given), found) for given, found in kept)
        return time_model.ranked(template, gpu, kept, top_k)

    # A policy may have the candidates of another among its own.
    ranking = [each for name, each in list(sys.modules.items()) if name.startswith("kerneldecl.policies.") and hasattr(each, "ranked")]
    with contextlib.ExitStack() as stack:
        for each in {module, *ranking} - {time_model}:
            if hasattr(each, "ranked"):
                stack.enter_context(mock.patch.object(each, "ranked", recorded))
        module.propose(iter_space(canonical.lower(rule)), entry.arch, entry.workload.top_k)
    found = works.get(candidate)
    text = _of_works(entry.arch.the_gpu, found) if found else _of_tiles(entry, rule, dict(candidate.params))
    return f"{text}; {candidate.template} {params}"


def _of_works(gpu: Gpu, works: Sequence[Any]) -> str:
    from kerneldecl.policies.gpu import time_model as model

    texts = []
    for work in works:
        compute, smem, sm_l2, l2 = model._throughput_secs(gpu, work)  # noqa: SLF001  the model's own terms
        serial = work.serial_cycles / gpu.clock_hz
        latency = max(1.0, model.waves(gpu, work)) * (work.rounds * model.DRAM_LATENCY_SECS + work.barriers * model.COMBINE_SECS + serial)
        dram = work.dram_bytes / (gpu.dram_bytes_per_s * model.DRAM_SHARE)
        terms = {"compute": compute, "shared memory": smem, "an SM's L2 bandwidth": sm_l2, "L2": l2, "DRAM": dram, "latency": latency}
        name = max(terms, key=terms.__getitem__)
        resident = model.occupancy(gpu, work.threads, work.regs_per_thread, work.smem_bytes)
        share = min(resident, -(-work.blocks // gpu.sm_count)) * work.threads / gpu.max_threads_per_sm
        texts.append(
            f"{name} {terms[name] * 1e6:.3g} us (DRAM {dram * 1e6:.3g}); {work.blocks} blocks, "
            f"{model.waves(gpu, work):.2f} waves, {share:.0%} of an SM's threads"
        )
    return ", then ".join(texts)


def _of_tiles(entry: Entry, rule: Any, params: Mapping[str, Any]) -> str:
    """Return the roofline's larger term, and how tiles fill the SMs, of a GEMM or what is computed as one."""
    gpu, attrs = entry.arch.the_gpu, dict(entry.workload.attrs)
    dtype = "tfloat32" if attrs.get("precision") else attrs["dtype"]
    rate = gpu.tensor_rate(dtype) or gpu.simt_rate(dtype) or gpu.simt_rate("float32")
    terms = {"compute": rule.flops() / rate, "DRAM": rule.least_bytes() / gpu.dram_bytes_per_s}
    name = max(terms, key=terms.__getitem__)
    text = f"{name} {terms[name] * 1e6:.3g} us at least"
    if "block_m" not in params or "block_n" not in params:
        return text
    (out,) = rule.signature().outputs
    columns, rows = out.shape[-1], out.shape[-2]
    if entry.workload.rule == "conv2d":
        rows = out.shape[0] * out.shape[1] * out.shape[2]
    rows, columns = (columns, rows) if params.get("swap_ab") else (rows, columns)
    batch = max(1, attrs.get("batch", 1))
    tiles = batch * -(-rows // int(params["block_m"])) * -(-columns // int(params["block_n"])) * int(params.get("split_k", 1))
    return f"{text}; {tiles} tiles, {tiles / gpu.sm_count:.2f} waves of one a SM"
