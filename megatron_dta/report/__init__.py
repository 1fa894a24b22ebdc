"""Shows a run as one HTML page that needs no network; ``tools/report_run.py`` writes it."""

from megatron_dta.report.page import report_html
from megatron_dta.report.run_files import RunFiles, read_run

__all__ = ["RunFiles", "read_run", "report_html"]
