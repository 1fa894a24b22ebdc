"""Mixture-of-experts layers: router, token dispatch and grouped experts."""
