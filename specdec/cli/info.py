"""``specdec info`` and ``specdec speedup``"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from . import options as opt
from .common import number, print_json, stdout


def info(json: opt.Json = False) -> None:
    """Show versions, devices and the backends of the ops."""
    from ..machine import backends, devices, versions

    data = {"versions": versions(), "devices": devices(), "backends": backends()}
    if json:
        print_json(data)
        return
    console = stdout(min_width=100)
    table = Table("package", "version", title="versions", title_justify="left")
    for name, version in data["versions"].items():
        table.add_row(name, version or "not installed")
    console.print(table)
    table = Table("device", "what", title="devices", title_justify="left")
    for entry in data["devices"]:
        rest = {k: v for k, v in entry.items() if k not in ("device", "name")}
        about = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in rest.items())
        table.add_row(entry["device"], f"{entry['name']}{', ' if about else ''}{about}")
    console.print(table)
    table = Table("op", "backend", "runs here", title="backends", title_justify="left")
    for op, by_backend in data["backends"].items():
        for name, failure in by_backend.items():
            table.add_row(op, name, "yes" if failure is None else f"no: {failure}")
    console.print(table)


def speedup(
    alpha: Annotated[
        list[float], typer.Option("--alpha", "-a", help="Acceptance rate; repeatable.")
    ] = (0.5, 0.6, 0.7, 0.8, 0.9),
    k: Annotated[list[int], typer.Option("--k", "-k", help="Drafted tokens; repeatable.")] = (
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        8,
    ),
    cost: Annotated[
        float, typer.Option(help="Time of one drafted token, in forwards of the target.")
    ] = 0.1,
    verify_cost: Annotated[
        float, typer.Option(help="Time of a verifying forward, in forwards of width 1.")
    ] = 1.0,
    max_k: Annotated[int, typer.Option(help="Largest K considered as the best.")] = 32,
    json: opt.Json = False,
) -> None:
    """Compute what speculation is worth, by theory: a table, and the best K."""
    from .. import theory

    alphas, ks = list(alpha), list(k)
    table = theory.speedup_table(alphas, ks, cost, verify_cost)
    best = [theory.best_k(a, cost, verify_cost=verify_cost, max_k=max_k) for a in alphas]
    best_speedup = [
        theory.speedup(a, b, cost, verify_cost) for a, b in zip(alphas, best, strict=True)
    ]
    break_even = [theory.break_even(n, cost, verify_cost) for n in ks]
    if json:
        print_json(
            {
                "cost": cost,
                "verify_cost": verify_cost,
                "alphas": alphas,
                "ks": ks,
                "speedup": table,
                "break_even": break_even,
                "best": [
                    {"alpha": a, "k": b, "speedup": s}
                    for a, b, s in zip(alphas, best, best_speedup, strict=True)
                ],
            }
        )
        return
    out = Table(
        title=f"speed-up: a drafted token costs {cost:g}, a verifying forward {verify_cost:g}",
        title_justify="left",
    )
    out.add_column("K", justify="right")
    for a in alphas:
        out.add_column(f"α = {a:g}", justify="right")
    out.add_column("pays from α", justify="right")
    for n, row, least in zip(ks, table, break_even, strict=True):
        out.add_row(f"{n}", *(f"{s:.2f}" for s in row), "never" if least is None else number(least))
    out.add_section()
    out.add_row("best K", *(f"{b}: {s:.2f}" for b, s in zip(best, best_speedup, strict=True)), "")
    stdout(min_width=100).print(out)
