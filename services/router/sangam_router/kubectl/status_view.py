"""How a ``Status`` looks on a terminal: a table of workers, and a few lines below it."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sangam_router.kubectl.pods import PodInfo
from sangam_router.kubectl.routers import WatcherReport, WorkerReport
from sangam_router.kubectl.status import RouterState, Status, state_of

_NUMBERS = ("O_W", "PAGES", "RUN", "WAIT")
_COLUMNS = ("POD", "NODE", "BOOT", "DESIRED", "ROLE", *_NUMBERS, "VERSION", "STATE")
_WIDE = ("LONGEST", "ADDRESS", "PROTOCOL", "WORKER ID")
_UNKNOWN = "-"


def render(status: Status, *, is_wide: bool) -> RenderableType:
    """The table and what is to be said below it."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in _COLUMNS + (_WIDE if is_wide else ()):
        is_number = column in (*_NUMBERS, "LONGEST")
        table.add_column(
            column,
            justify="right" if is_number else "left",
            no_wrap=column != "STATE",
            overflow="fold",
        )
    is_known = status.report is not None
    for pod in status.pods:
        worker = status.worker(pod)
        state = state_of(pod, worker, is_known=is_known)
        table.add_row(*_cells(pod, worker, state, is_wide=is_wide), style=_style(pod, state))
    for worker in status.strays:
        table.add_row(*_stray_cells(worker, is_wide=is_wide), style="yellow")
    if not status.pods and not status.strays:
        return Group(Text("no workers"), *_lines(status))
    return Group(table, *_lines(status))


def _cells(pod: PodInfo, worker: WorkerReport | None, state: str, *, is_wide: bool) -> list[str]:
    boot = pod.boot_role.value if pod.boot_role is not None else "?"
    cells = [pod.name, pod.node or _UNKNOWN, boot, pod.wished_role, *_load_cells(worker), state]
    return cells + (_wide_cells(worker) if is_wide else [])


def _stray_cells(worker: WorkerReport, *, is_wide: bool) -> list[str]:
    cells = [
        worker.name or worker.worker_id,
        worker.node or _UNKNOWN,
        _UNKNOWN,
        worker.desired_role or _UNKNOWN,
        *_load_cells(worker),
        "registered, but its pod is gone",
    ]
    return cells + (_wide_cells(worker) if is_wide else [])


def _load_cells(worker: WorkerReport | None) -> list[str]:
    if worker is None:
        return [_UNKNOWN] * 6
    return [
        worker.role,
        str(worker.outstanding_prefill_tokens),
        f"{worker.free_pages}/{worker.total_pages}",
        str(worker.num_running),
        str(worker.num_waiting),
        worker.version or _UNKNOWN,
    ]


def _wide_cells(worker: WorkerReport | None) -> list[str]:
    if worker is None:
        return [_UNKNOWN] * len(_WIDE)
    longest = worker.max_sequence_tokens  # routers of an older version do not tell
    told = _UNKNOWN if longest is None else str(longest)
    return [told, worker.url, str(worker.protocol), worker.worker_id]


def _style(pod: PodInfo, state: str) -> str:
    if not pod.is_ready:
        return "red"
    return "" if state == "serving" else "yellow"


def _lines(status: Status) -> list[Text]:
    lines = [Text("")]
    if status.report is not None:
        waiting = status.report.waiting
        lines.append(
            Text(f"waiting   {waiting.num_prefills} for a prefill, {waiting.num_decodes} to decode")
        )
    lines += [Text(f"router    {_router_line(each)}") for each in status.routers]
    lines += [Text(problem, style="red") for problem in status.problems]
    return lines


def _router_line(router: RouterState) -> str:
    state = "ready" if router.pod.is_ready else router.pod.problem
    watcher = f", {_watcher(router.report.watcher)}" if router.report is not None else ""
    return f"{router.pod.name} ({router.pod.node or 'no node'}): {state}{watcher}"


def _watcher(watcher: WatcherReport) -> str:
    if not watcher.is_enabled:
        return "follows no pods"
    if not watcher.is_synced or watcher.problem:
        return f"does not follow the pods: {watcher.problem or 'not yet'}"
    if watcher.last_event_seconds_ago is None:
        return "follows the pods"
    return f"follows the pods (heard {watcher.last_event_seconds_ago:.0f} s ago)"
