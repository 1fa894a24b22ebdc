"""Cross-checks of settings; each error names the flag and the fix."""
