"""What a run may have beside the rings: servers, agents, teachers, experts on several ranks, reports and tools."""
