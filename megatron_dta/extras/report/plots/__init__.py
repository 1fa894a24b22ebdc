"""Pictures of what is planned and what ran: prefix trees with their segments, timelines of pipelines."""

from megatron_dta.extras.report.plots.timeline import plot_timelines
from megatron_dta.extras.report.plots.tree import leaf_spans, node_pieces, plot_tree

__all__ = ["leaf_spans", "node_pieces", "plot_timelines", "plot_tree"]
