"""The parts of ``make bench-gpu-serving``: single requests, the plain loop, rising rates, ratios.

Decides what is served (the trace, its mask buffer, its commits), with which pool, and what the two
sides are compared at. Called by ``command``.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from random import Random
from statistics import mean

import numpy as np
import torch

from benchmarks.contenders import dense_model
from benchmarks.gpu.engines import Place, load_graphs
from benchmarks.gpu.kernels import OF_MODELS
from benchmarks.gpu.parts import Budget, Part, Record, say
from benchmarks.gpu.passes import Timed
from benchmarks.gpu.serving.batch_one import Point, ServiceTime, Work, curve, rate_at
from benchmarks.gpu.serving.forced_commits import ForcedCommits
from benchmarks.gpu.serving.open_loop import Driver, Layout
from benchmarks.gpu.serving.plain_loop import block_times, service_seconds
from benchmarks.gpu.serving.rates import Window, Worker, at_rate, climb, mixture
from benchmarks.workloads import BLOCK_LENGTH
from sangam_loadtest.simulator.commits import CommitCounts
from sangam_loadtest.traces.request import TraceRequest
from sangam_loadtest.traces.synthetic import SYNTHETIC_TRACES, synthetic_requests
from sangam_worker.graphs.buckets import MOST_BLOCKS, buckets_up_to
from sangam_worker.interpreter import favour_gpu_thread
from sangam_worker.loop import Executes
from sangam_worker.models.config import model_config
from sangam_worker.sizing import bytes_per_page

BATCHED, ONE, PLAIN = "batched", "batch 1, same engine", "batch 1, plain PyTorch loop"

_MULTIPLES = (2.0, 3.0, 5.0)
"""Mean latencies at which rates are compared, in units of a lone request's."""

_NUM_QUEUED = 5000
"""Requests of the trace that the queues at batch 1 are simulated with."""

_FIRST_LOAD = 1.5
"""Of what one request after the other could do: there batching begins to pay."""

_CURVE_SHARES = np.linspace(0.04, 0.98, 48)
_LEFT_FREE_BYTES = 20 * 2**30
"""For graphs, activations and what nobody counts."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is served.

    Attributes:
        mask_buffer_tokens: L of every request; 0: what each answer needs.
        max_prompt, max_output: longer requests of the trace are left out.
        num_single: requests that are measured one at a time.
        total_pages: of the pool; 0: what the GPU has room for. max_runs: rates tried at most.
    """

    model: str
    trace: str
    mask_buffer_tokens: int
    max_prompt: int
    max_output: int
    tau_tokens: int
    num_single: int
    total_pages: int
    max_runs: int
    window: Window


class Figure8:
    """The parts; later ones read what earlier ones found.

    Args:
        found: the parts that were run, by name.
        attends: the place with the attention that can be had by now.
    """

    def __init__(
        self,
        place: Place,
        options: Options,
        counts: CommitCounts,
        found: Mapping[str, Record],
        attends: Callable[[Place], Place] = lambda place: place,
    ) -> None:
        self._given_place, self._options, self._counts = place, options, counts
        self._found, self._attends = found, attends

    def parts(self) -> list[Part]:
        """Every part, in order."""
        return [
            Part("plain loop", self._measure_plain_loop, OF_MODELS, 10, 40),
            Part("single requests", self._measure_single, OF_MODELS, 10, 110),
            Part("rates", self._measure_rates, OF_MODELS, 20, 1000),
            Part("figure 8", self._compare),
        ]

    @property
    def _place(self) -> Place:
        return self._attends(self._given_place)

    # -- the parts ----------------------------------------------------------------------------

    def _measure_plain_loop(self, record: Record, budget: Budget) -> None:
        """Block times of the plain loop at the trace's shortest, middle and longest sequences."""
        totals = sorted(work.total_tokens for work in self._works)
        lengths = sorted({totals[0], totals[len(totals) // 2], totals[-1]})
        num_passes = round(mean(work.num_passes / work.num_blocks for work in self._works))
        dense = dense_model(self._options.model, self._place.torch_dtype, self._place.device)
        record |= {"num_passes": num_passes}
        record["block_seconds"] = block_times(dense, lengths, num_passes)

    def _measure_single(self, record: Record, budget: Budget) -> None:
        """Requests one after the other: what one takes follows from its blocks and passes."""

        def served(count: int) -> Driver:
            asked = enumerate(mixture(self._trace, count, np.random.default_rng(0)))
            requests = [self._layout.request(index, 0.0, each) for index, each in asked]
            return self._worker.serve(requests, 1, lambda driver: budget.left_seconds <= 0)

        served(1)  # what is done once (compiling, growing) is nobody's time
        driver = served(self._options.num_single)
        works = [
            Work(each.num_blocks, each.geometry.total_tokens, each.num_passes)
            for each in driver.finished
        ]
        seconds = [each.service_seconds or 0.0 for each in driver.finished]
        fitted = ServiceTime.fitted(works, seconds)
        record |= {
            "num_requests": len(works),
            "mean_seconds": mean(seconds),
            "tokens_per_second": driver.num_tokens / driver.elapsed_seconds,
            "fit": asdict(fitted),
        }
        say(f"         {len(works)} requests, mean {mean(seconds):.3f} s, {fitted}")

    def _measure_rates(self, record: Record, budget: Budget) -> None:
        lone = float(self._lone_seconds.mean())
        window = self._options.window.fitting(budget.left_seconds)
        record["window_seconds"] = str(window)
        points = record.setdefault("lines", [])

        def run(rate: float) -> Point:
            return at_rate(self._worker, self._trace, rate, window)

        enough = 1.2 * _MULTIPLES[-1] * lone
        runs = climb(_FIRST_LOAD / lone, run, budget, window.longest_seconds, enough)
        for point in islice(runs, self._options.max_runs):
            points.append(asdict(point))
            say(f"         {len(points)} rates")

    def _compare(self, record: Record, budget: Budget) -> None:
        """Curves of all sides, and the ratio of their rates at equal mean latencies."""
        lone = self._lone_seconds
        measured = [Point(**line) for line in self._of("rates").get("lines", ())]
        curves = {BATCHED: measured, ONE: curve(lone, _CURVE_SHARES / lone.mean())}
        if blocks := self._of("plain loop").get("block_seconds"):
            plain = service_seconds(blocks, self._works)
            curves[PLAIN] = curve(plain, _CURVE_SHARES / plain.mean())
        record["lines"] = [*_ratios(curves, float(lone.mean()))]
        record["curves"] = {
            name: [asdict(point) for point in points] for name, points in curves.items()
        }
        if not measured:
            raise LookupError("no rate was served")

    # -- what they share -----------------------------------------------------------------------

    @cached_property
    def _layout(self) -> Layout:
        buffer = self._options.mask_buffer_tokens or None
        return Layout(model_config(self._options.model), BLOCK_LENGTH, buffer)

    @cached_property
    def _trace(self) -> list[TraceRequest]:
        options = self._options
        offered = synthetic_requests(SYNTHETIC_TRACES[options.trace], seed=0)
        fitting = (
            each
            for each in offered
            if each.prompt_tokens <= options.max_prompt and each.output_tokens <= options.max_output
        )
        return list(islice(fitting, _NUM_QUEUED))

    @cached_property
    def _works(self) -> list[Work]:
        """What each request of the trace asks of batch-1 serving, its passes drawn."""
        random, found = Random(1), []
        for asked in self._trace:
            num_blocks = self._layout.num_blocks(asked)
            drawn = (self._counts.draw(random, BLOCK_LENGTH, block) for block in range(num_blocks))
            total_tokens = self._layout.geometry(asked).total_tokens
            found.append(Work(num_blocks, total_tokens, sum(map(len, drawn))))
        return found

    @property
    def _lone_seconds(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Of each request at batch 1, nobody before it."""
        if (fit := self._of("single requests").get("fit")) is None:
            raise LookupError("no single request was measured")
        return ServiceTime(**fit).seconds(self._works)

    def _of(self, part: str) -> Record:
        """What a part found, nothing where it did not run."""
        found: Record = self._found.get(part, {}).get("found", {})
        return found

    @cached_property
    def _worker(self) -> Worker:
        timed = self._loaded()
        favour_gpu_thread()  # as a worker's process does
        config = timed.engine.model_config
        special = (config.mask_id, *config.eos_ids)
        token = next(each for each in range(config.vocab_size) if each not in special)

        def make_engine(seed: int) -> Executes:
            return ForcedCommits(timed.engine, self._counts, token, seed)

        pages = timed.engine.kv_pool.total_pages
        return Worker(make_engine, self._layout, pages, self._options.tau_tokens)

    def _loaded(self) -> Timed:
        pages = self._options.total_pages or self._fitting_pages
        return load_graphs(self._place, self._options.model, pages, buckets_up_to(MOST_BLOCKS))

    def _fitting_pages(self) -> int:
        """Asked for when the weights are on the device."""
        config = model_config(self._options.model)
        free, _ = torch.cuda.mem_get_info(self._place.torch_device)
        return int(free - _LEFT_FREE_BYTES) // bytes_per_page(config, self._place.dtype)


def _ratios(curves: dict[str, list[Point]], lone_seconds: float) -> Iterator[dict[str, object]]:
    """A line for each mean latency: every side's rate, and batching's over the others'.

    At a rate of nothing a request is alone on either side. Between two points the straight line
    lies above a curve that bends upwards: it gives batching too low a rate rather than too high.
    """
    nobody = Point(0.0, lone_seconds, lone_seconds, 0)
    curves = curves | {BATCHED: [nobody, *curves[BATCHED]]}
    for multiple in _MULTIPLES:
        seconds = multiple * lone_seconds
        rates = {name: rate_at(points, seconds) for name, points in curves.items()}
        line: dict[str, object] = {"times_lone": multiple, "mean_seconds": seconds, **rates}
        for name in (ONE, PLAIN):
            batched, other = rates[BATCHED], rates.get(name)
            line[f"ratio to {name}"] = batched / other if batched and other else None
        yield line
