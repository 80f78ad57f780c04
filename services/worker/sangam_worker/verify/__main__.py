"""``python -m sangam_worker.verify DIR``: are the golden cases exact?

Runs every case of a folder through scheduler and engine and prints ``N of M cases exact`` last.
With ``--teacher-forcing`` every pass starts from the golden state instead, the engine is compared
with the float32 one pass by pass, and the last line says how many differences its number format
does not explain: the check for bfloat16, FP8 and GPUs, which cannot be exact.
Exit status: 0 all as it should be, 1 it is not, 2 the folder or the engine cannot be used.
"""

import argparse
import random
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from sangam_core.counted import counted
from sangam_core.errors import ConfigurationError, SangamError
from sangam_worker.engine import Engine
from sangam_worker.models.description import ModelConfig
from sangam_worker.verify import Case, first_difference, read_cases, run_cases
from sangam_worker.verify.engines import EngineNames, forced_engine
from sangam_worker.verify.forcing import force_cases
from sangam_worker.verify.report import tally_lines

_CASES_PER_LINE = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.teacher_forcing and options.split:
        parser.error("--split moves what an engine keeps, which --teacher-forcing compares")
    try:
        cases = read_cases(options.folder)
        return (_force if options.teacher_forcing else _verify)(cases, options)
    except SangamError as error:
        sys.stderr.write(f"verify: {error}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sangam_worker.verify",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of golden cases")
    parser.add_argument(
        "--in-flight",
        type=_positive,
        metavar="N",
        help="cases at once (default 1; 8 under teacher forcing)",
    )
    parser.add_argument(
        "--split", action="store_true", help="prefill on one engine, decode on another"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the order in which cases start (default 0)"
    )
    parser.add_argument(
        "--teacher-forcing", action="store_true", help="compare pass by pass, on golden states"
    )
    engine = parser.add_argument_group("the engine that is checked")
    default = EngineNames()
    engine.add_argument("--dtype", default=default.dtype, help="float32 (default) or bfloat16")
    engine.add_argument("--device", default=default.device, help="cpu (default), cuda, cuda:1 ...")
    engine.add_argument(
        "--attention",
        default=default.attention,
        help="torch (default), flashinfer, flashinfer-fa2 or flashinfer-fa3; norms and rotations "
        "are of the same library",
    )
    engine.add_argument("--quantization", default=default.quantization, help="none (default), fp8")
    engine.add_argument(
        "--graph-block",
        type=_positive,
        default=0,
        metavar="N",
        help="run decodes of blocks of N from CUDA graphs (default: none do)",
    )
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _verify(cases: list[Case], options: argparse.Namespace) -> int:
    order = random.Random(options.seed)
    in_flight = options.in_flight or 1
    num_exact = num_done = 0
    for model, own in _by_model(cases):
        order.shuffle(own)
        pages = _pages(own, in_flight)
        engines = [_engine(model, own, options, pages) for _ in range(1 + options.split)]
        for ran in run_cases(own, *engines, in_flight=in_flight):
            num_done += 1
            difference = first_difference(ran.case, ran.output_ids, ran.forwards)
            num_exact += difference is None
            if difference is not None:
                _say(f"{ran.case.id}: {difference}")
            _say_progress(num_done, len(cases))
    _say(f"{num_exact} of {counted(len(cases), 'case')} exact")
    return 0 if num_exact == len(cases) else 1


def _force(cases: list[Case], options: argparse.Namespace) -> int:
    order = random.Random(options.seed)
    in_flight = options.in_flight or 8
    num_done = num_unexcused = 0
    for model, own in _by_model(cases):
        order.shuffle(own)
        pages = _pages(own, in_flight)
        forced = forced_engine(model, _names(options), total_pages=pages)
        _check_suit(own, forced.model_config)
        for _ in force_cases(own, forced, in_flight=in_flight):
            num_done += 1
            _say_progress(num_done, len(cases))
        for line in tally_lines(model.name, forced.tally):
            _say(line)
        num_unexcused += len(forced.tally.disagreements)
    _say(f"{num_unexcused} differences that {_names(options)} does not explain")
    return 0 if num_unexcused == 0 else 1


def _by_model(cases: list[Case]) -> list[tuple[Path, list[Case]]]:
    ordered = sorted(cases, key=lambda case: str(case.model))
    groups = groupby(ordered, key=lambda case: case.model)
    return [(model, list(group)) for model, group in groups]


def _names(options: argparse.Namespace) -> EngineNames:
    return EngineNames(
        options.dtype, options.device, options.attention, options.quantization, options.graph_block
    )


def _pages(cases: Sequence[Case], in_flight: int) -> int:
    """For as many cases as are in flight."""
    return in_flight * max(case.geometry.num_pages for case in cases)


def _engine(
    model: Path, cases: Sequence[Case], options: argparse.Namespace, total_pages: int
) -> Engine:
    engine = _names(options).load(model, total_pages)
    _check_suit(cases, engine.model_config)
    return engine


def _check_suit(cases: Sequence[Case], config: ModelConfig) -> None:
    """Refuse a case that this model cannot run, by its name."""
    for case in cases:
        model, ids = case.model, (*case.prompt_ids, *case.output_ids)
        if case.family != config.family:
            raise ConfigurationError(
                f"case {case.id}: its family is {case.family}, but {model} is {config.family}"
            )
        if case.mask_id != config.mask_id:
            raise ConfigurationError(
                f"case {case.id}: its mask_id is {case.mask_id}, but {model} has {config.mask_id}"
            )
        if not all(0 <= token < config.vocab_size for token in ids):
            raise ConfigurationError(
                f"case {case.id}: its token ids must be in 0..{config.vocab_size - 1}"
            )


def _say_progress(num_done: int, number: int) -> None:
    if num_done % _CASES_PER_LINE == 0:
        _say(f"{num_done} of {number} cases run")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
