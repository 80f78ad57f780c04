"""``python -m sangam_worker.verify DIR [--in-flight N] [--split]``: are the golden cases exact?

Runs every case of a folder through scheduler and engine and prints ``N of M cases exact`` last.
Exit status: 0 all exact, 1 some are not, 2 the folder cannot be run.
"""

import argparse
import random
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from sangam_core.errors import ConfigurationError, SangamError
from sangam_worker.engine import Engine
from sangam_worker.engine_loading import load_engine
from sangam_worker.models.description import ModelConfig
from sangam_worker.verify import Case, first_difference, read_cases, run_cases


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        cases = read_cases(options.folder)
        num_exact = _verify(cases, options)
    except SangamError as error:
        sys.stderr.write(f"verify: {error}\n")
        return 2
    _say(f"{num_exact} of {len(cases)} cases exact")
    return 0 if num_exact == len(cases) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sangam_worker.verify", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of golden cases")
    parser.add_argument(
        "--in-flight", type=_positive, default=1, metavar="N", help="cases at once (default 1)"
    )
    parser.add_argument(
        "--split", action="store_true", help="prefill on one engine, decode on another"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the order in which cases start (default 0)"
    )
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _verify(cases: list[Case], options: argparse.Namespace) -> int:
    order = random.Random(options.seed)
    num_exact = num_done = 0
    by_model = sorted(cases, key=lambda case: str(case.model))
    for model, group in groupby(by_model, key=lambda case: case.model):
        own = list(group)
        order.shuffle(own)
        engines = [_engine(model, own, options.in_flight) for _ in range(1 + options.split)]
        for ran in run_cases(own, *engines, in_flight=options.in_flight):
            num_done += 1
            difference = first_difference(ran.case, ran.output_ids, ran.forwards)
            num_exact += difference is None
            if difference is not None:
                _say(f"{ran.case.id}: {difference}")
            if num_done % 20 == 0:
                _say(f"{num_done} of {len(cases)} cases run")
    return num_exact


def _engine(model: Path, cases: Sequence[Case], in_flight: int) -> Engine:
    """An engine whose pool holds as many cases as are in flight."""
    if not model.is_dir():
        raise ConfigurationError(f"{model}: there is no such folder")
    most_pages = max(case.geometry.num_pages for case in cases)
    engine = load_engine(str(model), total_pages=most_pages * in_flight)
    for case in cases:
        _check_suits(case, engine.model_config)
    return engine


def _check_suits(case: Case, config: ModelConfig) -> None:
    """Refuse a case that this model cannot run, by its name."""
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


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
