"""Owns searches by TVM's MetaSchedule: asked for traces, told what became of them, kept in a database that stock TVM opens.

Knows nothing of how candidates are built, verified or timed, or of what else competes.

What makes MetaSchedule usable here, on 2 cores of an EPYC in November 2026: of TVM's intrinsics only those of the device are registered
(10 s); the XGBoost model has one thread, since its many short loops spend their time in barriers otherwise (12 s for a model of 32
trials, 0.5 s so), and learns from the first batch on instead of after 100 trials; nothing is built or run by TVM, whose
builder starts its processes again for every batch and whose runner checks no result.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tvm
from tvm.s_tir import meta_schedule as ms

from kerneldecl.compiler.actions import lowered
from kerneldecl.compiler.cpu import normalized, target_of
from kerneldecl.compiler.intrinsics.standard import register_intrinsics
from kerneldecl.errors import TuningError
from kerneldecl.model import Arch, Candidate, Proposal, Trial
from kerneldecl.policies.shared.search_space import SearchSpace
from kerneldecl.store.keys import device_fields, digest

BATCH = 32
"""Traces of one generation: each generation costs seconds, whatever it gives."""
IMPORTED = 16
"""Records of another database that are tried first, the fastest ones."""
FAILED_SECS = 1e10
"""How MetaSchedule records a candidate that failed."""
EMPTY_GENERATIONS = 4
"""Generations in a row that give nothing new, after which the search is over."""


def ask(
    search: SearchSpace, options: Any, trials: Sequence[Trial], *, spec: Mapping[str, Any], is_over: bool = False
) -> tuple[Proposal, ...]:
    """Return the next traces, given all trials so far; nothing where evolution finds no more, or the search is over and is only told."""
    arch = search.arch
    key = json.dumps([dict(spec), repr(options), repr(device_fields(arch))], sort_keys=True, default=str)
    if key not in _SEARCHES:
        _SEARCHES.clear()
        _SEARCHES[key] = Search(spec, arch, options)
    found = _SEARCHES[key]
    found.tell(trials)
    if is_over:
        return ()
    return tuple(Proposal(candidate, 0.0) for candidate in found.next({trial.candidate for trial in trials}))


_SEARCHES: dict[str, Search] = {}
"""The search of the entry that is tuned now. One that is lost with its process is made again of its database."""


class Search:
    """MetaSchedule's search of one function on one arch."""

    def __init__(self, spec: Mapping[str, Any], arch: Arch, options: Any) -> None:
        register_intrinsics(arch.kind)
        self._mod = normalized(lowered(spec)["main"])
        self._target, self._seed = target_of(arch), options.seed
        self._database = _opened(_folder(spec, arch))
        self._workload = self._database.commit_workload(self._mod)
        self._model = _cost_model(options.cost_model)
        self._context = ms.TuneContext(
            self._mod,
            target=self._target,
            space_generator=ms.space_generator.PostOrderApply(),
            search_strategy=ms.search_strategy.EvolutionarySearch(
                population_size=options.population, init_min_unmeasured=min(50, options.population // 2)
            ),
            rand_state=options.seed + 1,  # TVM takes none below 1
            num_threads=os.cpu_count() or 1,
        )
        self._context.pre_tuning(1 << 30, BATCH, None, self._database, self._model)
        self._pending: dict[Candidate, Any] = {}
        """What TVM knows of each candidate that it has proposed and was not told of."""
        self._waiting: list[Any] = []
        """The batch that TVM waits for."""
        before = self._recorded(self._database)
        self._recorded_before = list(before)
        self._told = set(before)
        if before:
            self._learn([(record, _secs_of(record)) for record in before.values()])
        if options.database:
            self._recorded_before += list(self._recorded(_imported(Path(spec["cache"]).parent / options.database)))[:IMPORTED]

    def tell(self, trials: Sequence[Trial]) -> None:
        """Note what became of traces, in the database and in the model; those that are known stay as they are."""
        new = {t.candidate: t for t in trials if t.candidate.template == "trace" and t.candidate not in self._told}
        found = [(self._pending.pop(candidate, None) or self._replayed(candidate), trial) for candidate, trial in new.items()]
        self._told |= new.keys()
        known = [(known, trial.run_secs if trial.samples else FAILED_SECS) for known, trial in found if known is not None]
        for measured, secs in known:
            trace, shapes = measured.sch.trace, measured.args_info
            self._database.commit_tuning_record(ms.database.TuningRecord(trace, self._workload, [secs], self._target, shapes))
        if known:
            self._model.update(self._context, *_results(known))

    def next(self, tried: set[Candidate]) -> list[Candidate]:
        """Return what the databases hold and nobody has tried here, then a generation; nothing where several give nothing new."""
        self._recorded_before, again = [], [each for each in self._recorded_before if each not in tried]
        if again:
            return again
        for _ in range(EMPTY_GENERATIONS):
            if self._waiting:
                self._context.notify_runner_results(*_results([(each, FAILED_SECS) for each in self._waiting]))
            self._waiting = list(self._context.generate_measure_candidates() or ())
            bred = dict(zip(self._candidates([each.sch.trace for each in self._waiting]), self._waiting, strict=True))
            if fresh := {candidate: each for candidate, each in bred.items() if candidate not in self._told and candidate not in tried}:
                self._pending |= fresh
                return list(fresh)
        return []

    def _learn(self, known: Sequence[tuple[Any, float]]) -> None:
        self._model.update(self._context, *_results([(record.as_measure_candidate(), secs) for record, secs in known]))

    def _replayed(self, candidate: Candidate) -> Any:
        """Return what TVM must know of a trace that another process has proposed; None where it does not apply any more."""
        sch = tvm.s_tir.Schedule(self._mod)
        try:
            tvm.s_tir.schedule.Trace.apply_json_to_schedule(json.loads(str(dict(candidate.params)["trace"])), sch)
        except (RuntimeError, ValueError):
            return None
        return ms.search_strategy.MeasureCandidate(sch, ms.arg_info.ArgInfo.from_entry_func(self._mod))

    def _recorded(self, database: Any) -> dict[Candidate, Any]:
        """Return the records that a database has of the function, the fastest first."""
        if not database.has_workload(self._mod):
            return {}
        records = list(database.get_top_k(database.commit_workload(self._mod), 1 << 20))
        return dict(zip(self._candidates([record.trace for record in records]), records, strict=True))

    def _candidates(self, traces: Sequence[Any]) -> Iterator[Candidate]:
        """Yield traces as candidates. TVM's own writer can serialise index maps; its Python interface cannot."""
        with tempfile.TemporaryDirectory() as folder:
            database = ms.database.JSONDatabase(work_dir=folder)
            workload = database.commit_workload(self._mod)
            shapes = ms.arg_info.ArgInfo.from_entry_func(self._mod)
            for trace in traces:
                database.commit_tuning_record(ms.database.TuningRecord(trace, workload, [1.0], self._target, shapes))
            lines = (Path(folder) / "database_tuning_record.json").read_text(encoding="utf-8").splitlines()
        for line in lines:
            _, (trace, *_) = json.loads(line)
            yield Candidate.of("trace", {"trace": json.dumps(trace, separators=(",", ":"))})


def _folder(spec: Mapping[str, Any], arch: Arch) -> Path:
    """Return where the database of a function lies: traces hold for one function, times for one device."""
    place = digest(f"{tvm.__version__} {sorted(device_fields(arch).items())}".encode())[:8]
    return Path(spec["cache"]) / "metaschedule" / f"{spec['computation'][:20]}-{place}"


def _imported(folder: Path) -> Any:
    """Return the database that the user names; raise TuningError where there is none, or TVM cannot read it."""
    for name in ("database_workload.json", "database_tuning_record.json"):
        if not (folder / name).is_file():
            raise TuningError(f"{folder} is no MetaSchedule database: it has no {name}")
    return _opened(folder)


def _opened(folder: Path) -> Any:
    """Return the database in a folder, which is made if need be; raise TuningError where TVM cannot read it."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return ms.database.JSONDatabase(work_dir=str(folder))
    except (RuntimeError, ValueError, TypeError) as error:
        why = str(error).strip().splitlines()[-1:]
        raise TuningError(f"TVM cannot read the database in {folder}: {''.join(why)[:200]}; remove the folder to begin anew") from None


def _cost_model(name: str) -> Any:
    """Return TVM's cost model; raise TuningError where what it needs is not installed."""
    try:
        if name == "random":
            return ms.cost_model.RandomModel()
        import xgboost  # noqa: F401  TVM imports it after the first batch only

        return ms.cost_model.XGBModel(num_warmup_samples=BATCH // 2, num_tuning_cores=1, early_stopping_rounds=20, verbose_eval=0)
    except ModuleNotFoundError as error:
        raise TuningError(f"policy metaschedule needs {error.name}: pip install 'kerneldecl[search]'") from None


def _secs_of(record: Any) -> float:
    return min((float(secs) for secs in record.run_secs or ()), default=FAILED_SECS)


def _results(known: Sequence[tuple[Any, float]]) -> tuple[list[Any], list[Any]]:
    """Return candidates and their results as TVM takes them."""
    failed = [secs >= FAILED_SECS for _, secs in known]
    results = [
        ms.runner.RunnerResult(None, "failed") if is_failed else ms.runner.RunnerResult([secs], None)
        for (_, secs), is_failed in zip(known, failed, strict=True)
    ]
    return [candidate for candidate, _ in known], results
