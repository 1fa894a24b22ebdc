"""Writes a report of a training run as one HTML page that works without a network.

    megatron-dta report-run RUN [--output report.html]

RUN is the --save folder of a run, finished or in progress. The page has curves of reward and loss, savings of prefix
sharing, trees of selected prompts with rewards and advantages on their branches, a search in their rollouts (train with
--save-rollouts-interval), seconds of each phase, timelines of pipeline stages (--timeline-dir), the balance of
data-parallel ranks, differences between sampler and trainer, savings of drafts, and all metrics.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_dta.common.command_line import CommandLineParser, check_at_least


def parse_arguments() -> argparse.Namespace:
    parser = CommandLineParser(__doc__)
    parser.add_argument("run", metavar="RUN", help="the --save folder of a run")
    parser.add_argument("--output", metavar="FILE", help="the page (default: report.html in RUN)")
    parser.add_argument("--steps", type=int, metavar="N", default=3, help="number of saved steps to show (%(default)s)")
    parser.add_argument(
        "--prompts",
        type=int,
        metavar="N",
        default=3,
        help="groups per step to show with trees and rollouts (%(default)s)",
    )
    parser.add_argument("--prompt", metavar="TEXT", help="show only groups whose id contains this text")
    arguments = parser.parse_args()
    check_at_least(arguments, 1, "steps", "prompts")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    # torch takes seconds to import, so flags are checked first.
    from megatron_dta.core.common.files import replacing
    from megatron_dta.extras.report import read_run, report_html

    run = read_run(arguments.run, arguments.steps)
    path = Path(arguments.output) if arguments.output else Path(arguments.run) / "report.html"
    text = report_html(run, arguments.prompts, arguments.prompt)
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    print(f"report: {path} ({len(text.encode()) / 1e6:.1f} MB)")
