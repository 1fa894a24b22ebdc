"""Writes what a training run did as one HTML page that opens without a network.

    python tools/report_run.py RUN [--output report.html]

RUN is the --save folder of a run, also of one that is still going on. The page has reward and loss curves, what
sharing saved, the trees of chosen prompts with rewards and advantages on their branches, their rollouts as text with
a search (train with --save-rollouts-interval), seconds of each phase, timelines of pipeline stages (--timeline-dir),
the balance of data-parallel ranks, how far sampler and trainer differ, what drafts saved, and every metric.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_dta.common.command_line import CommandLineParser, check_at_least


def parse_arguments() -> argparse.Namespace:
    parser = CommandLineParser(__doc__)
    parser.add_argument("run", metavar="RUN", help="the --save folder of a run")
    parser.add_argument("--output", metavar="FILE", help="the page (default: report.html in RUN)")
    parser.add_argument("--metrics-file", metavar="FILE", help="the metrics, if they are not in RUN")
    parser.add_argument("--timeline-dir", metavar="DIR", help="the timelines, if the run's settings do not say")
    parser.add_argument("--steps", type=int, metavar="N", default=3, help="saved steps that are shown (%(default)s)")
    parser.add_argument(
        "--prompts",
        type=int,
        metavar="N",
        default=3,
        help="groups of each such step whose trees and rollouts are shown (%(default)s)",
    )
    parser.add_argument("--prompt", metavar="TEXT", help="only groups whose id holds this text")
    arguments = parser.parse_args()
    check_at_least(arguments, 1, "steps", "prompts")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    # Here and not on top: a wrong flag is told before torch is imported, which takes seconds.
    from megatron_dta.common.files import replacing
    from megatron_dta.report import read_run, report_html

    run = read_run(arguments.run, arguments.metrics_file, arguments.timeline_dir, arguments.steps)
    path = Path(arguments.output) if arguments.output else Path(arguments.run) / "report.html"
    text = report_html(run, arguments.prompts, arguments.prompt)
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    print(f"report: {path} ({len(text.encode()) / 1e6:.1f} MB)")
