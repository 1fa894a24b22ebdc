"""Shows a run as one HTML page that needs no network; ``megatron-dta report-run`` writes it."""

from megatron_dta.extras.report.page import report_html
from megatron_dta.extras.report.run_files import RunFiles, read_run

__all__ = ["RunFiles", "read_run", "report_html"]
