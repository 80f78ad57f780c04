"""The parts of ``make bench-gpu``: what each measures, with which engine, in which order.

Decides order (what the goals need first; what needs no compiled kernels comes forward while those
are compiled), times and pools. How things are measured the modules beside this one decide. Called
by ``command``.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from typing import Any

from benchmarks.contenders import dense_model
from benchmarks.gpu.baseline import time_steps
from benchmarks.gpu.breakdown import profile_passes
from benchmarks.gpu.ceilings import gpu_of, measure_ceilings
from benchmarks.gpu.correctness import run_tests
from benchmarks.gpu.engines import Place, free_memory, load_eager, load_graphs, name_of
from benchmarks.gpu.fp8 import time_fp8
from benchmarks.gpu.gap import measure_gap
from benchmarks.gpu.kernels import OF_MODELS, OF_TESTS
from benchmarks.gpu.operators import time_attention, time_products, time_sampler
from benchmarks.gpu.parts import Budget, Part, Record, say
from benchmarks.gpu.passes import Timed, compare_with_eager, time_passes
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.transport import time_transport
from benchmarks.iterations import BLOCK_LENGTH, Iteration
from sangam_loadtest.costs.gpus import Gpu
from sangam_worker.models.config import model_config

Measure = Callable[[str, Record, Budget], None]
"""Measures one model."""

_FA3 = "flashinfer-fa3"


class Checks(StrEnum):
    """Which of the tests a part runs, as its name says."""

    OF_MODELS = "of the models' shapes"
    WITHOUT_FLASHINFER = "without FlashInfer"
    OTHERS = "of all else"


class Bench:
    """The parts; later ones read what earlier ones found.

    Args:
        models: the first one, a LLaDA, is the one for which one is enough.
        tests: pytest's arguments, by ``Checks``' names.
        kernels: attention backends that are set beside each other.
        found: the parts that were run, by name.
        attends: the place with the attention that can be had by now.
        no_tests: why the tests are left out, if they are.
    """

    def __init__(
        self,
        place: Place,
        models: Sequence[str],
        sizes: Sizes,
        tests: Mapping[Checks, Sequence[str]],
        kernels: Sequence[str],
        found: Mapping[str, Record],
        attends: Callable[[Place], Place] = lambda place: place,
        no_tests: str = "",
    ) -> None:
        self._given_place, self._models, self._sizes = place, models, sizes
        self._tests, self._kernels = tests, kernels
        self._found, self._attends, self._no_tests = found, attends, no_tests
        self._held: Timed | None = None

    def parts(self) -> list[Part]:
        """Every part, the most important first; what shares an engine in a row."""
        first, *others = self._models
        return [
            Part("ceilings", self._measure_ceilings, most_seconds=20),
            *self._of_models("sampler", self._sampler, 15, num_waves=0),
            # Of the models' own shapes, before anything of theirs is timed.
            self._of_tests(Checks.OF_MODELS, OF_MODELS, 90),
            self._of_model("decodes", self._decodes, first, 65),
            self._of_model("cpu gap", self._gap, first, 20),
            self._of_model("batch 1 step", self._steps, first, 40),
            self._of_model("prefills", self._eager, first, 50),
            *(
                part
                for model in others
                for part in (
                    self._of_model("decodes", self._decodes, model, 65),
                    self._of_model("prefills", self._eager, model, 50),
                )
            ),
            *self._of_models("fp8", self._fp8, 45),
            # A profiler may go on costing time in a process: behind what the goals are held to.
            *self._of_models("breakdown", self._breakdown, 30),
            self._of_model("transport", self._transport, first, 30),
            *self._of_models("attention", self._attention, 20),
            *self._of_models("products", self._products, 25, num_waves=0),
            self._of_tests(Checks.WITHOUT_FLASHINFER, 0, 100),
            self._of_tests(Checks.OTHERS, OF_TESTS, 240),
        ]

    def _of_tests(self, tests: Checks, num_waves: int, seconds: float) -> Part:
        run = partial(self._run_tests, self._tests[tests])
        return Part(f"correctness {tests}", run, num_waves, 15, seconds, self._no_tests)

    def _run_tests(self, arguments: Sequence[str], record: Record, budget: Budget) -> None:
        """With the device's memory given back: some start a whole worker there."""
        self._held = None
        free_memory(self._given_place.torch_device)
        run_tests(record, budget, arguments)

    def _of_models(
        self, name: str, measure: Measure, seconds: float, *, num_waves: int = OF_MODELS
    ) -> list[Part]:
        return [
            self._of_model(name, measure, model, seconds, num_waves=num_waves)
            for model in self._models
        ]

    def _of_model(
        self, name: str, measure: Measure, model: str, seconds: float, *, num_waves: int = OF_MODELS
    ) -> Part:
        run = partial(measure, model)
        return Part(f"{name} {name_of(model)}", run, num_waves, seconds / 4, seconds)

    @property
    def _place(self) -> Place:
        return self._attends(self._given_place)

    @property
    def _gpu(self) -> Gpu:
        """What floors are made from: ceilings as far as they were measured."""
        return gpu_of(self._found.get("ceilings", {}).get("found", {}))

    def _measure_ceilings(self, record: Record, budget: Budget) -> None:
        measure_ceilings(record, self._given_place.torch_device, self._sizes)

    def _sampler(self, model: str, record: Record, budget: Budget) -> None:
        device, rows = self._place.torch_device, self._sizes.sampler_rows
        time_sampler(record, name_of(model), model_config(model), rows, device, self._gpu)

    def _products(self, model: str, record: Record, budget: Budget) -> None:
        shape, device = self._place.shape(model), self._place.torch_device
        time_products(record, budget, name_of(model), shape, self._sizes.product_rows, device)

    def _decodes(self, model: str, record: Record, budget: Budget) -> None:
        timed, iterations = self._graphs(model), self._sizes.graph_iterations
        record["chosen"] = {str(blocks): it for blocks, it in timed.engine.graph_choices.items()}
        for blocks, chosen in record["chosen"].items():
            say(f"         fastest of {blocks:>2} blocks: {chosen}")
        time_passes(record, budget, timed, iterations, self._gpu, self._sizes.num_repeats)
        compare_with_eager(record, timed, iterations[0])  # last: times are told even if it fails

    def _eager(self, model: str, record: Record, budget: Budget) -> None:
        self._held = None
        iterations = self._sizes.eager_iterations
        timed = load_eager(self._place, model, _pages(iterations))
        time_passes(record, budget, timed, iterations, self._gpu, self._sizes.num_repeats)

    def _gap(self, model: str, record: Record, budget: Budget) -> None:
        blocks, context = self._sizes.gap_blocks, self._sizes.gap_context_tokens
        measure_gap(record, budget, self._graphs(model).engine, blocks, context)

    def _steps(self, model: str, record: Record, budget: Budget) -> None:
        engine = self._graphs(model).engine
        dense = dense_model(model, self._place.torch_dtype, self._place.device)
        time_steps(record, budget, engine, dense, self._sizes.step_context_tokens)

    def _transport(self, model: str, record: Record, budget: Budget) -> None:
        self._held = None
        tokens, pages = self._sizes.transfer_tokens, self._sizes.transfer_pages
        timed = load_graphs(self._place, model, pages, ())
        time_transport(record, budget, timed, tokens, self._sizes.max_ctas)

    def _breakdown(self, model: str, record: Record, budget: Budget) -> None:
        self._held = None
        iterations = self._sizes.breakdown_iterations
        buckets = [each.decode_blocks for each in iterations if not each.prefill_tokens]
        timed = load_graphs(self._place, model, _pages(iterations), buckets)
        profile_passes(record, budget, timed, iterations, self._gpu)

    def _fp8(self, model: str, record: Record, budget: Budget) -> None:
        self._held = None
        iterations = self._sizes.fp8_iterations
        bf16 = [
            line
            for part in ("decodes", "prefills")
            for line in self._lines(f"{part} {name_of(model)}")
        ]
        time_fp8(record, budget, self._place, model, iterations, bf16, self._sizes.num_repeats)

    def _lines(self, part: str) -> list[dict[str, Any]]:
        """What a part has measured, none where it did not run."""
        lines: list[dict[str, Any]] = self._found.get(part, {}).get("found", {}).get("lines", [])
        return lines

    def _attention(self, model: str, record: Record, budget: Budget) -> None:
        self._held = None
        free_memory(self._place.torch_device)
        time_attention(
            record,
            budget,
            name_of(model),
            model_config(model),
            self._sizes.attention_iterations,
            [each for each in self._kernels if each != _FA3 or self._place == self._given_place],
            self._place.torch_device,
            self._place.torch_dtype,
        )

    def _graphs(self, model: str) -> Timed:
        """An engine with a graph for every size that is measured, kept until another one is."""
        if self._held is None or self._held.name != name_of(model):
            self._held = None
            pages = max(_pages(self._sizes.graph_iterations), self._gap_pages)
            self._held = load_graphs(self._place, model, pages, self._sizes.blocks)
        return self._held

    @property
    def _gap_pages(self) -> int:
        """The gap's blocks, which are measured alone too, and the batch 1 step's sequence."""
        blocks, context = self._sizes.gap_blocks, self._sizes.gap_context_tokens
        gap = Iteration(0, blocks, context, BLOCK_LENGTH)
        step = Iteration(0, 1, self._sizes.step_context_tokens, BLOCK_LENGTH)
        return _pages([gap, step])


def _pages(iterations: Sequence[Iteration]) -> int:
    return max(each.num_pages for each in iterations)
