"""The parts of ``make bench-gpu``: what each measures, with which engine, in which order.

Decides order (what needs no compiled kernels while those are compiled, then what the goals need),
times and pools. How things are measured the modules beside this one decide. Called by
``__main__``.
"""

from collections.abc import Callable, Mapping, Sequence
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
from benchmarks.gpu.operators import time_attention, time_products, time_sampler
from benchmarks.gpu.parts import Budget, Part, Record
from benchmarks.gpu.passes import Timed, compare_with_eager, time_passes
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.transport import time_transport
from benchmarks.iterations import Iteration
from sangam_loadtest.costs.gpus import Gpu
from sangam_worker.models.config import model_config

Measure = Callable[[str, Record, Budget], None]
"""Measures one model."""


class Bench:
    """The parts; later ones read what earlier ones found.

    Args:
        models: the first one, a LLaDA, is the one for which one is enough.
        tests: pytest's arguments, for what needs no FlashInfer kernel and for all else.
        kernels: attention backends that are set beside each other.
        found: the parts that were run, by name.
        no_tests: why the tests are left out, if they are.
    """

    def __init__(
        self,
        place: Place,
        models: Sequence[str],
        sizes: Sizes,
        tests: Sequence[Sequence[str]],
        kernels: Sequence[str],
        found: Mapping[str, Record],
        no_tests: str = "",
    ) -> None:
        self._place, self._models, self._sizes = place, models, sizes
        self._tests, self._kernels = tests, kernels
        self._found, self._no_tests = found, no_tests
        self._held: Timed | None = None

    def parts(self) -> list[Part]:
        """Every part, the most important first; what shares an engine in a row."""
        first, *others = self._models
        early, late = (partial(run_tests, arguments=each) for each in self._tests)
        left_out = self._no_tests
        return [
            Part("ceilings", self._measure_ceilings, most_seconds=20),
            Part("correctness without FlashInfer", early, most_seconds=150, left_out=left_out),
            *self._of_models("sampler", self._sampler, 20, needs_kernels=False),
            *self._of_models("products", self._products, 30, needs_kernels=False),
            Part("correctness with FlashInfer", late, True, 5, 100, left_out),
            self._of_model("decodes", self._decodes, first, 45),
            self._of_model("cpu gap", self._gap, first, 20),
            self._of_model("batch 1 step", self._steps, first, 40),
            self._of_model("breakdown", self._breakdown, first, 20),
            self._of_model("transport", self._transport, first, 30),
            self._of_model("prefills", self._eager, first, 50),
            *(
                part
                for model in others
                for part in (
                    self._of_model("decodes", self._decodes, model, 45),
                    self._of_model("breakdown", self._breakdown, model, 20),
                    self._of_model("prefills", self._eager, model, 50),
                )
            ),
            *self._of_models("fp8", self._fp8, 40),
            *self._of_models("attention", self._attention, 20),
        ]

    def _of_models(
        self, name: str, measure: Measure, seconds: float, *, needs_kernels: bool = True
    ) -> list[Part]:
        return [
            self._of_model(name, measure, model, seconds, needs_kernels=needs_kernels)
            for model in self._models
        ]

    def _of_model(
        self, name: str, measure: Measure, model: str, seconds: float, *, needs_kernels: bool = True
    ) -> Part:
        run = partial(measure, model)
        return Part(f"{name} {name_of(model)}", run, needs_kernels, seconds / 4, seconds)

    @property
    def _gpu(self) -> Gpu:
        """Floors need ceilings: without them a part fails, and says so."""
        if "ceilings" not in self._found:
            raise LookupError("the ceilings were not measured, so there is no floor")
        return gpu_of(self._found["ceilings"]["found"])

    def _measure_ceilings(self, record: Record, budget: Budget) -> None:
        measure_ceilings(record, self._place.torch_device, self._sizes)

    def _sampler(self, model: str, record: Record, budget: Budget) -> None:
        device, rows = self._place.torch_device, self._sizes.sampler_rows
        time_sampler(record, name_of(model), model_config(model), rows, device, self._gpu)

    def _products(self, model: str, record: Record, budget: Budget) -> None:
        shape, device = self._place.shape(model), self._place.torch_device
        time_products(record, budget, name_of(model), shape, self._sizes.product_rows, device)

    def _decodes(self, model: str, record: Record, budget: Budget) -> None:
        timed, iterations = self._graphs(model), self._sizes.graph_iterations
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
        tokens = self._sizes.transfer_tokens
        time_transport(record, budget, self._graphs(model), tokens, self._sizes.max_ctas)

    def _breakdown(self, model: str, record: Record, budget: Budget) -> None:
        iterations = self._sizes.breakdown_iterations
        profile_passes(record, budget, self._graphs(model), iterations, self._gpu)

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
            self._kernels,
            self._place.torch_device,
            self._place.torch_dtype,
        )

    def _graphs(self, model: str) -> Timed:
        """An engine with a graph for every size that is measured, kept until another one is."""
        if self._held is None or self._held.name != name_of(model):
            self._held = None
            pages = max(_pages(self._sizes.graph_iterations), self._sizes.transfer_pages)
            self._held = load_graphs(self._place, model, pages, self._sizes.blocks)
        return self._held


def _pages(iterations: Sequence[Iteration]) -> int:
    return max(each.num_pages for each in iterations)
